"""Partial sums of many programs added up, always in the same order."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.partial_sums.triton.kernels import add_up_kernel
from statetrack.ops.triton_runtime.compile_ahead import launch


def constants(rows: int, columns: int) -> dict[str, Any]:
    """What the kernel is compiled for: few columns are shared out among more programs."""
    BC = 16 if columns <= 2048 else 64
    return {"BC": BC, "BR": 256 if BC == 16 and rows > 64 else 64, "num_warps": 4}


def add_up(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first axis of contiguous float32 parts, in Triton, as `dtype`."""
    total = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    constant = constants(len(parts), total.numel())
    grid = (-(-total.numel() // constant["BC"]),)
    launch(add_up_kernel, grid)(parts, total, len(parts), total.numel(), **constant)
    return total


__all__ = ["add_up"]
