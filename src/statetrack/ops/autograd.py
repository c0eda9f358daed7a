"""Whether gradients are needed, and the error for second derivatives of hand-written backwards."""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def needs_gradient(inputs: Iterable[Tensor | None]) -> bool:
    """Whether a backward may follow, so that what it reads must be saved."""
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
