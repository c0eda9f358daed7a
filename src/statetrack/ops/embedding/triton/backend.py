"""The Triton backend of the embedding: `torch.library` ops around the kernels."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only
from statetrack.ops.custom_ops import register_op
from statetrack.ops.embedding.triton.kernels import (
    embedding_backward_kernel,
    embedding_kernel,
    sorted_backward_kernel,
)
from statetrack.ops.partial_gradients import sum_over_programs
from statetrack.ops.triton_runtime.compile_ahead import launch
from statetrack.ops.triton_runtime.sizes import block, processors

UNSORTED_VOCABULARY = 1024  # beyond it, sorting the tokens is less work than multiplying by zeros
TILE = 2048  # values that a program gathers
BT, BD, BV = 64, 64, 128  # tokens, columns and rows of a program that sums gradients
PROGRAMS_PER_PROCESSOR = 1  # of the backward
SORTED_ROWS = 8  # gradients that a program adds at a time, of sorted tokens


def embedding_triton(tokens: Tensor, weight: Tensor) -> Tensor:
    """Same arguments and result as `embedding_reference`."""
    return torch.ops.statetrack.embedding(tokens.contiguous(), weight.contiguous())


def refuses(tokens: Tensor, weight: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if tokens.numel() == 0:
        return "the input is empty"
    return "float64 is not offered there" if weight.dtype == torch.float64 else None


def backward_plan(count: int, V: int, D: int, processors: int) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """Constants and grid of the backward; BLOCKS is how many blocks of BT tokens a program adds up."""
    rows = min(BV, block(V))
    columns = min(BD, block(D))
    table_blocks = -(-D // columns), -(-V // rows)
    token_blocks = -(-count // BT)
    programs = PROGRAMS_PER_PROCESSOR * processors
    per_program = -(-token_blocks * table_blocks[0] * table_blocks[1] // programs)
    constants = {"V": V, "D": D, "BV": rows, "BD": columns, "BT": BT, "BLOCKS": per_program}
    return constants | {"num_warps": 8 if rows > 32 else 4}, (-(-token_blocks // per_program), *table_blocks)


def _forward(tokens: Tensor, weight: Tensor) -> Tensor:
    V, D = weight.shape
    out = weight.new_empty(*tokens.shape, D)
    count, columns = tokens.numel(), min(1024, block(D))
    constants: dict[str, Any] = {"V": V, "D": D, "BD": columns, "BT": TILE // columns, "num_warps": 4}
    grid = -(-count // constants["BT"]), -(-D // columns)
    launch(embedding_kernel, grid)(tokens, weight, out, count, **constants)
    return out


def _backward(tokens: Tensor, dout: Tensor, V: int) -> Tensor:
    D = dout.shape[-1]
    if V > UNSORTED_VOCABULARY:
        return _sorted_backward(tokens, dout, V)
    constants, grid = backward_plan(tokens.numel(), V, D, processors(dout.device))
    dweights = torch.empty(grid[0], V, D, dtype=torch.float32, device=dout.device)
    launch(embedding_backward_kernel, grid)(tokens, dout.contiguous(), dweights, tokens.numel(), **constants)
    return sum_over_programs(dweights, dout.dtype)


def sorted_constants(V: int, D: int) -> dict[str, Any]:
    """Constants of the backward of sorted tokens."""
    return {"V": V, "D": D, "BD": min(512, block(D)), "ROWS": SORTED_ROWS, "num_warps": 4}


def _sorted_backward(tokens: Tensor, dout: Tensor, V: int) -> Tensor:
    """Tokens are sorted, and equal ones stay in their order: the same additions every time."""
    constants = sorted_constants(V, dout.shape[-1])
    ordered, order = torch.sort(tokens.flatten(), stable=True)
    dweight = dout.new_zeros(V, constants["D"])
    grid = tokens.numel(), -(-constants["D"] // constants["BD"])
    launch(sorted_backward_kernel, grid)(
        ordered, order, dout.contiguous(), dweight, tokens.numel(), **constants
    )
    return dweight


def _fake(tokens, weight):
    return weight.new_empty(*tokens.shape, weight.shape[1])


def _backward_fake(tokens, dout, V):
    return dout.new_empty(V, dout.shape[-1])


register_op("embedding(Tensor tokens, Tensor weight) -> Tensor", _forward, _fake)
register_op("embedding_backward(Tensor tokens, Tensor dout, int V) -> Tensor", _backward, _backward_fake)


def _setup_context(ctx, inputs, output):
    tokens, weight = inputs
    ctx.save_for_backward(tokens)
    ctx.V = weight.shape[0]


@first_derivative_only
def _gradients(ctx, dout):
    return None, torch.ops.statetrack.embedding_backward(*ctx.saved_tensors, dout, ctx.V)


torch.library.register_autograd("statetrack::embedding", _gradients, setup_context=_setup_context)
