"""GLA (Yang et al. 2024): a gate s per key channel, in [0, 1] or, as 2 s - 1, in [-1, 1]."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.config import added
from statetrack.layers.checks import check_eps, check_sizes, divide
from statetrack.layers.hard_gates import check_gate, chosen_gates, gate_values, shown_hard
from statetrack.layers.mixer import Mixer, Packing, offsets, returns_states
from statetrack.layers.norm import RMSNorm, normalise
from statetrack.layers.padding import run_padded
from statetrack.layers.precision import at_least_float32, working_dtype
from statetrack.ops.checks import check_eigenvalues
from statetrack.ops.gated_linear_attention import gated_linear_attention

# n in s = sigmoid(x)^(1/n). The paper's 16 keeps gates near 1; in [-1,1] it would put -1 out of reach, since
# sigmoid(x)^(1/16) falls to 0.05 at x = -48.
NORMALISER = {"[0,1]": 16.0, "[-1,1]": 1.0}


@dataclass(frozen=True)
class GLAConfig:
    """GLA (Table 1, tab:LRNNs); `eigenvalues` "[-1,1]" is what App. E.4 of the paper leaves open."""

    heads: int = 4  # number of heads, each with a state of its own
    eigenvalues: Literal["[0,1]", "[-1,1]"] = "[-1,1]"  # range of the eigenvalues: gates s or 2 s - 1
    head_dim: int | None = None  # width of a key; half of d_model / heads when None
    value_dim: int | None = None  # width of a value; d_model / heads when None
    gate_rank: int = 16  # the gates are a linear map of this rank
    head_norm_eps: float = 1e-5  # eps of the RMS norm of each head's output
    gate: Literal["smooth", "hard"] = added("smooth")  # "hard": gates reach their bounds (docs/length.md)

    def build(self, d_model: int, layers: int) -> "GLA":
        return GLA(self, d_model)


class GLAState(NamedTuple):
    S: Tensor  # (B, H, K, V), float32


class GLA(Mixer):
    """S_t = diag(a_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t / sqrt(K), a = s or 2 s - 1.

        q, k, v = W x  by head      s_t = sigmoid(W_2 W_1 x_t + b)^(1/n)      y = W_out (norm(o) silu(W_g x))

    Shapes: x, y (B, T, d_model); the state S (B, H, K, V) in float32; a gate per key channel. The range of a
    is that of the eigenvalues: a = s and n = 16 for "[0,1]", a = 2 s - 1 and n = 1 for "[-1,1]". Returns y
    and the state to go on from.

    >>> layer = GLA(GLAConfig(heads=4), d_model=64)
    >>> y, state = layer(torch.randn(2, 16, 64))                     # B, T, d_model
    >>> y.shape, state.S.shape
    (torch.Size([2, 16, 64]), torch.Size([2, 4, 8, 16]))
    """

    packs = True

    def __init__(self, config: GLAConfig, d_model: int):
        super().__init__()
        check_eigenvalues("GLA", config.eigenvalues)
        check_gate("GLA", config.gate)
        sizes = {"head_dim": config.head_dim, "value_dim": config.value_dim, "gate_rank": config.gate_rank}
        check_sizes("GLA", heads=config.heads, **sizes)
        check_eps("GLA", head_norm_eps=config.head_norm_eps)
        self.config, self.heads = config, config.heads
        width = divide("GLA", d_model, config.heads, "heads")
        self.K, self.V = config.head_dim or max(1, width // 2), config.value_dim or width
        keys, values = self.heads * self.K, self.heads * self.V
        self.to_q = nn.Linear(d_model, keys, bias=False)
        self.to_k = nn.Linear(d_model, keys, bias=False)
        self.to_v = nn.Linear(d_model, values, bias=False)
        self.to_gate = nn.Sequential(
            nn.Linear(d_model, config.gate_rank, bias=False), nn.Linear(config.gate_rank, keys)
        )
        self.output_gate = nn.Linear(d_model, values, bias=False)
        self.norm = RMSNorm(self.V, eps=config.head_norm_eps)
        self.to_out = nn.Linear(values, d_model, bias=False)

    def forward(
        self,
        x: Tensor,
        state: GLAState | None = None,
        *,
        packing: Packing | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, GLAState | None]:
        if attention_mask is not None:
            return run_padded("GLA", self, x, attention_mask, state, packing)
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (self.to_q(x), self.to_k(x), self.to_v(x)))
        o, S = gated_linear_attention(
            q,
            k,
            v,
            **self._gates(x),
            initial_state=None if state is None else state.S,
            output_final_state=returns_states(packing),
            **offsets(packing),
        )
        o = normalise(self.norm, o, working_dtype(x)).flatten(-2)
        y = self.to_out(o * F.silu(self.output_gate(x)))
        return y, None if S is None else GLAState(S)

    def _gates(self, x: Tensor) -> dict[str, Tensor]:
        """The gates (B, T, H, K) as the op takes them: `g`, their logarithm, or `a`, their value."""
        logits = at_least_float32(self.to_gate(x)).unflatten(-1, (self.heads, self.K))
        g = F.logsigmoid(logits) / NORMALISER[self.config.eigenvalues]
        gates = {"g": g} if self.config.eigenvalues == "[0,1]" else {"a": 2 * g.exp() - 1}
        return chosen_gates(self.config.gate, gates)

    def extra_repr(self) -> str:
        """The eigenvalue range, and the widths of keys and values."""
        shown = f"eigenvalues={self.config.eigenvalues}, heads={self.heads}, K={self.K}, V={self.V}"
        return shown + shown_hard(self.config)

    @torch.no_grad()
    def transition_eigenvalues(self, x: Tensor, state: GLAState | None = None) -> Tensor:
        """(B, T, H, K): the gates, the diagonal of the transition."""
        return gate_values(self._gates(x))
