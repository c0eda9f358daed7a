"""The Triton backend of the walk."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.triton_ahead import launch
from statetrack.ops.walk.triton_kernels import walk_kernel

WORDS = 32  # of a program: one per lane
LAUNCH: dict[str, Any] = {"BLOCK": WORDS, "num_warps": 1}


def walk_triton(table: Tensor, letters: Tensor, start: int) -> Tensor:
    """Same arguments and results as `walk_reference`."""
    B, T = letters.shape
    table, letters = table.long().contiguous(), letters.long().contiguous()
    states = torch.empty_like(letters)
    grid = (-(-B // WORDS),)
    launch(walk_kernel, grid)(table, letters, states, start, B, T, table.shape[1], **LAUNCH)
    return states
