"""What mLSTM and sLSTM share: projections and norms that treat each head by itself, and how both start."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HeadwiseLinear(nn.Module):
    """A block-diagonal projection: y = W_j x on each of `blocks` equal parts x of the input, no bias."""

    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, width // blocks, width // blocks))

    def forward(self, x: Tensor) -> Tensor:
        blocks = self.weight.shape[0]
        return torch.einsum("...hd,hod->...ho", x.unflatten(-1, (blocks, -1)), self.weight).flatten(-2)


class HeadNorm(nn.Module):
    """Each head (..., H, D) shifted and scaled to mean 0 and variance 1, then each channel weighted."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads * head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., H, D) -> (..., H D)."""
        return F.layer_norm(x, x.shape[-1:], eps=1e-5).flatten(-2) * self.weight


def round_up(width: float, multiple: int = 64) -> int:
    """The published widths are a factor of d_model, rounded up to a multiple of 64."""
    return math.ceil(width / multiple) * multiple


def small_init(weight: Tensor, d_model: int) -> None:
    """N(0, 2 / (5 d_model)) (Nguyen and Salazar 2019)."""
    nn.init.normal_(weight, std=math.sqrt(2 / (5 * d_model)))


def wang_init(weight: Tensor, d_model: int, layers: int) -> None:
    """N(0, (2 / layers)^2 / d_model) (Wang and Komatsuzaki 2021): for weights that end in the residual."""
    nn.init.normal_(weight, std=2 / layers / math.sqrt(d_model))
