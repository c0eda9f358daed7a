"""Partial gradients of many programs summed in a fixed order, so that results repeat bit by bit.

A kernel whose programs each see some of the rows (of a batch, of tokens) leaves one partial gradient of a
parameter per program; here they are added up. Used by the backward of norm, embedding and convolution.
"""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.partial_gradients.triton.column_sum import column_sum_kernel
from statetrack.ops.triton_runtime.compile_ahead import launch


def constants(rows: int, columns: int) -> dict[str, Any]:
    """Constants of the kernel: a few columns are divided among more programs."""
    BC = 16 if columns <= 2048 else 64
    return {"BC": BC, "BR": 256 if BC == 16 and rows > 64 else 64, "num_warps": 4}


def sum_over_programs(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_p partial_p over the first axis of contiguous float32 `partial` (programs, ...), as `dtype`."""
    total = torch.empty(partial.shape[1:], dtype=dtype, device=partial.device)
    constant = constants(len(partial), total.numel())
    grid = (-(-total.numel() // constant["BC"]),)
    launch(column_sum_kernel, grid)(partial, total, len(partial), total.numel(), **constant)
    return total


__all__ = ["sum_over_programs"]
