"""Projections and norms that act on each head separately, as mLSTM and sLSTM use them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        return F.layer_norm(x, x.shape[-1:], eps=1e-5).flatten(-2) * self.weight


def round_up(width: float, multiple: int = 64) -> int:
    """`width` rounded up to a multiple of `multiple`, as the xlstm package chooses its widths."""
    return math.ceil(width / multiple) * multiple
