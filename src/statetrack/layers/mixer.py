"""What every mixer has in common: the layer that carries information along time."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.errors import UserError


class Packing(NamedTuple):
    """Where sequences of mixed lengths lie in one row x (1, N, d_model): s takes cu_seqlens[s] to [s + 1]."""

    cu_seqlens: Tensor  # (sequences + 1,), whole numbers from 0 to N, on the device of x
    max_seqlen: int  # no sequence is longer


class Mixer(nn.Module, ABC):
    """x (B, T, d_model) -> y (B, T, d_model), plus the state to carry on from.

    One `forward` serves training, prefill and decoding: feed a sequence in any pieces, hand each piece the
    state the last one returned, and the outputs are those of one pass. The state is None before the first.
    Mixers that `packs` also take a `packing`: each of its sequences begins afresh, and no state comes back.
    """

    packs = False

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


def offsets(packing: Packing | None) -> dict[str, Any]:
    """Where packed sequences lie, as the ops take it: `cu_seqlens` and `max_seqlen`, or nothing."""
    return {} if packing is None else packing._asdict()


def check_no_state(where: str, state: Any, packing: Packing | None) -> None:
    """Refuse to carry on from a state with packed sequences: each begins afresh."""
    if state is not None and packing is not None:
        raise UserError(f"{where}: packed sequences begin afresh, so no state can come with a packing.")


def at_least_float32(x: Tensor) -> Tensor:
    """Halves as float32, the rest as it is: what drives a recurrence must not be rounded to bfloat16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def fuses(x: Tensor) -> bool:
    """Whether to join products of x and fuse what follows: on a GPU, where every kernel costs its launch."""
    return x.is_cuda


def working_dtype(x: Tensor) -> torch.dtype:
    """What a linear map of x computes in on a GPU: autocast's dtype where it is on, so no cast follows."""
    if fuses(x) and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def joined_product(x: Tensor, linears: Sequence[nn.Linear]) -> Tensor:
    """The outputs of several linear maps without bias beside each other, from one product.

    Rows of halves stay aligned to 16 bytes, as tensor cores want them: up to 7 columns more, without meaning.
    """
    weights = [linear.weight for linear in linears]
    missing, longest = -sum(len(weight) for weight in weights) % 8, max(weights, key=len).detach()
    while missing > 0:
        weights.append(longest[:missing])
        missing -= len(weights[-1])
    return F.linear(x, torch.cat(weights))


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
