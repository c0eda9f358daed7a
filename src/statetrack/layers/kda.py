"""Kimi Delta Attention (Kimi Team 2025): the delta rule with a gate per key channel."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.config import added
from statetrack.errors import unknown_name
from statetrack.layers.checks import check_eps, check_sizes, divide
from statetrack.layers.convolution import ShortConvolution
from statetrack.layers.hard_gates import check_gate, chosen_gates, gate_values, shown_hard
from statetrack.layers.initialisation import log_uniform_steps, no_weight_decay
from statetrack.layers.mixer import Mixer, Packing, offsets, returns_states
from statetrack.layers.norm import RMSNorm, normalise
from statetrack.layers.norm_loss import report_norm_loss
from statetrack.layers.padding import run_padded
from statetrack.layers.precision import at_least_float32, working_dtype
from statetrack.layers.spectra import delta_spectrum
from statetrack.ops.checks import check_eigenvalues
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.delta_rule.reference import BETAS, beta_values


@dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention; `eigenvalues` "[-1,1]" doubles beta, as fla's allow_neg_eigval does."""

    heads: int = 4  # number of heads, each with a state of its own
    eigenvalues: Literal["[0,1]", "[-1,1]"] = "[-1,1]"  # range of the eigenvalues: beta in (0, 1) or (0, 2)
    head_dim: int | None = None  # width of a key; d_model / heads when None
    value_dim: int | None = None  # width of a value; that of the key when None
    convolution: int = 4  # width of the short convolution on q, k and v; 0 for none
    gate_rank: int | None = None  # rank of the maps to both gates; that of a value when None
    signed_gate: bool = False  # the gates are 2 exp(g) - 1 instead of exp(g), except in "[0,1]"
    head_norm_eps: float = 1e-5  # eps of the RMS norm of each head's output
    beta: Literal["sigmoid", "hard"] = added("sigmoid")  # "hard": beta reaches its bounds (docs/length.md)
    gate: Literal["smooth", "hard"] = added("smooth")  # "hard": gates reach their bounds

    def build(self, d_model: int, layers: int) -> "KDA":
        return KDA(self, d_model)


class KDAState(NamedTuple):
    S: Tensor  # (B, H, K, V), float32
    convolution: tuple[Tensor, ...] | None  # the last inputs of the three convolutions


class KDA(Mixer):
    """S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t v_t^T,  o_t = S_t^T q_t / sqrt(K).

        ||k_t|| = 1, and
        q, k, v = silu(conv(W x))  by head       beta_t = sigmoid(w x_t), or 2 sigmoid(w x_t) for "[-1,1]"
        a_t = exp(g_t), or 2 exp(g_t) - 1 with `signed_gate`       g_t = -exp(A) softplus(W_2 W_1 x_t + b)
        y_t = W_out (norm(o_t) sigmoid(U_2 U_1 x_t + c))

    Shapes: x, y (B, T, d_model); the state S (B, H, K, V) in float32. The transition is a product of two
    matrices of norm at most 1, so its eigenvalues are in the unit disc: real and in [0, 1] or [-1, 1] with
    gates that have no sign. Returns y and the state to go on from.

    >>> layer = KDA(KDAConfig(heads=4), d_model=64)
    >>> y, state = layer(torch.randn(2, 16, 64))                     # B, T, d_model
    >>> y.shape, state.S.shape
    (torch.Size([2, 16, 64]), torch.Size([2, 4, 16, 16]))
    """

    packs = True
    reports_norm_loss = True

    def __init__(self, config: KDAConfig, d_model: int):
        super().__init__()
        check_eigenvalues("KDA", config.eigenvalues)
        check_gate("KDA", config.gate)
        if config.beta not in BETAS:
            raise unknown_name("KDA: beta", config.beta, BETAS)
        check_sizes("KDA", heads=config.heads, head_dim=config.head_dim, value_dim=config.value_dim)
        check_sizes("KDA", gate_rank=config.gate_rank)
        check_sizes("KDA", 0, convolution=config.convolution)
        check_eps("KDA", head_norm_eps=config.head_norm_eps)
        self.config, self.heads = config, config.heads
        self.K = config.head_dim or divide("KDA", d_model, config.heads, "heads")
        self.V = config.value_dim or self.K
        self.beta_max = 1.0 if config.eigenvalues == "[0,1]" else 2.0
        self.hard_beta = config.beta == "hard"
        self.signed = config.signed_gate and config.eigenvalues != "[0,1]"
        keys, values, rank = self.heads * self.K, self.heads * self.V, config.gate_rank or self.V
        self.to_q = nn.Linear(d_model, keys, bias=False)
        self.to_k = nn.Linear(d_model, keys, bias=False)
        self.to_v = nn.Linear(d_model, values, bias=False)
        self.to_beta = nn.Linear(d_model, self.heads, bias=False)
        self.convolutions = None
        if config.convolution:
            self.convolutions = nn.ModuleList(
                ShortConvolution(c, config.convolution, bias=False) for c in (keys, keys, values)
            )
        self.to_decay = nn.Sequential(nn.Linear(d_model, rank, bias=False), nn.Linear(rank, keys, bias=False))
        self.A_log = no_weight_decay(nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log()))
        self.decay_bias = no_weight_decay(nn.Parameter(log_uniform_steps(keys)))
        self.output_gate = nn.Sequential(nn.Linear(d_model, rank, bias=False), nn.Linear(rank, values))
        self.norm = RMSNorm(self.V, eps=config.head_norm_eps)
        self.to_out = nn.Linear(values, d_model, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, gain=2**-2.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self,
        x: Tensor,
        state: KDAState | None = None,
        *,
        packing: Packing | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, KDAState | None]:
        if attention_mask is not None:
            return run_padded("KDA", self, x, attention_mask, state, packing)
        q, k, v, convolution = self._qkv(x, state, packing)
        logits, gates = self.to_beta(x), self._gates(x)
        report_norm_loss(self, logits, gates)
        o, S = delta_rule(
            q,
            k,
            v,
            logits,
            **gates,
            beta_from_logits=self.beta_max,
            hard_beta=self.hard_beta,
            initial_state=None if state is None else state.S,
            output_final_state=returns_states(packing),
            use_qk_l2norm_in_kernel=True,  # ||k|| = 1 keeps the norm of the transition at most 1
            **offsets(packing),
        )
        o = normalise(self.norm, o, working_dtype(x)).flatten(-2)
        y = self.to_out(o * torch.sigmoid(self.output_gate(x)))
        return y, None if S is None else KDAState(S, convolution)

    def _qkv(self, x: Tensor, state: KDAState | None, packing: Packing | None = None):
        """q, k (B, T, H, K) and v (B, T, H, V) after convolution and SiLU, and the next past or None."""
        parts, past = [linear(x) for linear in (self.to_q, self.to_k, self.to_v)], None
        if self.convolutions is None:
            parts = [F.silu(y) for y in parts]
        else:
            before = (None,) * 3 if state is None or state.convolution is None else state.convolution
            each = zip(self.convolutions, parts, before, strict=True)
            parts, past = zip(*(c(y, p, silu=True, packing=packing) for c, y, p in each), strict=True)
            past = past if returns_states(packing) else None
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in parts)
        return q, k, v, past

    def _gates(self, x: Tensor) -> dict[str, Tensor]:
        """The gates (B, T, H, K) as the op takes them: `g`, their logarithm, or `a`, their value."""
        steps = F.softplus(at_least_float32(self.to_decay(x)) + self.decay_bias)
        g = -self.A_log.exp()[:, None] * steps.unflatten(-1, (self.heads, self.K))
        return chosen_gates(self.config.gate, {"a": 2 * g.exp() - 1} if self.signed else {"g": g})

    def extra_repr(self) -> str:
        """The eigenvalue range, the heads, the widths of keys and values, and whether gates have a sign."""
        shown = f"eigenvalues={self.config.eigenvalues}, heads={self.heads}, K={self.K}, V={self.V}"
        return shown + (", gated=signed" if self.signed else "") + shown_hard(self.config)

    @torch.no_grad()
    def transition_eigenvalues(self, x: Tensor, state: KDAState | None = None) -> Tensor:
        """(B, T, H, K): those of (I - beta k k^T) diag(a), complex with signed gates."""
        _, k, _, _ = self._qkv(x, state)
        beta = beta_values(self.to_beta(x), self.beta_max, self.hard_beta)
        spectrum = delta_spectrum(k, beta, gate_values(self._gates(x)))
        return spectrum + 0j if self.signed else spectrum  # complex, whatever the signs of this input
