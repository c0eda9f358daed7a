"""The base class of mixers, the layers that carry information along time."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn


class Packing(NamedTuple):
    """Boundaries of S packed sequences in one row x (1, N, d_model).

    Sequence s is x[:, cu_seqlens[s] : cu_seqlens[s + 1]].
    """

    cu_seqlens: Tensor  # (S + 1,), integers from 0 to N, on the device of x
    max_seqlen: int  # at least the length of the longest sequence
    states: bool = False  # whether mixers return the states after each sequence, (S, ...)


def offsets(packing: Packing | None) -> dict[str, Any]:
    """The packing as keyword arguments of an op, `cu_seqlens` and `max_seqlen`; none without a packing."""
    if packing is None:
        return {}
    return {"cu_seqlens": packing.cu_seqlens, "max_seqlen": packing.max_seqlen}


def returns_states(packing: Packing | None) -> bool:
    """Whether a mixer has to return a state: always without a packing, which must ask for it."""
    return packing is None or packing.states


class Mixer(nn.Module, ABC):
    """x (B, T, d_model) -> y (B, T, d_model), plus the state to continue from.

    One `forward` serves training, prefill and decoding: feed a sequence in any pieces, pass with each piece
    the state that the previous one returned (None before the first), and the outputs equal those of one pass.
    Mixers with `packs = True` also take a `packing` of S sequences. Each starts from its own of the given
    states, whose batch axis is S, or from an empty one; the states after them are returned, (S, ...), where
    the packing asks for them, and None otherwise. A mixer without a state transition, attention, has
    `is_recurrent = False`.
    """

    packs = False
    is_recurrent = True

    @abstractmethod
    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]: ...

    def empty_state(self, batch: int) -> Any:
        """The state before the first token of `batch` sequences, as tensors on the mixer's device.

        None where a mixer does not offer it: it then cannot be trained from noisy or carried states.
        """
        return None

    def place(self, layer: int, layers: int) -> None:
        """Called by the backbone once, before training, with this layer's index and the number of layers.

        Override it where initial weights depend on the depth.
        """

    @abstractmethod
    def transition_eigenvalues(self, x: Tensor, state: Any = None) -> Tensor:
        """The eigenvalues of the state transitions A(x_t) on input x, starting from `state`, None for empty.

        Shape (B, T, ..., n): the last axis lists the eigenvalues of one transition matrix. Complex where the
        matrix can have complex ones.
        """


@runtime_checkable
class MixerConfig(Protocol):
    """A frozen dataclass of the user's choices, which builds the mixer it describes."""

    def build(self, d_model: int, layers: int) -> Mixer: ...
