"""Mamba-3 (Lahoti et al. 2026), single input and output: turning states and a trapezoidal step."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.config import added
from statetrack.errors import UserError
from statetrack.layers.checks import check_eps, check_sizes, divide
from statetrack.layers.hard_gates import (
    check_gate,
    chosen_gates,
    gate_values,
    hard_rate,
    hard_turn,
    shown_hard,
)
from statetrack.layers.initialisation import (
    inverse_softplus,
    log_uniform_steps,
    no_weight_decay,
    opposite_rows,
    signed_steps,
)
from statetrack.layers.mixer import Mixer, Packing, offsets, returns_states
from statetrack.layers.norm import RMSNorm
from statetrack.layers.padding import run_padded
from statetrack.layers.precision import at_least_float32
from statetrack.ops.checks import DISC, check_eigenvalues
from statetrack.ops.gated_linear_attention import gated_linear_attention

SLOWEST = 1e-4  # the smallest |A|


@dataclass(frozen=True)
class Mamba3Config:
    """Mamba-3 without its multi-input variant; `eigenvalues` "unit-circle" is the published model.

    "[0,1]" and "[-1,1]" have real eigenvalues and no rotations.
    """

    heads: int = 4  # number of heads, which divides expand d_model; each has one gate
    # range of the eigenvalues; rotations in "unit-circle" only
    eigenvalues: Literal["[0,1]", "[-1,1]", "unit-circle"] = "unit-circle"
    d_state: int = 64  # states of a channel, N
    expand: int = 2  # channels over d_model
    groups: int = 1  # number of groups of heads; those of a group share B and C
    rotated: float = 0.5  # share of the state channels that turn, in "unit-circle": 0.5 or 1
    bc_norm_eps: float = 1e-5  # eps of the RMS norms of B and C
    gate: Literal["smooth", "hard"] = added("smooth")  # "hard": gates reach their bounds (docs/length.md)

    def build(self, d_model: int, layers: int) -> "Mamba3":
        return Mamba3(self, d_model, layers)


class Mamba3State(NamedTuple):
    S: Tensor  # (B, H, N, P), float32
    B: Tensor  # (B, H, N), of the last token, which the next step writes once more
    u: Tensor  # (B, H, P), of the last token


class Mamba3(Mixer):
    """A linear RNN with turning states and a trapezoidal step, which writes the last token and this one.

        S_t = a_t R_t (S_{t-1} + (1 - l_t) Delta_t B_{t-1} u_{t-1}^T) + l_t Delta_t B_t u_t^T
        y_t = S_t^T C_t + D u_t

        Delta = softplus(. + bias)     A = -h(.), h(x) = 1 + x or 1 / (1 - x) below 0     l = sigmoid(.)
        "unit-circle"                  a = exp(Delta A), R turns pairs of channels by -Delta pi tanh(.)
        "[0,1]", "[-1,1]"              a = exp(Delta A) or 2 exp(Delta A) - 1, R = I

    With `gate="hard"` states can be kept and turned exactly (docs/length.md).
    All dots are linear in x. B and C are normalised and have a bias per head; the output is W (y silu(z)).
    Shapes: x (B, T, d_model); the state S (B, H, N, P), P = expand d_model / H. Parameters have the names and
    shapes they have in mamba-ssm, so weights can be copied (its `is_outproj_norm` is False).

    The two writes of a token are one: when a_t R_t comes, B_{t-1} u_{t-1}^T has the weight
    l_{t-1} Delta_{t-1} + (1 - l_t) Delta_t. The op writes that sum at once; what this adds to the output of
    the same step, (1 - l_{t+1}) Delta_{t+1} (B_t . C_t) u_t, is taken off again (docs/internals/gates.md).

    >>> layer = Mamba3(Mamba3Config(heads=4), d_model=64)
    >>> y, state = layer(torch.randn(2, 16, 64))                     # B, T, d_model
    >>> y.shape, state.S.shape
    (torch.Size([2, 16, 64]), torch.Size([2, 4, 64, 32]))
    """

    packs = True

    def __init__(self, config: Mamba3Config, d_model: int, layers: int = 1):
        super().__init__()
        self.config, self.heads = config, config.heads
        self.width = config.expand * d_model
        self.angles = _check(config, self.width)
        self.shared = config.groups * config.d_state
        self.parts = [self.width, self.width, self.shared, self.shared, *[config.heads] * 3, self.angles]
        self.in_proj = nn.Linear(d_model, sum(self.parts), bias=False)
        self.dt_bias = no_weight_decay(nn.Parameter(log_uniform_steps(config.heads)))
        # the axis of length 1 is the rank of the multi-input variant in mamba-ssm
        biases = (nn.Parameter(torch.ones(config.heads, 1, config.d_state)) for _ in "BC")
        self.B_bias, self.C_bias = map(no_weight_decay, biases)
        self.B_norm, self.C_norm = (RMSNorm(config.d_state, eps=config.bc_norm_eps) for _ in "BC")
        self.D = no_weight_decay(nn.Parameter(torch.ones(config.heads)))
        self.out_proj = nn.Linear(self.width, d_model, bias=False)
        with torch.no_grad():
            # the residual stream sums the outputs of all blocks
            self.out_proj.weight /= math.sqrt(layers)
            if config.eigenvalues == "[-1,1]":
                self.dt_bias.copy_(signed_steps(torch.ones(config.heads)))  # A starts near -1
                steps = sum(self.parts[:4])
                opposite_rows(self.in_proj.weight[steps : steps + config.heads])
            if self.angles and config.gate == "hard":
                # most angles start between 0 and pi: at the published steps of 0.001 to 0.1 all would be 0
                self.dt_bias.copy_(inverse_softplus(torch.full((config.heads,), 0.5)))
                self.in_proj.weight[-self.angles :] *= 4

    def forward(
        self,
        x: Tensor,
        state: Mamba3State | None = None,
        *,
        packing: Packing | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Mamba3State | None]:
        if attention_mask is not None:
            return run_padded("Mamba3", self, x, attention_mask, state, packing)
        z, u, B, C, now, before, gates = self._controls(x)
        later = _later(before, packing)
        o, S = gated_linear_attention(
            C,
            B,
            (now + later)[..., None] * u,
            **gates,
            scale=1.0,
            initial_state=None if state is None else _with_last_token(state, before, packing),
            output_final_state=returns_states(packing),
            **offsets(packing),
        )
        extra = later * (at_least_float32(B) * at_least_float32(C)).sum(-1)
        y = o + (self.D - extra)[..., None] * u
        y = self.out_proj((y.flatten(-2) * F.silu(at_least_float32(z))).to(x.dtype))
        if S is None:
            return y, None
        last_B, last_u = (_last(name, value, state, packing) for name, value in (("B", B), ("u", u)))
        return y, Mamba3State(S, last_B, last_u)

    def _controls(self, x: Tensor):
        """z (B, T, D); u (B, T, H, P); B, C (B, T, H, N); the weights (B, T, H) with which this token and the
        last one are written; the gates and angles as the op takes them.
        """
        z, u, B, C, dt, A, trapezoid, angle = self.in_proj(x).split(self.parts, dim=-1)
        delta, rate = self._steps_and_rates(dt, A)
        u = u.unflatten(-1, (self.heads, -1))
        B = self._per_head(B, self.B_norm, self.B_bias)
        C = self._per_head(C, self.C_norm, self.C_bias)
        share = torch.sigmoid(at_least_float32(trapezoid))
        gates = self._gates(delta, rate, angle)
        return z, u, B, C, share * delta, (1 - share) * delta, gates

    def _per_head(self, B: Tensor, norm: RMSNorm, bias: Tensor) -> Tensor:
        """B or C of the groups (B, T, G N), normalised, as (B, T, H, N) with the bias of every head."""
        groups, N = self.config.groups, self.config.d_state
        normed = norm(B.unflatten(-1, (groups, N)))[..., None, :]
        B = (normed + bias.view(groups, self.heads // groups, N)).flatten(2, 3).to(B.dtype)
        # in mamba-ssm channels 2 i and 2 i + 1 are a pair, in our op i and i + N/2
        return B.unflatten(-1, (-1, 2)).mT.flatten(-2) if self.angles else B

    def _steps_and_rates(self, dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
        """The step sizes Delta and the decay rates |A|, (B, T, H)."""
        delta = F.softplus(at_least_float32(dt) + self.dt_bias)
        return delta, _heavy_tail(at_least_float32(A)).clamp(min=SLOWEST)

    def steps_and_rates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The step sizes Delta and the decay rates |A| of every head on x (B, T, d_model), both (B, T, H)."""
        _, _, _, _, dt, A, *_ = self.in_proj(x).split(self.parts, dim=-1)
        return self._steps_and_rates(dt, A)

    def _gates(self, delta: Tensor, rate: Tensor, angle: Tensor) -> dict[str, Tensor]:
        """The gates (B, T, H) by their logarithm or value, and the angles (B, T, H, N/2) in "unit-circle"."""
        hard = self.config.gate == "hard"
        if not self.angles:
            g = -delta * rate
            gates = {"a": 1 + 2 * torch.expm1(g)} if self.config.eigenvalues == "[-1,1]" else {"g": g}
            return chosen_gates(self.config.gate, gates)
        turn = torch.tanh(at_least_float32(angle))[:, :, None] * delta[..., None]
        turn = -math.pi * (hard_turn(turn) if hard else turn)
        angles = F.pad(turn, (0, self.config.d_state // 2 - self.angles))
        return {"g": -delta * (hard_rate(rate) if hard else rate), "angle": angles}

    def extra_repr(self) -> str:
        """The eigenvalue range, the heads, the states of each channel and how many pairs of them turn."""
        shown = f"eigenvalues={self.config.eigenvalues}, heads={self.heads}, d_state={self.config.d_state}"
        turning = f", turning_pairs={self.angles}" if self.angles else ""
        return shown + turning + shown_hard(self.config)

    @torch.no_grad()
    def transition_eigenvalues(self, x: Tensor, state: Mamba3State | None = None) -> Tensor:
        """(B, T, H, N): the gate of the head; in "unit-circle" times exp(+-i angle), complex."""
        *_, gates = self._controls(x)
        a = gate_values(gates)[..., None]
        if "angle" not in gates:
            return a.expand(*a.shape[:-1], self.config.d_state)
        angle = torch.cat([gates["angle"], -gates["angle"]], dim=-1)
        return torch.polar(a.expand_as(angle), angle)


def _check(config: Mamba3Config, width: int) -> int:
    """Refuse sizes that do not fit; the number of pairs that turn."""
    check_eigenvalues("Mamba3", config.eigenvalues, DISC)
    check_gate("Mamba3", config.gate)
    sizes = {"d_state": config.d_state, "expand": config.expand, "groups": config.groups}
    check_sizes("Mamba3", heads=config.heads, **sizes)
    check_eps("Mamba3", bc_norm_eps=config.bc_norm_eps)
    divide("Mamba3", width, config.heads, "heads")
    divide("Mamba3", config.heads, config.groups, "groups")
    if config.eigenvalues != "unit-circle":
        return 0
    if config.rotated not in (0.5, 1):
        raise UserError(f"Mamba3: rotated is {config.rotated!r}, expected 0.5 or 1.")
    pairs = int(config.d_state * config.rotated) // 2
    if config.d_state % 2 or pairs == 0:
        raise UserError(
            f"Mamba3: d_state = {config.d_state} with rotated = {config.rotated} has no pairs to turn. "
            "Choose an even d_state, at least 4, or 2 with rotated = 1."
        )
    return pairs


def _heavy_tail(x: Tensor) -> Tensor:
    """1 + x above 0, and 1 / (1 - x) below: positive, with a continuous derivative."""
    return x.clamp(min=0) + (1 - x.clamp(max=0)).reciprocal()


def inverse_heavy_tail(y: Tensor) -> Tensor:
    """x such that the decay rate of a logit x is y."""
    return torch.where(y >= 1, y - 1, 1 - 1 / y)


def _later(before: Tensor, packing: Packing | None) -> Tensor:
    """The weight (B, T, H) with which the next step writes each token again: 0 at the end of a sequence."""
    later = torch.cat([before[:, 1:], torch.zeros_like(before[:, :1])], dim=1)
    if packing is None or later.shape[1] == 0:
        return later
    ends = torch.zeros_like(before[0, :, 0], dtype=torch.bool)
    # an empty sequence names the last token of the one before it, or, at the start, that of the row
    ends[packing.cu_seqlens[1:].long() - 1] = True
    return later.masked_fill(ends[:, None], 0.0)


def _with_last_token(state: Mamba3State, before: Tensor, packing: Packing | None) -> Tensor:
    """The state with what the first step writes of the token before it; of an empty sequence as it is."""
    if before.shape[1] == 0:
        return state.S
    if packing is None:
        weight = before[:, 0]
    else:
        cu_seqlens = packing.cu_seqlens.long()
        first = cu_seqlens[:-1].clamp(max=before.shape[1] - 1)
        weight = before[0, first].masked_fill((cu_seqlens.diff() == 0)[:, None], 0.0)
    return state.S + (weight[..., None] * state.B)[..., None] * state.u[..., None, :]


def _last(name: str, value: Tensor, state: Mamba3State | None, packing: Packing | None) -> Tensor:
    """B or u of the last token of every sequence; of an empty one that of the given state, or 0."""
    value = at_least_float32(value)
    if packing is None and value.shape[1]:
        return value[:, -1]
    sequences = len(value) if packing is None else packing.cu_seqlens.numel() - 1
    old = value.new_zeros(sequences, *value.shape[2:]) if state is None else getattr(state, name)
    if packing is None or value.shape[1] == 0:
        return old
    cu_seqlens = packing.cu_seqlens.long()
    empty = (cu_seqlens.diff() == 0).view(-1, *[1] * (value.ndim - 2))
    return torch.where(empty, old, value[0, cu_seqlens[1:] - 1])


__all__ = ["Mamba3", "Mamba3Config", "Mamba3State"]
