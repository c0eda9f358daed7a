"""Block-diagonal linear maps as dense products, which tensor cores make faster than many small ones.

Blocks of 4 x 4 in batched products fill a sixteenth of a tensor core's tile, and their results have to be put
in order afterwards. As one matrix with zeros they are one product that reads and writes every number once; up
to WIDEST channels its time is that of memory. Zeros add nothing, so results are those of the blocks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from statetrack.layers.fusion import fuses, may_read
from statetrack.layers.headwise import HeadwiseLinear
from statetrack.layers.precision import working_dtype

WIDEST = 512  # channels: beyond, products with zeros take longer than memory


def may_be_dense(x: Tensor, *maps: torch.nn.Module) -> bool:
    """Whether `dense_products` may stand for calling each of the block-diagonal maps."""
    if torch.compiler.is_compiling() or x.shape[-1] > WIDEST:
        return False
    return fuses(x) and may_read(HeadwiseLinear, *maps)


def dense_products(inputs: Sequence[Tensor], maps: Sequence[Sequence[HeadwiseLinear]]) -> Tensor:
    """The maps' results side by side: first those of maps[0] on inputs[0], then of maps[1] on inputs[1], ...

    Inputs (..., width), the result (..., maps width) in the dtype that linear maps have under autocast.
    """
    dtype = working_dtype(inputs[0])
    weights = [Dense.apply(dtype, *(each.weight for each in group)) for group in maps]
    return SideBySide.apply(*(x.to(dtype) for x in inputs), *weights)


class Dense(torch.autograd.Function):
    """Block-diagonal weights, each (blocks, n, n), as one matrix (maps blocks n, blocks n) of this dtype."""

    @staticmethod
    def forward(ctx, dtype, *weights):
        first = weights[0]
        blocks, n, _ = first.shape
        dense = first.new_zeros(len(weights), blocks, n, blocks, n, dtype=dtype)
        for place, weight in zip(dense, weights, strict=True):
            _diagonal(place).copy_(weight)
        ctx.shape, ctx.dtypes = dense.shape, [weight.dtype for weight in weights]
        return dense.view(-1, blocks * n)

    @staticmethod
    def backward(ctx, gradient):
        parts = gradient.view(ctx.shape)
        found = [_diagonal(part).to(dtype) for part, dtype in zip(parts, ctx.dtypes, strict=True)]
        return None, *found


def _diagonal(dense: Tensor) -> Tensor:
    """The blocks (blocks, n, n) of one matrix (blocks, n, blocks, n)."""
    return dense.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


class SideBySide(torch.autograd.Function):
    """[x_1 W_1^T, x_2 W_2^T, ...] from x_1, x_2, ..., W_1, W_2, ...: each product goes to its place."""

    @staticmethod
    def forward(ctx, *given):
        inputs, weights = given[: len(given) // 2], given[len(given) // 2 :]
        ctx.save_for_backward(*given)
        rows = [x.flatten(0, -2) for x in inputs]
        widths = [len(weight) for weight in weights]
        joined = rows[0].new_empty(len(rows[0]), sum(widths))
        for x, weight, place in zip(rows, weights, joined.split(widths, dim=1), strict=True):
            torch.mm(x, weight.T, out=place)
        return joined.view(*inputs[0].shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient):
        given = ctx.saved_tensors
        inputs, weights = given[: len(given) // 2], given[len(given) // 2 :]
        parts = gradient.flatten(0, -2).split([len(weight) for weight in weights], dim=1)
        dinputs = [(part @ weight).view_as(x) for part, x, weight in zip(parts, inputs, weights, strict=True)]
        dweights = [part.T @ x.flatten(0, -2) for part, x in zip(parts, inputs, strict=True)]
        return *dinputs, *dweights
