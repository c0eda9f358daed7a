"""Mamba-2 (Dao and Gu 2024): one transition a per head, in [0, 1] or, as 2 a - 1, in [-1, 1]."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.config import added, renamed
from statetrack.layers.checks import check_eps, check_sizes, divide
from statetrack.layers.convolution import ShortConvolution
from statetrack.layers.hard_gates import check_gate, chosen_gates, gate_values, shown_hard
from statetrack.layers.initialisation import (
    log_uniform_steps,
    no_weight_decay,
    opposite_rows,
    signed_steps,
)
from statetrack.layers.mixer import Mixer, Packing, offsets, returns_states
from statetrack.layers.norm import RMSNorm, normalise
from statetrack.layers.padding import run_padded
from statetrack.layers.precision import at_least_float32, working_dtype
from statetrack.ops.checks import check_eigenvalues
from statetrack.ops.gated_linear_attention import gated_linear_attention


@dataclass(frozen=True)
class Mamba2Config:
    """Mamba-2 (Table 1, tab:LRNNs); `eigenvalues` "[-1,1]" is what App. E.4 of the paper leaves open."""

    heads: int = 4  # number of heads, which divides expand d_model; each has one gate
    # range of the eigenvalues: exp(Delta A) or 2 exp(Delta A) - 1
    eigenvalues: Literal["[0,1]", "[-1,1]"] = "[-1,1]"
    d_state: int = 64  # states of a channel, N
    expand: int = 2  # channels over d_model
    groups: int = 1  # number of groups of heads; those of a group share B and C
    convolution: int = 4  # width of the short convolution of x, B and C
    output_norm_eps: float = renamed("norm_eps", 1e-5)  # eps of the gated RMS norm of the outputs
    gate: Literal["smooth", "hard"] = added("smooth")  # "hard": gates reach their bounds (docs/length.md)

    def build(self, d_model: int, layers: int) -> "Mamba2":
        return Mamba2(self, d_model, layers)


class Mamba2State(NamedTuple):
    S: Tensor  # (B, H, N, P), float32
    convolution: Tensor  # (B, D + 2 G N, width - 1)


class Mamba2(Mixer):
    """S_t = a_t S_{t-1} + Delta_t B_t x_t^T,  y_t = S_t^T C_t + D x_t.

    a = exp(Delta A) or 2 exp(Delta A) - 1. Delta, A and D are numbers of a head, so the transition is a
    times the identity, in (0, 1) or (-1, 1). Shapes: y (B, T, d_model); the state S (B, H, N, P) in float32,
    N = d_state and P = expand d_model / H. Parameters have the names they have in mamba-ssm and transformers,
    so weights can be copied. Returns y and the state to go on from.

    >>> layer = Mamba2(Mamba2Config(heads=4, d_state=16), d_model=64)
    >>> y, state = layer(torch.randn(2, 16, 64))                     # B, T, d_model
    >>> y.shape, state.S.shape
    (torch.Size([2, 16, 64]), torch.Size([2, 4, 16, 32]))
    """

    packs = True

    def __init__(self, config: Mamba2Config, d_model: int, layers: int = 1):
        super().__init__()
        check_eigenvalues("Mamba2", config.eigenvalues)
        check_gate("Mamba2", config.gate)
        sizes = {"d_state": config.d_state, "expand": config.expand, "groups": config.groups}
        check_sizes("Mamba2", heads=config.heads, convolution=config.convolution, **sizes)
        check_eps("Mamba2", output_norm_eps=config.output_norm_eps)
        self.config, self.heads = config, config.heads
        self.width = config.expand * d_model
        divide("Mamba2", self.width, config.heads, "heads")
        divide("Mamba2", config.heads, config.groups, "groups")
        self.filtered = self.width + 2 * config.groups * config.d_state  # x, B and C
        self.in_proj = nn.Linear(d_model, self.width + self.filtered + config.heads, bias=False)
        self.conv1d = ShortConvolution(self.filtered, config.convolution, bias=True)
        self.dt_bias = no_weight_decay(nn.Parameter(log_uniform_steps(config.heads)))
        self.A_log = no_weight_decay(nn.Parameter(torch.arange(1, config.heads + 1).float().log()))
        self.D = no_weight_decay(nn.Parameter(torch.ones(config.heads)))
        self.norm = RMSNorm(self.width, eps=config.output_norm_eps)
        self.out_proj = nn.Linear(self.width, d_model, bias=False)
        with torch.no_grad():
            # the residual stream sums the outputs of all blocks
            self.out_proj.weight /= math.sqrt(layers)
            if config.eigenvalues == "[-1,1]":
                self.dt_bias.copy_(signed_steps(self.A_log.exp()))
                opposite_rows(self.in_proj.weight[-config.heads :])

    def forward(
        self,
        x: Tensor,
        state: Mamba2State | None = None,
        *,
        packing: Packing | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Mamba2State | None]:
        if attention_mask is not None:
            return run_padded("Mamba2", self, x, attention_mask, state, packing)
        z, u, B, C, delta, convolution = self._controls(x, state, packing)
        o, S = gated_linear_attention(
            C,
            B,
            delta[..., None] * u,
            **self._gates(delta),
            scale=1.0,
            initial_state=None if state is None else state.S,
            output_final_state=returns_states(packing),
            **offsets(packing),
        )
        y = (o + self.D[:, None] * u).flatten(-2) * F.silu(at_least_float32(z))
        y = self.out_proj(normalise(self.norm, y, working_dtype(x)))
        return y, None if convolution is None or S is None else Mamba2State(S, convolution)

    def _controls(self, x: Tensor, state: Mamba2State | None, packing: Packing | None = None):
        """z (B, T, D); u (B, T, H, P); B, C (B, T, H, N); the step sizes delta (B, T, H); next past."""
        config = self.config
        z, xBC, dt = self.in_proj(x).split([self.width, self.filtered, self.heads], dim=-1)
        options = {} if packing is None else {"packing": packing}
        past = None if state is None else state.convolution
        xBC, convolution = self.conv1d(xBC, past, silu=True, **options)
        shared = config.groups * config.d_state
        u, B, C = xBC.split([self.width, shared, shared], dim=-1)
        u = u.unflatten(-1, (self.heads, -1))
        B, C = (
            y.unflatten(-1, (config.groups, 1, -1))
            .expand(-1, -1, -1, self.heads // config.groups, -1)
            .flatten(2, 3)
            for y in (B, C)
        )
        delta = F.softplus(at_least_float32(dt) + self.dt_bias)
        return z, u, B, C, delta, convolution

    def _gates(self, delta: Tensor) -> dict[str, Tensor]:
        """The gates (B, T, H) as the op takes them: `g`, their logarithm, or `a`, their value."""
        g = -delta * at_least_float32(self.A_log).exp()
        # 2 exp(g) - 1 with one rounding
        gates = {"g": g} if self.config.eigenvalues == "[0,1]" else {"a": 1 + 2 * torch.expm1(g)}
        return chosen_gates(self.config.gate, gates)

    def extra_repr(self) -> str:
        """The eigenvalue range, the heads and the number of states of each channel."""
        shown = f"eigenvalues={self.config.eigenvalues}, heads={self.heads}, d_state={self.config.d_state}"
        return shown + shown_hard(self.config)

    @torch.no_grad()
    def transition_eigenvalues(self, x: Tensor, state: Mamba2State | None = None) -> Tensor:
        """(B, T, H, N): the transition of a head is its gate times the identity."""
        *_, delta, _ = self._controls(x, state)
        a = gate_values(self._gates(delta))
        return a[..., None].expand(*a.shape, self.config.d_state)
