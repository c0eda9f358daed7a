"""Rotary positions in plain PyTorch: the definition."""

import torch
from torch import Tensor


def positions(past: int | Tensor, T: int, device: torch.device) -> Tensor:
    """past, ..., past + T - 1: (T,), or (B, 1, T) where every sequence has its own past (B,)."""
    steps = torch.arange(T, device=device)
    return past + steps if isinstance(past, int) else past[:, None, None] + steps


def rotate(x: Tensor, past: int | Tensor, base: float) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of x (..., T, K), whose first step has position `past`.

    A tensor `past` (B,) gives every sequence of x (B, H, T, K) its own.

    Channels j and j + K/2 at position t are rotated by the angle t base^(-2j/K), so that q_t . k_s depends on
    the positions only through t - s.
    """
    T, half = x.shape[-2], x.shape[-1] // 2
    position = positions(past, T, x.device).double()
    rate = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = position[..., None] * rate
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    cos, sin = angle.cos().to(a.dtype), angle.sin().to(a.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def rotated_split_reference(
    qkv: Tensor, heads: int, kv_heads: int, base: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, T, heads, K), k and v (B, T, kv_heads, K) of qkv (B, T, ...); q, k rotated from position 0."""
    parts = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))
    q, k, v = parts.split([heads, kv_heads, kv_heads], dim=2)
    q, k = (rotate(x.transpose(1, 2), 0, base).transpose(1, 2) for x in (q, k))
    return q, k, v
