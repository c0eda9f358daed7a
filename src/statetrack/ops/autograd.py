"""Whether gradients are needed, and the error for second derivatives of hand-written backwards."""

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from statetrack.errors import UserError


def needs_gradient(inputs: Iterable[Tensor | None]) -> bool:
    """Whether a backward may follow, so that what it reads must be saved."""
    if torch.is_grad_enabled():
        for x in inputs:  # a generator inside any() would take three times as long
            if x is not None and x.requires_grad:
                return True
    return False


def autocast_is_on(device: torch.device) -> bool:
    """Whether autocast is on for the device. The meta device has none, and asking PyTorch is an error."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A block without autocast, which would run products in half precision."""
    return torch.autocast(device.type, enabled=False) if autocast_is_on(device) else nullcontext()


def run_backend(op: str, run: Callable, device: torch.device, *arguments: Any) -> Any:
    """Call a backend without autocast, which would run the products inside in half precision.

    Hand-written backwards know neither the transforms of torch.func nor forward-mode derivatives: PyTorch's
    errors for those are replaced by one that names the backend that does.
    """
    try:
        if autocast_is_on(device):
            with torch.autocast(device.type, enabled=False):
                return run(*arguments)
        return run(*arguments)
    except (RuntimeError, NotImplementedError) as error:
        if "setup_context staticmethod" in str(error) or "jvp function" in str(error):
            raise UserError(
                f"{op}: torch.func and forward-mode derivatives go through plain PyTorch only. Use "
                'backend="reference", or the environment variable STATETRACK_BACKEND=reference.'
            ) from error
        raise


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
