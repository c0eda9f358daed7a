"""HGRN2 (Qin et al. 2024): a forget gate per key channel, which is also the key; in [0, 1] or in [-1, 1]."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.config import added, renamed
from statetrack.layers.checks import check_eps, check_sizes, divide
from statetrack.layers.hard_gates import check_gate, chosen_gates, gate_values, hard_share, shown_hard
from statetrack.layers.mixer import Mixer, Packing, offsets, returns_states
from statetrack.layers.norm import RMSNorm, normalise
from statetrack.layers.padding import run_padded
from statetrack.layers.precision import at_least_float32, working_dtype
from statetrack.ops.checks import check_eigenvalues
from statetrack.ops.gated_linear_attention import gated_linear_attention


@dataclass(frozen=True)
class HGRN2Config:
    """HGRN2 without the lower bounds of its gates, which the layers of the paper's models share."""

    heads: int = 4  # number of heads, each with a state (K, K), K = d_model / heads
    eigenvalues: Literal["[0,1]", "[-1,1]"] = "[-1,1]"  # range of the eigenvalues: gates s or 2 s - 1
    output_norm_eps: float = renamed("norm_eps", 1e-5)  # eps of the RMS norm of the outputs
    gate: Literal["smooth", "hard"] = added("smooth")  # "hard": gates reach their bounds (docs/length.md)

    def build(self, d_model: int, layers: int) -> "HGRN2":
        return HGRN2(self, d_model)


class HGRN2State(NamedTuple):
    S: Tensor  # (B, H, K, K), float32


class HGRN2(Mixer):
    """S_t = diag(a_t) S_{t-1} + (1 - s_t) i_t^T,  o_t = S_t^T q_t / sqrt(K), a = s or 2 s - 1, s = sigmoid.

    Shapes: x, y (B, T, d_model); the state S (B, H, K, K) in float32, K = d_model / H; a gate per key
    channel, in (0, 1) for "[0,1]" and in (-1, 1) for "[-1,1]". What is written is 1 - s in both ranges: in
    [-1,1] a step that flips the state (s = 0) writes with weight 1 and one that keeps it (s = 1) with 0. With
    i = 1 the state is then 0, 1, 0, 1, ... along the flips. Returns y and the state to go on from.

    >>> layer = HGRN2(HGRN2Config(heads=4), d_model=64)
    >>> y, state = layer(torch.randn(2, 16, 64))                     # B, T, d_model
    >>> y.shape, state.S.shape
    (torch.Size([2, 16, 64]), torch.Size([2, 4, 16, 16]))
    """

    packs = True

    def __init__(self, config: HGRN2Config, d_model: int):
        super().__init__()
        check_eigenvalues("HGRN2", config.eigenvalues)
        check_gate("HGRN2", config.gate)
        check_sizes("HGRN2", heads=config.heads)
        check_eps("HGRN2", output_norm_eps=config.output_norm_eps)
        self.config, self.heads = config, config.heads
        self.K = divide("HGRN2", d_model, config.heads, "heads")
        self.to_q, self.to_f, self.to_i, self.to_out = (
            nn.Linear(d_model, d_model, bias=False) for _ in range(4)
        )
        self.norm = RMSNorm(d_model, eps=config.output_norm_eps)

    def forward(
        self,
        x: Tensor,
        state: HGRN2State | None = None,
        *,
        packing: Packing | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, HGRN2State | None]:
        if attention_mask is not None:
            return run_padded("HGRN2", self, x, attention_mask, state, packing)
        q, v = (y.unflatten(-1, (self.heads, self.K)) for y in (F.silu(self.to_q(x)), self.to_i(x)))
        logits = self._logits(x)
        o, S = gated_linear_attention(
            q,
            self._written(logits),
            v,
            **self._gates(logits),
            initial_state=None if state is None else state.S,
            output_final_state=returns_states(packing),
            **offsets(packing),
        )
        y = self.to_out(normalise(self.norm, o.flatten(-2), working_dtype(x)))
        return y, None if S is None else HGRN2State(S)

    def _logits(self, x: Tensor) -> Tensor:
        return at_least_float32(self.to_f(x)).unflatten(-1, (self.heads, self.K))

    def _gates(self, logits: Tensor) -> dict[str, Tensor]:
        """The gates as the op takes them: `g`, their logarithm, or `a`, their value."""
        if self.config.eigenvalues == "[0,1]":
            gates = {"g": F.logsigmoid(logits)}
        else:
            gates = {"a": torch.tanh(logits / 2)}  # 2 sigmoid(x) - 1
        return chosen_gates(self.config.gate, gates)

    def _written(self, logits: Tensor) -> Tensor:
        """1 - s: nothing where the state is kept exactly."""
        if self.config.gate == "hard":
            return 1 - hard_share(torch.sigmoid(logits), self.config.eigenvalues == "[-1,1]")
        return torch.sigmoid(-logits)

    def extra_repr(self) -> str:
        """The eigenvalue range and the heads."""
        shown = f"eigenvalues={self.config.eigenvalues}, heads={self.heads}, K={self.K}"
        return shown + shown_hard(self.config)

    @torch.no_grad()
    def transition_eigenvalues(self, x: Tensor, state: HGRN2State | None = None) -> Tensor:
        """(B, T, H, K): the gates, the diagonal of the transition."""
        return gate_values(self._gates(self._logits(x)))
