"""One AdamW step with gradient clipping for CUDA graphs, in place of that of `torch.optim.AdamW`."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from statetrack.ops.backends import prefers_triton


class RecordedAdamW(Protocol):
    """Clipping and one AdamW step, in kernels that read the addresses of the weights from a table.

    Implemented by `adamw.triton.backend.TableAdamW`.
    """

    launch: Callable[[], None]  # while a graph is captured, or eagerly
    fill: Callable[[], None]  # after the capture: writes the table
    norm: Callable[[], Tensor]  # of the last step's gradients, before clipping


def recorded_adamw(
    optimizer: torch.optim.Optimizer, clip: float, copies: Mapping[Tensor, Tensor] | None = None
) -> RecordedAdamW | None:
    """Clipping to the norm `clip` (0 for none) and one step of `optimizer` in a few kernels, or None.

        g <- g min(1, clip / (||g|| + 1e-6))
        m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
        p <- (1 - lr decay) p - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    `copies` maps some weights to a bfloat16 copy: the copy has the gradient, and the step updates both. The
    results and the optimiser's state are those of `clip_grad_norm_` and `torch.optim.AdamW` to rounding; only
    the gradients themselves stay unclipped. None where Triton cannot run it, or STATETRACK_BACKEND names
    another backend.
    """
    rate = optimizer.param_groups[0]["lr"]
    if not isinstance(rate, Tensor) or not prefers_triton(rate):
        return None
    from statetrack.ops.adamw.triton import backend as triton_backend

    if triton_backend.refuses(optimizer) or not isinstance(optimizer, torch.optim.AdamW):
        return None
    return triton_backend.TableAdamW(optimizer, clip, copies or {})


__all__ = ["RecordedAdamW", "recorded_adamw"]
