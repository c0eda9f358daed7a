"""The split as PyTorch has it."""

import torch.nn.functional as F
from torch import Tensor


def silu_split_reference(x: Tensor, widths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """silu(q), silu(k), silu(v) and r of x = [q, k, v, r, ...] along the last axis.

    Shapes: x (..., N); results (..., width). Columns beyond the four widths are left out.
    """
    q, k, v, rest = x[..., : sum(widths)].split(widths, dim=-1)
    return F.silu(q), F.silu(k), F.silu(v), rest
