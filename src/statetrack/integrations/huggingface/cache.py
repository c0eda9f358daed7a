"""The states of a model as a cache of transformers, so that `generate` can carry and reorder them."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import LongTensor, Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from transformers.cache_utils import Cache, LinearAttentionLayer


class StateLayer(LinearAttentionLayer):
    """The state of one layer: its tensors, batch first, are the layer's recurrent states 0, 1, ...

    They are assigned, not copied into fixed buffers: the keys of an attention layer grow.
    """

    is_compileable = False

    def __init__(self) -> None:
        super().__init__(number_of_states=0)
        self.structure: Any = None  # of the state: which named tuple its tensors belong to

    @property
    def state(self) -> Any:
        """What the layer's mixer returned; None before the first token."""
        if self.structure is None:
            return None
        return tree_unflatten(list(self.recurrent_states.values()), self.structure)

    @state.setter
    def state(self, state: Any) -> None:
        tensors, self.structure = tree_flatten(state)
        self.number_of_states = len(tensors)
        self.recurrent_states = dict(enumerate(tensors))
        # a state may have parts that are None, such as that of a convolution where there is none
        self.is_recurrent_states_initialized = {i: x is not None for i, x in enumerate(tensors)}
        self.is_conv_states_initialized = dict.fromkeys(self.recurrent_states, False)
        self.has_previous_state = dict.fromkeys(self.recurrent_states, True)
        first = next(x for x in tensors if x is not None)
        self.device, self.dtype = first.device, first.dtype

    def reset(self) -> None:
        self.__init__()

    def change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor of the state by `change` of it."""
        if self.structure is not None:
            self.state = tree_map_only(Tensor, change, self.state)


class StateCache(Cache):
    """One `StateLayer` per layer, and the number of tokens they have seen.

    Its size does not grow with the tokens, but for layers with attention. It cannot be cropped: a state holds
    no past ones.
    """

    layers: list[StateLayer]  # type: ignore[assignment]

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[StateLayer() for _ in range(layers)])
        self.tokens = 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def states(self) -> list[Any] | None:
        """The states to continue from, one per layer; None before the first token."""
        return [layer.state for layer in self.layers] if self.tokens else None

    def update_states(self, states: Sequence[Any], tokens: int) -> None:
        """Keep the states after `tokens` more tokens (padding included)."""
        for layer, state in zip(self.layers, states, strict=True):
            layer.state = state
        self.tokens += tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # none

    def reset(self) -> None:
        super().reset()
        self.tokens = 0

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(
            "StateCache: a recurrent state cannot be taken back by some tokens, so assisted generation and "
            "other methods that crop the cache do not work. Keep a copy of the cache instead."
        )

    def reorder_cache(self, beam_idx: LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self.layers:
            layer.change_batch(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        for layer in self.layers:
            layer.change_batch(lambda x: x.repeat_interleave(repeats, dim=0))
