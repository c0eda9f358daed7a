"""Weights that lie one after the other in memory, as the one weight of their joined product."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor


def lie_in_a_row(weights: Sequence[Tensor]) -> bool:
    """Whether the rows of these matrices follow each other in one storage, without gaps.

    Parameters have storages of their own; tensors of torch.compile and torch.func have no address.
    """
    first = weights[0]
    if type(first) is not Tensor or torch.compiler.is_compiling():
        return False
    if any(is_functorch_wrapped_tensor(weight) for weight in weights):
        return False
    expected, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for weight in weights:
        same = weight.dtype == first.dtype and weight.shape[1:] == first.shape[1:]
        if not (same and weight.is_contiguous() and weight.data_ptr() == expected):
            return False
        if weight.untyped_storage().data_ptr() != storage:
            return False
        expected += weight.numel() * weight.element_size()
    return True


class Joined(torch.autograd.Function):
    """torch.cat of weights that `lie_in_a_row`, without a copy: nothing is kept for the backward pass."""

    @staticmethod
    def forward(ctx, *weights):
        ctx.rows = [len(weight) for weight in weights]
        first, shape = weights[0], (sum(ctx.rows), *weights[0].shape[1:])
        # not a view of the first: autograd would take the result for a part of it
        joined = first.new_empty(0)
        return joined.set_(first.untyped_storage(), first.storage_offset(), shape, first.stride())

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0].split(ctx.rows)
