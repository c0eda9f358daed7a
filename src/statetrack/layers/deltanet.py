"""DeltaNet and its kin: Gated DeltaNet (`gated`) and DeltaProduct (`householders`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.errors import unknown_name
from statetrack.layers.convolution import ShortConvolution
from statetrack.layers.mixer import (
    Mixer,
    Packing,
    at_least_float32,
    check_no_state,
    check_sizes,
    divide,
    fuses,
    joined_product,
    log_uniform_steps,
    no_weight_decay,
    offsets,
    working_dtype,
)
from statetrack.ops import convolved_split, delta_rule, rms_norm
from statetrack.ops.checks import check_eigenvalues
from statetrack.ops.delta_rule.reference import l2_normalise

EPS = 1e-5  # of the norm of a head
ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "identity": lambda x: x}


@dataclass(frozen=True)
class DeltaNetConfig:
    """DeltaNet (Table 1, tab:LRNNs); `eigenvalues` picks the column of Table 2 (tab:eigenvalue_range)."""

    heads: int = 4
    eigenvalues: Literal["[0,1]", "[-1,1]"] = "[-1,1]"
    head_dim: int | None = None  # width of a key; d_model / heads when None
    value_dim: int | None = None  # width of a value; as the key's when None
    convolution: int = 4  # width of the short convolution on q, k and v; 0 for none
    qk_activation: Literal["silu", "relu", "identity"] = "silu"
    output_gate: bool = False
    gated: bool = False  # Gated DeltaNet: a decay in (0, 1) in front of every transition
    householders: int = 1  # DeltaProduct: this many generalised Householder factors per token

    def build(self, d_model: int, layers: int) -> "DeltaNet":
        return DeltaNet(self, d_model)


class DeltaNetState(NamedTuple):
    S: Tensor  # (B, H, K, V), float32
    convolution: tuple[Tensor, ...] | None  # the last inputs of the three convolutions


class DeltaNet(Mixer):
    """S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,  o_t = S_t^T q_t / sqrt(K), ||k_t|| = 1."""

    packs = True

    def __init__(self, config: DeltaNetConfig, d_model: int):
        super().__init__()
        check_eigenvalues("DeltaNet", config.eigenvalues)
        if config.qk_activation not in ACTIVATIONS:
            raise unknown_name("DeltaNet: qk_activation", config.qk_activation, ACTIVATIONS)
        check_sizes(
            "DeltaNet",
            heads=config.heads,
            head_dim=config.head_dim,
            value_dim=config.value_dim,
            householders=config.householders,
        )
        check_sizes("DeltaNet", 0, convolution=config.convolution)
        self.config, self.heads, n = config, config.heads, config.householders
        if config.head_dim is None:
            self.K = divide("DeltaNet", d_model, config.heads, "heads")
        else:
            self.K = config.head_dim
        self.V = config.value_dim or self.K
        # Eq. 2: beta = phi keeps eigenvalues in [0, 1]; beta = 2 phi opens them to [-1, 1].
        self.beta_max = {"[0,1]": 1.0, "[-1,1]": 2.0}[config.eigenvalues]
        keys, values = self.heads * self.K, self.heads * self.V
        self.to_q = nn.Linear(d_model, keys, bias=False)
        self.to_k = nn.Linear(d_model, n * keys, bias=False)
        self.to_v = nn.Linear(d_model, n * values, bias=False)
        self.to_beta = nn.Linear(d_model, n * self.heads, bias=False)
        self.convolutions = None
        if config.convolution:
            widths = (keys, n * keys, n * values)
            self.convolutions = nn.ModuleList(
                ShortConvolution(c, config.convolution, bias=False) for c in widths
            )
        if config.gated:
            self.to_decay = nn.Linear(d_model, self.heads, bias=False)
            self.A_log = no_weight_decay(nn.Parameter(torch.empty(self.heads).uniform_(1e-3, 16).log()))
            self.decay_bias = no_weight_decay(nn.Parameter(log_uniform_steps(self.heads)))
        self.output_gate = nn.Linear(d_model, values, bias=False) if config.output_gate else None
        self.norm = nn.RMSNorm(self.V, eps=EPS)
        self.to_out = nn.Linear(values, d_model, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, gain=2**-2.5)

    def forward(
        self, x: Tensor, state: DeltaNetState | None = None, *, packing: Packing | None = None
    ) -> tuple[Tensor, DeltaNetState | None]:
        check_no_state("DeltaNet", state, packing)
        q, k, v, beta, g, gate, convolution = self._inputs(x, state, packing)
        o, S = delta_rule(
            q,
            k,
            v,
            beta,
            g=g,
            beta_from_logits=self.beta_max,
            householders=self.config.householders,
            initial_state=None if state is None else state.S,
            output_final_state=packing is None,
            use_qk_l2norm_in_kernel=True,  # ||k|| = 1, or the norm bound fails
            **offsets(packing),
        )
        o = rms_norm(o, self.norm.weight, EPS, out_dtype=working_dtype(x)).flatten(-2)
        if gate is not None:
            o = o * F.silu(gate)
        return self.to_out(o), None if S is None else DeltaNetState(S, convolution)

    def _controls(self, x: Tensor, state: DeltaNetState | None):
        """What drives the recurrence: q (B, T, H, K); k, v (B, T n, H, .); beta (B, T n, H); g (B, T, H)."""
        q, k, v, logits, g, _, convolution = self._inputs(x, state)
        return q, k, v, self.beta_max * torch.sigmoid(at_least_float32(logits)), g, convolution

    def _inputs(self, x: Tensor, state: DeltaNetState | None, packing: Packing | None = None):
        """As `_controls`, with the logits of beta in place of beta, and the gate of the outputs or None."""
        past = None if state is None else state.convolution
        (q, k, v), beta, g, gate, convolution = self._projections(x, past, packing)
        # (B, T, n H D) -> (B, T n, H, D): a token's Householder factors follow each other in time
        q = q.unflatten(-1, (self.heads, self.K))
        k = k.unflatten(-1, (-1, self.heads, self.K)).flatten(1, 2)
        v = v.unflatten(-1, (-1, self.heads, self.V)).flatten(1, 2)
        beta = beta.unflatten(-1, (-1, self.heads)).flatten(1, 2)
        if g is not None:
            g = -self.A_log.exp() * F.softplus(at_least_float32(g) + self.decay_bias)
        return q, k, v, beta, g, gate, convolution

    def _projections(self, x: Tensor, past: tuple[Tensor, ...] | None, packing: Packing | None):
        """q, k and v, convolved and activated; the logits of beta and of the decay; the gate; the next past.

        On a GPU one product gives them all. Its rows are then set apart, convolved and activated in one pass.
        """
        rest = {"beta": self.to_beta}
        if self.config.gated:
            rest["decay"] = self.to_decay
        if self.output_gate is not None:
            rest["gate"] = self.output_gate
        linears = (self.to_q, self.to_k, self.to_v, *rest.values())
        widths = [linear.out_features for linear in linears]
        joined = joined_product(x, linears) if fuses(x) else None
        if joined is None:
            parts = [linear(x) for linear in linears]
        else:
            parts = joined[..., : sum(widths)].split(widths, dim=-1)
        qkv, others = parts[:3], parts[3:]
        if joined is not None and past is None and self.config.qk_activation != "relu":
            next_past = None if packing is not None else self._next_past(qkv)
            taps = [convolution.taps for convolution in self._convolutions()]
            silu = self.config.qk_activation == "silu"
            parts = *widths[:3], sum(widths[3:])
            *qkv, others = convolved_split(joined, parts, taps, silu=(silu, silu, True), **offsets(packing))
            others = others.split(widths[3:], dim=-1) if len(rest) > 1 else [others]
        else:
            qkv, next_past = self._filtered(qkv, past, packing)
        given = dict(zip(rest, others, strict=True))
        return qkv, given["beta"], given.get("decay"), given.get("gate"), next_past

    def _convolutions(self) -> list[ShortConvolution]:
        """Those of q, k and v, or none."""
        return [module for module in self.convolutions or () if isinstance(module, ShortConvolution)]

    def _next_past(self, qkv: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """What the convolutions keep of their inputs, from an empty past."""
        each = zip(self._convolutions(), qkv, strict=False)
        return tuple(convolution.next_state(y) for convolution, y in each) or None

    def _filtered(self, qkv: Sequence[Tensor], past: tuple[Tensor, ...] | None, packing: Packing | None):
        """q, k and v, convolved and activated, and the next past."""
        (q, k, v), next_past = qkv, None
        activation = ACTIVATIONS[self.config.qk_activation]
        if self.convolutions is None:
            return (activation(q), activation(k), F.silu(v)), None
        silu = self.config.qk_activation == "silu"
        each = zip(self._convolutions(), qkv, past or [None] * 3, (silu, silu, True), strict=True)
        if packing is not None:
            q, k, v = (convolution.packed(y, packing, silu=s) for convolution, y, _, s in each)
        else:
            (q, k, v), next_past = zip(
                *(convolution(y, p, silu=s) for convolution, y, p, s in each), strict=True
            )
        return (q, k, v) if silu else (activation(q), activation(k), v), next_past

    @torch.no_grad()
    def transition_eigenvalues(self, x: Tensor) -> Tensor:
        """(B, T, H, K): 1 - beta once and 1 elsewhere, times the decay; complex for two factors and more."""
        _, k, _, beta, g, _ = self._controls(x, None)
        k = l2_normalise(at_least_float32(k))
        decay = torch.ones_like(x[..., :1]) if g is None else g.exp()
        n = self.config.householders
        if n == 1:
            spectrum = torch.ones_like(k)
            spectrum[..., 0] = 1 - beta * k.square().sum(-1)
            return spectrum * decay[..., None]
        k, beta = k.unflatten(1, (-1, n)), beta.unflatten(1, (-1, n))
        A = torch.eye(self.K, device=x.device, dtype=k.dtype)
        for i in range(n):
            A = A - beta[:, :, i, :, None, None] * k[:, :, i, :, :, None] * (k[:, :, i, :, None, :] @ A)
        return torch.linalg.eigvals(A) * decay[..., None]
