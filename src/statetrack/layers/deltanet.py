"""DeltaNet and its kin: Gated DeltaNet (`gated`) and DeltaProduct (`householders`)."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.errors import unknown_name
from statetrack.layers.convolution import ShortConvolution
from statetrack.layers.mixer import (
    Mixer,
    at_least_float32,
    check_sizes,
    divide,
    fuses,
    joined_product,
    log_uniform_steps,
    no_weight_decay,
    working_dtype,
)
from statetrack.ops import delta_rule, rms_norm, silu_split
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

    def forward(self, x: Tensor, state: DeltaNetState | None = None) -> tuple[Tensor, DeltaNetState]:
        q, k, v, beta, g, gate, convolution = self._inputs(x, state)
        o, S = delta_rule(
            q,
            k,
            v,
            beta,
            g=g,
            beta_from_logits=self.beta_max,
            householders=self.config.householders,
            initial_state=None if state is None else state.S,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,  # ||k|| = 1, or the norm bound fails
        )
        assert S is not None
        o = rms_norm(o, self.norm.weight, EPS, out_dtype=working_dtype(x)).flatten(-2)
        if gate is not None:
            o = o * F.silu(gate)
        return self.to_out(o), DeltaNetState(S, convolution)

    def _controls(self, x: Tensor, state: DeltaNetState | None):
        """What drives the recurrence: q (B, T, H, K); k, v (B, T n, H, .); beta (B, T n, H); g (B, T, H)."""
        q, k, v, logits, g, _, convolution = self._inputs(x, state)
        return q, k, v, self.beta_max * torch.sigmoid(at_least_float32(logits)), g, convolution

    def _inputs(self, x: Tensor, state: DeltaNetState | None):
        """As `_controls`, with the logits of beta in place of beta, and the gate of the outputs or None."""
        q, k, v, beta, g, gate, activated = self._projections(x)
        convolution = None
        if self.convolutions is not None:
            past = (None, None, None) if state is None or state.convolution is None else state.convolution
            fused = (self.config.qk_activation == "silu",) * 2 + (True,)
            each = zip(self.convolutions, (q, k, v), past, fused, strict=True)
            filtered = [convolve(y, p, silu=silu) for convolve, y, p, silu in each]
            q, k, v = (y for y, _ in filtered)
            convolution = tuple(p for _, p in filtered)
        elif not activated:
            v = F.silu(v)
        if not activated and (self.convolutions is None or self.config.qk_activation != "silu"):
            activation = ACTIVATIONS[self.config.qk_activation]
            q, k = activation(q), activation(k)
        # (B, T, n H D) -> (B, T n, H, D): a token's Householder factors follow each other in time
        q = q.unflatten(-1, (self.heads, self.K))
        k = k.unflatten(-1, (-1, self.heads, self.K)).flatten(1, 2)
        v = v.unflatten(-1, (-1, self.heads, self.V)).flatten(1, 2)
        beta = beta.unflatten(-1, (-1, self.heads)).flatten(1, 2)
        if g is not None:
            g = -self.A_log.exp() * F.softplus(at_least_float32(g) + self.decay_bias)
        return q, k, v, beta, g, gate, convolution

    def _projections(self, x: Tensor):
        """q, k, v; the logits of beta and of the decay; the gate; whether q, k and v have had their SiLU.

        On a GPU one product gives them all. They share its rows, so without a convolution, which takes views,
        one pass sets q, k and v apart and applies the SiLU.
        """
        rest = {"beta": self.to_beta}
        if self.config.gated:
            rest["decay"] = self.to_decay
        if self.output_gate is not None:
            rest["gate"] = self.output_gate
        linears = (self.to_q, self.to_k, self.to_v, *rest.values())
        activated = fuses(x) and self.convolutions is None and self.config.qk_activation == "silu"
        if not fuses(x):
            q, k, v, *others = (linear(x) for linear in linears)
        else:
            y, widths = joined_product(x, linears), [linear.out_features for linear in linears]
            if activated:
                q, k, v, y = silu_split(y, (widths[0], widths[1], widths[2], sum(widths[3:])))
                others = y.split(widths[3:], dim=-1) if len(rest) > 1 else [y]
            else:
                widths.append(y.shape[-1] - sum(widths))
                q, k, v, *others = y.split(widths, dim=-1)
        given = dict(zip(rest, others, strict=False))
        return q, k, v, given["beta"], given.get("decay"), given.get("gate"), activated

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
