"""Causal softmax attention: the Transformer baseline, whose state grows with the sequence."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.errors import UserError
from statetrack.layers.checks import divide
from statetrack.layers.mixer import Mixer
from statetrack.layers.precision import at_least_float32


@dataclass(frozen=True)
class AttentionConfig:
    """Multi-head attention with rotary positions. The paper does not specify its Transformer."""

    heads: int = 4
    rotary_base: float = 10_000.0

    def build(self, d_model: int, layers: int) -> "Attention":
        return Attention(self, d_model, layers)


class AttentionState(NamedTuple):
    """The rotated keys and the values of all steps so far."""

    k: Tensor  # (B, H, T, K)
    v: Tensor  # (B, H, T, K)


class Attention(Mixer):
    """y_t = W_o sum_{s <= t} softmax_s(q_t . k_s / sqrt(K)) v_s, with q and k rotated by their position."""

    def __init__(self, config: AttentionConfig, d_model: int, layers: int = 1):
        super().__init__()
        self.config = config
        K = divide("Attention", d_model, config.heads, "heads")
        if K % 2:
            raise UserError(
                f"Attention: a head is {K} wide, expected an even width: rotary positions rotate pairs of "
                "channels. Choose another number of heads."
            )
        self.to_qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.to_out = nn.Linear(d_model, d_model, bias=False)
        nn.init.normal_(self.to_qkv.weight, std=0.02)
        nn.init.normal_(self.to_out.weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, x: Tensor, state: AttentionState | None = None) -> tuple[Tensor, AttentionState]:
        # (B, T, 3 d_model) -> three of (B, H, T, K)
        qkv = self.to_qkv(x).unflatten(-1, (3, self.config.heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)
        past = 0 if state is None else state.k.shape[2]
        q, k = (rotate(y, past, self.config.rotary_base) for y in (q, k))
        if state is not None:
            k, v = torch.cat([state.k.to(k.dtype), k], dim=2), torch.cat([state.v.to(v.dtype), v], dim=2)
        y = _attend(q, k, v, past)
        return self.to_out(y.transpose(1, 2).flatten(-2)), AttentionState(k, v)

    def transition_eigenvalues(self, x: Tensor, state: AttentionState | None = None) -> Tensor:
        raise UserError(
            "Attention: no state transition, so no eigenvalues: attention keeps all keys and values."
        )


def _attend(q: Tensor, k: Tensor, v: Tensor, past: int) -> Tensor:
    T = q.shape[2]
    if past == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
    # query t has position past + t and sees the keys up to that position
    seen = torch.ones(T, past + T, dtype=torch.bool, device=q.device).tril(past)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def rotate(x: Tensor, past: int, base: float) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of x (..., T, K), whose first step has position `past`.

    Channels j and j + K/2 at position t are rotated by the angle t base^(-2j/K), so that q_t . k_s depends on
    the positions only through t - s.
    """
    T, half = x.shape[-2], x.shape[-1] // 2
    position = torch.arange(past, past + T, device=x.device, dtype=torch.float64)
    rate = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = position[:, None] * rate
    a, b = at_least_float32(x).chunk(2, dim=-1)
    cos, sin = angle.cos().to(a.dtype), angle.sin().to(a.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
