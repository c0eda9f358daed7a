"""The short convolution in plain PyTorch: the definition other backends are tested against."""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def short_convolution_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    *,
    silu: bool,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """y_t = bias + sum_i weight_i x_{t - width + 1 + i}, then silu(y_t) where asked for.

    Shapes: x, y (B, T, C); weight (C, width); bias (C,); initial_state (B, C, width - 1), the inputs before
    the first, zeros when None. Packed sequences, the steps cu_seqlens[s] to cu_seqlens[s + 1] of x for every
    s, each start from zeros. Inputs of several dtypes are computed in the widest; y has that of x.
    """
    dtypes = [tensor.dtype for tensor in (x, weight, bias) if tensor is not None]
    if len(set(dtypes)) > 1 and not torch.is_autocast_enabled(x.device.type):  # it has rules of its own
        dtype = functools.reduce(torch.promote_types, dtypes)
        wide = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        return short_convolution_reference(*wide, initial_state, silu=silu, **packing).to(x.dtype)
    if x.shape[1] == 0:
        return x.clone()
    if cu_seqlens is not None:
        row, places = _set_apart(x, cu_seqlens, weight.shape[1] - 1)
        return short_convolution_reference(row, weight, bias, None, silu=silu).index_select(1, places)
    if initial_state is None and _by_taps(x, weight):
        y = _sum_of_taps(x, weight, bias)
        return F.silu(y, inplace=True) if silu else y
    C, width = weight.shape
    x = x.mT
    x = (
        F.pad(x, (width - 1, 0))
        if initial_state is None
        else torch.cat([initial_state.to(x.dtype), x], dim=-1)
    )
    if x.shape[-1] == width and not torch.is_grad_enabled():  # decoding: conv1d takes five times as long
        exact = torch.promote_types(x.dtype, torch.float32)  # as conv1d sums
        y = (x.to(exact) * weight).sum(-1)[:, None]
        y = (y if bias is None else y + bias).to(x.dtype)
    else:
        y = F.conv1d(x, weight[:, None], bias, groups=C).mT
    return F.silu(y) if silu else y


def _set_apart(x: Tensor, cu_seqlens: Tensor, past: int) -> tuple[Tensor, Tensor]:
    """Packed sequences x (1, T, C) with `past` zeros between them, and the places of the steps of x there."""
    T, gaps = x.shape[1], cu_seqlens.shape[0] - 2
    steps = torch.arange(T, device=x.device)
    places = steps + past * torch.bucketize(steps, cu_seqlens[1:], right=True)
    return x.new_zeros(1, T + past * gaps, x.shape[2]).index_copy(1, places, x), places


def _by_taps(x: Tensor, weight: Tensor) -> bool:
    """Whether a sum over taps takes less time than conv1d: on a CPU, where nothing is differentiated.

    Halves, and autocast, go to conv1d, which sums in float32.
    """
    if x.device.type != "cpu" or x.dtype != weight.dtype or x.dtype.itemsize < 4:
        return False
    return not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def _sum_of_taps(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One pass over x (B, T, C) for each tap: a tenth of the time of PyTorch's depthwise convolution."""
    taps = weight.mT.contiguous()
    y = x * taps[-1]
    if bias is not None:
        y += bias
    for i in range(1, min(len(taps), x.shape[1])):
        y[:, i:].addcmul_(x[:, :-i], taps[-1 - i])
    return y


def convolved_split_reference(
    x: Tensor,
    widths: list[int],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    silu: list[bool],
) -> tuple[Tensor, ...]:
    """Of x = [p_1, ..., p_n, r, ...] along the last axis: silu(convolution of p_i) for each i, and r.

    Shapes: x (B, T, N); results (B, T, widths_i). Columns beyond the widths are left out. Without weights
    the results are silu(p_i) and r. A part i with not silu[i] goes without it.
    """
    *parts, rest = x[..., : sum(widths)].split(widths, dim=-1)
    if not weights:
        return *(F.silu(p) if s else p for p, s in zip(parts, silu, strict=True)), rest
    each = zip(parts, weights, biases or [None] * len(parts), silu, strict=True)
    packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    return *(short_convolution_reference(p, w, b, None, silu=s, **packing) for p, w, b, s in each), rest
