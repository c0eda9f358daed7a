"""DeltaNet, Gated DeltaNet (`gated`), DeltaProduct (`householders`), and DeltaNet with rotations."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.config import added
from statetrack.errors import UserError, unknown_name
from statetrack.layers.checks import check_eps, check_sizes, divide
from statetrack.layers.convolution import ShortConvolution
from statetrack.layers.convolved_qkv import ACTIVATIONS, ConvolvedQKV
from statetrack.layers.fusion import joined_product, joins, may_read, recomputes
from statetrack.layers.hard_gates import check_gate, chosen_gates, gate_values, hard_turn, shown_hard
from statetrack.layers.initialisation import log_uniform_steps, no_weight_decay
from statetrack.layers.mixer import Packing, offsets, returns_states
from statetrack.layers.norm import RMSNorm, normalise
from statetrack.layers.norm_loss import report_norm_loss
from statetrack.layers.padding import run_padded
from statetrack.layers.precision import at_least_float32, working_dtype
from statetrack.layers.spectra import delta_spectrum
from statetrack.ops.checks import DISC, check_eigenvalues
from statetrack.ops.convolved_delta_rule import convolved_delta_rule
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.delta_rule.reference import BETAS, beta_values

GATES = {"silu": F.silu, "sigmoid": torch.sigmoid}  # of the output


@dataclass(frozen=True)
class DeltaNetConfig:
    """What a DeltaNet layer is built from (Table 1, tab:LRNNs).

        DeltaNetConfig(heads=4, eigenvalues="[-1,1]")                   DeltaNet
        DeltaNetConfig(gated=True, output_gate=True)                    Gated DeltaNet
        DeltaNetConfig(householders=2)                                  DeltaProduct_2
        DeltaNetConfig(eigenvalues="unit-circle")                       reflections and rotations

    `eigenvalues` picks the column of Table 2 (tab:eigenvalue_range): beta in (0, 1) for "[0,1]", in (0, 2)
    for "[-1,1]". "unit-circle" is ours: beta in (0, 2), and pairs of key channels turn by angles that depend
    on the input. In fla these are num_heads, allow_neg_eigval, use_gate, num_householder: docs/porting.md.
    With `value_heads` the state is (B, value_heads, K, V).
    """

    heads: int = 4  # number of heads, each with a state of its own
    # range of the eigenvalues: beta in (0, 1), beta in (0, 2), or that with rotations
    eigenvalues: Literal["[0,1]", "[-1,1]", "unit-circle"] = "[-1,1]"
    head_dim: int | None = None  # width of a key; d_model / heads when None
    value_dim: int | None = None  # width of a value; that of the key when None
    convolution: int = 4  # width of the short convolution on q, k and v; 0 for none
    qk_activation: Literal["silu", "relu", "identity"] = "silu"  # of q and k before they are normalised
    output_gate: bool = False  # whether each output is multiplied by a gate of the input
    gated: bool = False  # Gated DeltaNet: every transition is multiplied by a decay in (0, 1)
    householders: int = 1  # DeltaProduct: number of generalised Householder factors per token
    head_norm_eps: float = added(1e-5)  # eps of the RMS norm of each head's output
    signed_gate: bool = added(False)  # the gate is 2 exp(g) - 1 instead of exp(g), except in "[0,1]"
    # "hard": beta reaches its bounds, so that a reflection or an identity can be exact (docs/length.md)
    beta: Literal["sigmoid", "hard"] = added("sigmoid")
    # heads of v, beta and the decay, a multiple of the heads of q and k, which are shared; `heads` when None
    value_heads: int | None = added(None)
    conv_bias: bool = added(False)  # whether the short convolutions have a bias
    gate_activation: Literal["silu", "sigmoid"] = added("silu")  # of the output gate
    # "hard": the decay of `gated` reaches its bounds, and angles are 0 or pi exactly where they are near
    gate: Literal["smooth", "hard"] = added("smooth")

    def build(self, d_model: int, layers: int) -> "DeltaNet":
        return DeltaNet(self, d_model)


class DeltaNetState(NamedTuple):
    S: Tensor  # (B, H, K, V), float32
    convolution: tuple[Tensor, ...] | None  # the last inputs of the three convolutions


class DeltaNet(ConvolvedQKV):
    """S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,  o_t = S_t^T q_t / sqrt(K), ||k_t|| = 1.

        q, k, v = silu(conv(W x))  by head        beta_t = sigmoid(w x_t), or 2 sigmoid(w x_t) for "[-1,1]"
        y_t = W_out norm(o_t)                     Gated DeltaNet: S_{t-1} is multiplied by exp(g_t) in (0, 1),
                                                  or by 2 exp(g_t) - 1 with `signed_gate`

    With `beta="hard"`, clamp(1.02 sigmoid(z) - 0.01, 0, 1) takes the place of sigmoid(z), z = w x_t;
    `gate="hard"` does the like for the decay and the angles (docs/length.md).
    Shapes: x, y (B, T, d_model); the state S (B, H, K, V) in float32, K = head_dim, V = value_dim. The
    transition has eigenvalue 1 - beta_t once and 1 otherwise: in [0, 1], or in [-1, 1]. In "unit-circle"
    S_{t-1} is turned first, channels i and i + K/2 by the angle pi tanh(w_i x_t). Returns y and the state to
    go on from: feed a sequence in any pieces, each with the state of the piece before. With
    `attention_mask` (B, T), True at real steps, padding on either side is left out, and y is 0 there.

    >>> layer = DeltaNet(DeltaNetConfig(heads=4, eigenvalues="[-1,1]"), d_model=64)
    >>> y, state = layer(torch.randn(2, 16, 64))                     # B, T, d_model
    >>> next_y, state = layer(torch.randn(2, 1, 64), state)          # one more step
    >>> y.shape, state.S.shape
    (torch.Size([2, 16, 64]), torch.Size([2, 4, 16, 16]))
    """

    packs = True
    reports_norm_loss = True

    def __init__(self, config: DeltaNetConfig, d_model: int):
        super().__init__()
        check_eigenvalues("DeltaNet", config.eigenvalues, DISC)
        if config.qk_activation not in ACTIVATIONS:
            raise unknown_name("DeltaNet: qk_activation", config.qk_activation, ACTIVATIONS)
        if config.beta not in BETAS:
            raise unknown_name("DeltaNet: beta", config.beta, BETAS)
        check_sizes(
            "DeltaNet",
            heads=config.heads,
            head_dim=config.head_dim,
            value_dim=config.value_dim,
            householders=config.householders,
            value_heads=config.value_heads,
        )
        if config.gate_activation not in GATES:
            raise unknown_name("DeltaNet: gate_activation", config.gate_activation, GATES)
        check_sizes("DeltaNet", 0, convolution=config.convolution)
        check_eps("DeltaNet", head_norm_eps=config.head_norm_eps)
        if config.signed_gate and not config.gated:
            raise UserError("DeltaNet: signed_gate is True without a gate. Set gated=True too.")
        check_gate("DeltaNet", config.gate)
        self.config, self.heads, n = config, config.heads, config.householders
        if config.head_dim is None:
            self.K = divide("DeltaNet", d_model, config.heads, "heads")
        else:
            self.K = config.head_dim
        self.V = config.value_dim or self.K
        self.value_heads = config.value_heads or config.heads
        self.shared_by = divide("DeltaNet", self.value_heads, config.heads, "heads, of which value_heads")
        # Eq. 2: beta = phi keeps eigenvalues in [0, 1]; beta = 2 phi opens them to [-1, 1].
        self.beta_max = 1.0 if config.eigenvalues == "[0,1]" else 2.0
        self.hard_beta = config.beta == "hard"
        self.signed = config.signed_gate and config.eigenvalues != "[0,1]"
        keys, values = self.heads * self.K, self.value_heads * self.V
        self.to_q = nn.Linear(d_model, keys, bias=False)
        self.to_k = nn.Linear(d_model, n * keys, bias=False)
        self.to_v = nn.Linear(d_model, n * values, bias=False)
        self.to_beta = nn.Linear(d_model, n * self.value_heads, bias=False)
        self.convolutions = None
        if config.convolution:
            widths = (keys, n * keys, n * values)
            self.convolutions = nn.ModuleList(
                ShortConvolution(c, config.convolution, bias=config.conv_bias) for c in widths
            )
        if config.gated:
            self.to_decay = nn.Linear(d_model, self.value_heads, bias=False)
            self.A_log = no_weight_decay(nn.Parameter(torch.empty(self.value_heads).uniform_(1e-3, 16).log()))
            self.decay_bias = no_weight_decay(nn.Parameter(log_uniform_steps(self.value_heads)))
        self.to_angle = None
        if config.eigenvalues == "unit-circle":
            pairs = divide("DeltaNet", self.K, 2, "channels of a rotation")
            self.to_angle = nn.Linear(d_model, self.heads * pairs, bias=False)
        self.output_gate = nn.Linear(d_model, values, bias=False) if config.output_gate else None
        self.norm = RMSNorm(self.V, eps=config.head_norm_eps)
        self.to_out = nn.Linear(values, d_model, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, gain=2**-2.5)
        if self.to_angle is not None and config.gate == "smooth":
            # starts near DeltaNet: with angles all over the circle parity is not learned. Two thirds of hard
            # angles start at 0
            with torch.no_grad():
                self.to_angle.weight *= 0.01

    def forward(
        self,
        x: Tensor,
        state: DeltaNetState | None = None,
        *,
        packing: Packing | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, DeltaNetState | None]:
        if attention_mask is not None:
            return run_padded("DeltaNet", self, x, attention_mask, state, packing)
        apply = self._recomputing_rule if state is None and self._recomputes(x) else self._rule
        o, S, convolution, gate = apply(x, state, packing)
        o = normalise(self.norm, o, working_dtype(x)).flatten(-2)
        if gate is not None:
            o = o * GATES[self.config.gate_activation](gate)
        return self.to_out(o), None if S is None else DeltaNetState(S, convolution)

    def empty_state(self, batch: int) -> DeltaNetState:
        weight = self.to_q.weight
        S = torch.zeros(batch, self.value_heads, self.K, self.V, device=weight.device)
        past = self.config.convolution - 1
        if self.convolutions is None:
            return DeltaNetState(S, None)
        convolutions: tuple[Any, ...] = tuple(self.convolutions)
        widths = [convolution.out_channels for convolution in convolutions]
        return DeltaNetState(S, tuple(S.new_zeros(batch, width, past) for width in widths))

    def _rule(self, x: Tensor, state: DeltaNetState | None, packing: Packing | None):
        """Outputs of the rule, last state, next past of the convolutions, and the output gate or None."""
        q, k, v, beta, gates, gate, convolution = self._inputs(x, state, packing)
        report_norm_loss(self, beta, gates)
        o, S = delta_rule(
            q,
            k,
            v,
            beta,
            **gates,
            beta_from_logits=self.beta_max,
            hard_beta=self.hard_beta,
            householders=self.config.householders,
            initial_state=None if state is None else state.S,
            output_final_state=returns_states(packing),
            use_qk_l2norm_in_kernel=True,  # ||k|| = 1 keeps the norm of the transition at most 1
            **offsets(packing),
        )
        return o, S, convolution, gate

    def _recomputes(self, x: Tensor) -> bool:
        """Whether `_recomputing_rule` may stand for `_rule`, and x is large enough for it."""
        config, convolutions = self.config, tuple(self.convolutions or ())
        plain = not config.gated and self.to_angle is None and self.output_gate is None
        plain = plain and config.qk_activation != "relu" and self.shared_by == 1 and not config.conv_bias
        if not (plain and convolutions and recomputes(x)) or self.norm_losses is not None:
            return False
        if not may_read(ShortConvolution, *convolutions):
            return False
        return joins(x, self.to_q, self.to_k, self.to_v, self.to_beta)

    def _recomputing_rule(self, x: Tensor, state: DeltaNetState | None, packing: Packing | None):
        """As `_rule`, from an empty state. The backward pass computes q, k and v again."""
        joined = joined_product(x, (self.to_q, self.to_k, self.to_v, self.to_beta))
        convolutions: tuple[Any, ...] = tuple(self.convolutions or ())
        silu = self.config.qk_activation == "silu"
        widths = [convolution.out_channels for convolution in convolutions]
        next_past = self._next_past(joined[..., : sum(widths)].split(widths, dim=-1), packing)
        o, S = convolved_delta_rule(
            joined,
            [convolution.taps for convolution in convolutions],
            self.heads,
            self.K,
            self.V,
            beta_from_logits=self.beta_max,
            hard_beta=self.hard_beta,
            householders=self.config.householders,
            silu=(silu, silu, True),
            output_final_state=returns_states(packing),
            **offsets(packing),
        )
        return o, S, next_past, None

    def _controls(self, x: Tensor, state: DeltaNetState | None):
        """Inputs of the recurrence: q (B, T, H, K); k, v (B, T n, H, .); beta (B, T n, H); gates by name."""
        q, k, v, logits, gates, _, convolution = self._inputs(x, state)
        return q, k, v, beta_values(logits, self.beta_max, self.hard_beta), gates, convolution

    def _inputs(self, x: Tensor, state: DeltaNetState | None, packing: Packing | None = None):
        """As `_controls`, but with the logits of beta instead of beta, and the output gate or None."""
        past = None if state is None else state.convolution
        (q, k, v), others, convolution = self._projections(x, past, packing)
        # (B, T, n H D) -> (B, T n, H, D): the Householder factors of a token are consecutive in time
        q = q.unflatten(-1, (self.heads, self.K))
        k = k.unflatten(-1, (-1, self.heads, self.K)).flatten(1, 2)
        v = v.unflatten(-1, (-1, self.value_heads, self.V)).flatten(1, 2)
        beta = others["beta"].unflatten(-1, (-1, self.value_heads)).flatten(1, 2)
        q, k = self._shared(q), self._shared(k)
        return q, k, v, beta, self._gates(others), others.get("gate"), convolution

    def _shared(self, x: Tensor) -> Tensor:
        """(B, T, heads, .) to (B, T, value_heads, .): value head i has key head i // shared_by, as in fla."""
        return x if self.shared_by == 1 else x.repeat_interleave(self.shared_by, dim=2)

    def _gates(self, others: dict[str, Tensor]) -> dict[str, Tensor]:
        """As the op takes them: `g` (B, T, H), or `a` with a sign; `angle` (B, T, H, K/2)."""
        gates = {}
        if "decay" in others:
            g = -self.A_log.exp() * F.softplus(at_least_float32(others["decay"]) + self.decay_bias)
            gates = chosen_gates(self.config.gate, {"a": 2 * g.exp() - 1} if self.signed else {"g": g})
        if "angle" in others:
            turns = torch.tanh(at_least_float32(others["angle"]))
            turns = hard_turn(turns) if self.config.gate == "hard" else turns
            gates["angle"] = self._shared(math.pi * turns.unflatten(-1, (self.heads, -1)))
        return gates

    def _others(self) -> dict[str, nn.Linear]:
        others = {"beta": self.to_beta}
        if self.config.gated:
            others["decay"] = self.to_decay
        if self.to_angle is not None:
            others["angle"] = self.to_angle
        if self.output_gate is not None:
            others["gate"] = self.output_gate
        return others

    def extra_repr(self) -> str:
        """What the equation depends on: the eigenvalue range, the heads, and the variant."""
        shown = {"eigenvalues": self.config.eigenvalues, "heads": self.heads, "K": self.K, "V": self.V}
        if self.config.gated:
            shown["gated"] = "signed" if self.signed else True
        if self.config.householders > 1:
            shown["householders"] = self.config.householders
        if self.shared_by > 1:
            shown["value_heads"] = self.value_heads
        return ", ".join(f"{name}={value}" for name, value in shown.items()) + shown_hard(self.config)

    @torch.no_grad()
    def transition_eigenvalues(self, x: Tensor, state: DeltaNetState | None = None) -> Tensor:
        """(B, T, H, K): 1 - beta once and 1 elsewhere, times the gate. Complex from two factors on, and with
        rotations."""
        _, k, _, beta, gates, _ = self._controls(x, state)
        gate = gate_values(gates) if self.config.gated else None
        return delta_spectrum(k, beta, gate, gates.get("angle"), self.config.householders)
