"""The Triton backend of `run_automaton`."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.automaton_run.triton.kernels import run_automaton_kernel
from statetrack.ops.triton_runtime.compile_ahead import launch

WORDS = 32  # of a program: one per lane
LAUNCH: dict[str, Any] = {"BLOCK": WORDS, "num_warps": 1}


def run_automaton_triton(table: Tensor, letters: Tensor, start: int) -> Tensor:
    """Same arguments and results as `run_automaton_reference`."""
    B, T = letters.shape
    table, letters = table.long().contiguous(), letters.long().contiguous()
    states = torch.empty_like(letters)
    grid = (-(-B // WORDS),)
    launch(run_automaton_kernel, grid)(table, letters, states, start, B, T, table.shape[1], **LAUNCH)
    return states
