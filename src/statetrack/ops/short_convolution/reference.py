"""The short convolution as PyTorch has it."""

import torch
import torch.nn.functional as F
from torch import Tensor


def short_convolution_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, *, silu: bool
) -> Tensor:
    """y_t = bias + sum_i weight_i x_{t - width + 1 + i}, then silu(y_t) where asked for.

    Shapes: x, y (B, T, C); weight (C, width); bias (C,); state (B, C, width - 1), the inputs before the
    first, zeros when None.
    """
    C, width = weight.shape
    x = x.mT
    x = F.pad(x, (width - 1, 0)) if state is None else torch.cat([state.to(x.dtype), x], dim=-1)
    y = F.conv1d(x, weight[:, None], bias, groups=C).mT
    return F.silu(y) if silu else y
