"""Rotations of pairs of key channels, and how they fold into queries and keys.

With C_t = R(angle_t) ... R(angle_1) and S_t = C_t S'_t,

    S_t = a_t R(angle_t) S_{t-1} + k_t v_t^T    becomes    S'_t = a_t S'_{t-1} + (C_t^T k_t) v_t^T

read with C_t^T q_t: no rotation is left. a_t has to be the same for both channels of a pair, so that it
commutes with R.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from statetrack.ops.checks import can_look


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dim: int = -1) -> Tensor:
    """x with channels i and i + K/2 of axis `dim` turned by an angle; cos and sin have K/2 channels there."""
    first, second = x.chunk(2, dim)
    return torch.cat([cos * first - sin * second, sin * first + cos * second], dim)


def along_time(scan: Callable[[Tensor, int], Tensor], x: Tensor) -> Tensor:
    """A cumulated sum or product of x (B, T, ...) along time.

    On a GPU PyTorch scans the last axis in blocks, others step by step: 6 ms for 32,768 signs of 16 heads.
    """
    if not x.is_cuda:
        return scan(x, 1)
    return scan(x.movedim(1, -1).contiguous(), -1).movedim(-1, 1)


def cumulated_angles(angle: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The sum of `angle` (B, T, ...) up to each step, from the start of its sequence, in [0, 2 pi).

    Summed in float64: in float32 the angle of step 64,000 would be off by a hundredth.
    """
    if cu_seqlens is not None and can_look(angle) and not bool(angle.isfinite().all()):
        # a bad angle would stay in the sums of the sequences behind its own
        parts = [cumulated_angles(x, None) for x in angle.split(cu_seqlens.diff().tolist(), dim=1)]
        return torch.cat(parts, dim=1)
    total = along_time(torch.cumsum, angle.double())
    if cu_seqlens is not None:
        total = total - before_sequence(total, cu_seqlens, 0.0)
    return torch.remainder(total, 2 * math.pi).to(torch.promote_types(angle.dtype, torch.float32))


def before_sequence(total: Tensor, cu_seqlens: Tensor, none: float) -> Tensor:
    """For every step, what was cumulated before its sequence began; `none` for the first sequence."""
    places = torch.arange(total.shape[1], device=total.device)
    start = cu_seqlens[torch.bucketize(places, cu_seqlens[1:], right=True)]
    return torch.cat([torch.full_like(total[:, :1], none), total], dim=1)[:, start]


def at_ends(x: Tensor, cu_seqlens: Tensor | None, empty: float) -> Tensor:
    """x (B, T, ...) at the end of every sequence, (N, ...), and `empty` for one without steps."""
    if cu_seqlens is None:
        return x[:, -1]
    last = x[0, (cu_seqlens[1:] - 1).clamp(min=0)]
    return last.masked_fill((cu_seqlens.diff() == 0).view(-1, *[1] * (last.ndim - 1)), empty)


def fold_angles(
    q: Tensor, k: Tensor, angle: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """C_t^T q_t and C_t^T k_t in the dtypes of q and k, and the function that gives the last S from S'."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    total = cumulated_angles(angle, cu_seqlens).to(dtype)
    cos, sin = total.cos(), total.sin()
    q, k = (rotate(x.to(dtype), cos, -sin).to(x.dtype) for x in (q, k))

    def unfold(S: Tensor) -> Tensor:
        end = at_ends(total, cu_seqlens, 0.0)[..., None]
        return rotate(S, end.cos(), end.sin(), dim=-2)

    return q, k, unfold


def both_of_pair(a: Tensor) -> Tensor:
    """Gates per pair (..., K/2) as gates per channel (..., K)."""
    return torch.cat([a, a], dim=-1)
