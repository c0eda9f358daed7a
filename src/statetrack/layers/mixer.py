"""The base class of mixers, the layers that carry information along time."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from statetrack.errors import UserError
from statetrack.peer_options import explain_layer


class Packing(NamedTuple):
    """Boundaries of S packed sequences in one row x (1, N, d_model).

        layer(x, packing=Packing(torch.tensor([0, 3, 7]), max_seqlen=4))

    Sequence s is x[:, cu_seqlens[s] : cu_seqlens[s + 1]]. It starts from its own of the given states, (S,
    ...), or from an empty one. `cu_seqlens` (S + 1,) holds integers from 0 to N, on the device of x;
    `max_seqlen` is the length of the longest sequence or more; `states` says whether the layer returns the
    states after each sequence, (S, ...).
    """

    cu_seqlens: Tensor
    max_seqlen: int
    states: bool = False


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
    the packing asks for them, and None otherwise; with `packs_by_padding = True` they are padded inside.
    All mixers of this library take an `attention_mask` (B, T), True at real steps, with padding on either
    side: every row is computed from its real steps alone, and y is 0 at padding. A mixer without a state
    transition, attention, has `is_recurrent = False`.

    A mixer of your own derives from this class, with `forward` and `transition_eigenvalues`:

    >>> class Sums(Mixer):
    ...     def forward(self, x, state=None):
    ...         sums = x.cumsum(1) if state is None else x.cumsum(1) + state[:, None]
    ...         return sums, sums[:, -1]
    ...
    ...     def transition_eigenvalues(self, x, state=None):
    ...         return torch.ones_like(x)
    >>> Sums()(torch.ones(1, 3, 1))[0].flatten()
    tensor([1., 2., 3.])
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith("statetrack."):
            explain_layer(cls)

    packs = False
    packs_by_padding = False
    reports_norm_loss = False  # whether `forward` adds to `norm_losses`, for the training option isometry
    norm_losses: list[Tensor] | None = None  # None: nobody asks (`collected_norm_loss`)
    is_recurrent = True

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (own := _range_of(self)) is not None:  # beside the weights, not among them
            destination._metadata[prefix[:-1]]["eigenvalues"] = own

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any, **more: Any
    ) -> None:
        """Refuse weights of a layer with another eigenvalue range: here they are another function."""
        theirs, own = local_metadata.get("eigenvalues"), _range_of(self)
        if theirs is not None and own is not None and theirs != own:
            raise UserError(
                f"{type(self).__name__}: the weights are of a layer with eigenvalues in {theirs}, and this "
                f"one has {own}: with them it is another function. statetrack.extended_range(model) makes "
                "that step, or load dict(state_dict), which does not carry the range."
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest, **more)

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


def _range_of(mixer: nn.Module) -> str | None:
    return getattr(getattr(mixer, "config", None), "eigenvalues", None)


@runtime_checkable
class MixerConfig(Protocol):
    """A frozen dataclass of the user's choices, which builds the mixer it describes.

        mixer = DeltaNetConfig(heads=2).build(d_model=64, layers=1)

    `layers` is the number of layers of the model, on which initial weights may depend. `register_mixer` gives
    a config a name.
    """

    def build(self, d_model: int, layers: int) -> Mixer: ...
