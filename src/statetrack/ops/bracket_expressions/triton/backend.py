"""The Triton backend of `bracket_expressions`."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.bracket_expressions.triton.kernels import bracket_expressions_kernel
from statetrack.ops.triton_runtime.compile_ahead import launch

EXPRESSIONS = 32  # of a program: one per lane
LAUNCH: dict[str, Any] = {"BLOCK": EXPRESSIONS, "num_warps": 1}


def bracket_expressions_triton(
    sizes: Tensor, digits: Tensor, operators: Tensor, splits: Tensor, modulus: int
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `bracket_expressions_reference`."""
    B, T = digits.shape
    inputs = (
        sizes.long().contiguous(),
        digits.contiguous(),
        operators.contiguous(),
        splits.double().contiguous(),
    )
    tokens, values = digits.clone(), torch.empty_like(sizes, dtype=torch.long)
    stack, pairs = torch.empty_like(digits), torch.empty_like(digits)  # an item gives at least one token
    grid = (-(-B // EXPRESSIONS),)
    results = tokens, values, stack, pairs
    launch(bracket_expressions_kernel, grid)(*inputs, *results, B, T, MODULUS=modulus, **LAUNCH)
    return tokens, values
