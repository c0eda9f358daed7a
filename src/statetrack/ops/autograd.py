"""When gradients are wanted; and hand-written backwards give first derivatives only, and say so."""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def needs_gradient(inputs: Iterable[Tensor | None]) -> bool:
    """Whether a backward may follow, and what it needs is to be kept."""
    if torch.is_grad_enabled():
        for x in inputs:  # a generator inside any() would take three times as long
            if x is not None and x.requires_grad:
                return True
    return False


def first_derivative_only(backward: Callable) -> Callable:
    """Refuse `create_graph=True`: second derivatives of a hand-written backward would be silently wrong."""

    @functools.wraps(backward)
    def checked_backward(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "This backend has no second derivatives (create_graph=True was asked for). "
                'Use backend="reference", or the environment variable STATETRACK_BACKEND=reference.'
            )
        return backward(ctx, *gradients)

    return checked_backward
