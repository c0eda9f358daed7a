"""Projections and norms that act on each head separately, as mLSTM and sLSTM use them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.layers.fusion import fuses, may_read
from statetrack.layers.precision import at_least_float32
from statetrack.ops.head_norm import head_norm

EPS = 1e-5


class HeadwiseLinear(nn.Module):
    """A block-diagonal linear map without bias: the input is cut into `blocks` equal parts, y_j = W_j x_j."""

    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, width // blocks, width // blocks))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight  # read once: a parametrised weight is computed on every access
        return torch.einsum("...hd,hod->...ho", x.unflatten(-1, (len(weight), -1)), weight).flatten(-2)


class HeadNorm(nn.Module):
    """Layer norm of each head (..., H, D) separately, with a weight per channel and no bias."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads * head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., H, D) -> (..., H D)."""
        return F.layer_norm(x, x.shape[-1:], eps=EPS).flatten(-2) * self.weight


def normalise_heads(norm: nn.Module, h: Tensor, out_dtype: torch.dtype) -> Tensor:
    """norm(h) of the heads (..., H, D), computed in float32 at least and returned in `out_dtype`."""
    if fuses(h) and may_read(HeadNorm, norm):
        assert isinstance(norm, HeadNorm)
        return head_norm(h, norm.weight, EPS, out_dtype=out_dtype)
    return norm(at_least_float32(h)).to(out_dtype)


def gated_heads(
    norm: nn.Module, h: Tensor, skip: Tensor, c: Tensor, z: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """(norm(h) + skip c) silu(z) of the heads (..., H, D) and branches c, z (..., H D), in `out_dtype`."""
    if fuses(h) and may_read(HeadNorm, norm):
        assert isinstance(norm, HeadNorm)
        return head_norm(h, norm.weight, EPS, skip=skip, c=c, z=z, out_dtype=out_dtype)
    h = norm(at_least_float32(h)) + skip * c
    return (h * F.silu(z)).to(out_dtype)


def round_up(width: float, multiple: int = 64) -> int:
    """`width` rounded up to a multiple of `multiple`, as the xlstm package chooses its widths."""
    return math.ceil(width / multiple) * multiple
