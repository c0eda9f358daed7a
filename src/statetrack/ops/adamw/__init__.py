"""The optimiser's step for recording in a CUDA graph, in place of that of `torch.optim.AdamW`."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from statetrack.ops.backends import prefers_triton


class RecordedAdamW(Protocol):
    """Clipping and one step in kernels that find the weights in a table: see `triton_backend`."""

    launch: Callable[[], None]  # while a graph is recorded, or at once
    fill: Callable[[], None]  # after the recording: writes the table


def recorded_adamw(
    optimizer: torch.optim.Optimizer, clip: float, copies: Mapping[Tensor, Tensor] | None = None
) -> RecordedAdamW | None:
    """Clipping to the norm `clip` (0 for none) and one step of `optimizer` in two kernels, or None.

    `copies` names, for some weights, a bfloat16 copy that has the gradient in its place and that the step
    brings up to date. The numbers are those of `clip_grad_norm_` and of the optimiser itself to rounding, and
    so is its state; only the gradients stay unclipped. None where Triton cannot take it, or
    STATETRACK_BACKEND says otherwise.
    """
    rate = optimizer.param_groups[0]["lr"]
    if not isinstance(rate, Tensor) or not prefers_triton(rate):
        return None
    from statetrack.ops.adamw.triton import backend as triton_backend

    if triton_backend.refuses(optimizer) or not isinstance(optimizer, torch.optim.AdamW):
        return None
    return triton_backend.TableAdamW(optimizer, clip, copies or {})


__all__ = ["RecordedAdamW", "recorded_adamw"]
