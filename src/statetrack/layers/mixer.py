"""What every mixer has in common: the layer that carries information along time."""

import math
from abc import ABC, abstractmethod
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from statetrack.errors import UserError


class Mixer(nn.Module, ABC):
    """x (B, T, d_model) -> y (B, T, d_model), plus the state to carry on from.

    One `forward` serves training, prefill and decoding: feed a sequence in any pieces, hand each piece the
    state the last one returned, and the outputs are those of one pass. The state is None before the first.
    """

    @abstractmethod
    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]: ...

    def place(self, layer: int, layers: int) -> None:
        """Told by the backbone, once and before training, which of its layers this is.

        For initial weights that depend on the depth; most mixers have none.
        """

    @abstractmethod
    def transition_eigenvalues(self, x: Tensor) -> Tensor:
        """The spectrum of the state transition A(x_t) that the layer uses on input x, from a fresh state.

        Shape (B, T, ..., n): the last axis lists the eigenvalues of one transition matrix, complex where
        they can be.
        """


@runtime_checkable
class MixerConfig(Protocol):
    """A frozen dataclass of the choices a user makes; it builds the mixer it describes."""

    def build(self, d_model: int, layers: int) -> Mixer: ...


def divide(where: str, total: int, parts: int, what: str) -> int:
    """total / parts, or an error that says which sizes do not fit."""
    if parts < 1 or total % parts:
        raise UserError(f"{where}: {what} = {parts} does not divide {total}. Choose a divisor of {total}.")
    return total // parts


def check_sizes(where: str, least: int = 1, **sizes: int | None) -> None:
    """Refuse widths and counts below `least`; None stands for a default and passes."""
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < least):
            raise UserError(f"{where}: {name} is {size!r}, expected a whole number of at least {least}.")


def at_least_float32(x: Tensor) -> Tensor:
    """Halves as float32, the rest as it is: what drives a recurrence must not be rounded to bfloat16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def no_weight_decay(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter that the optimiser must not decay, such as A_log."""
    parameter.no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


def inverse_softplus(y: Tensor) -> Tensor:
    """x such that softplus(x) = y."""
    return y + torch.log(-torch.expm1(-y))


def log_uniform_steps(n: int, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4) -> Tensor:
    """n step sizes, log-uniform in [low, high], as biases in front of a softplus (Gu and Dao 2023)."""
    steps = torch.exp(torch.empty(n).uniform_(math.log(low), math.log(high)))
    return inverse_softplus(steps.clamp(min=floor))
