"""Where training sequences start: in noise, or in the state in which the last batch ended.

A tracker that is trained from empty states alone meets, within the training length, only states that are
nearly exact. Both options show it others:

    noise      S_0 = noise N(0, 1), a state that the input does not explain
    carried    with probability 1 - 1 / n a sequence goes on where the sequence in its row ended in the batch
               before: the model starts from that state, detached, and the labels from that product. Such a
               sequence has no start token. Sequences are n batches long on average.
    carried-right    the same, but a sequence goes on only if every answer in its last batch was right. So
               a model that knows nothing yet starts from empty states, one that is right to some length is
               trained around that length, and no sequence that went wrong long ago drowns the others.

Nothing here reads a value on the host, so a CUDA graph can record it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from statetrack.layers import Model
from statetrack.spec import RunSpec
from statetrack.tasks import Batch, WordProblem

if TYPE_CHECKING:
    from statetrack.training.state import TrainingState

CARRIED = "carried."  # in the names of `TrainingState.kept`
PRODUCTS = f"{CARRIED}products"  # of every row's sequence; -1 before the first


def carried_states(spec: RunSpec, model: Model) -> dict[str, Tensor]:
    """What a run carries from batch to batch, as it is before the first one, by name; or nothing."""
    if not spec.training.initial_states.startswith("carried"):
        return {}
    batch = spec.training.batch_at(0)
    states = {f"{CARRIED}{i}": x for i, x in enumerate(_tensors(empty_states(model, batch)))}
    return states | {PRODUCTS: torch.full((batch,), -1, device=model.head.weight.device)}


def empty_states(model: Model, batch: int) -> list[Any]:
    """A state per layer, as `Model.forward` takes them."""
    mixers: list[Any] = [block.mixer for block in model.blocks]
    return [mixer.empty_state(batch) for mixer in mixers]  # `RunSpec` refuses mixers without them


def _tensors(states: Sequence[Any]) -> list[Tensor]:
    """All tensors of the layers' states: S, and the past of the convolutions where there are any."""
    return [x for layer in states for x in (layer.S, *(layer.convolution or ()))]


class InitialStates:
    """The states of a step's sequences, and what becomes of those in which they end."""

    def __init__(self, spec: RunSpec, state: "TrainingState"):
        self.spec, self.state = spec, state
        self.form = empty_states(state.model, 1)  # of a state, for `_as_states`
        size = len(_tensors(self.form)) if self.carries else 0
        self.carried = [state.kept[f"{CARRIED}{i}"] for i in range(size)]

    @property
    def carries(self) -> bool:
        return self.spec.training.initial_states.startswith("carried")

    def begin(self, batch: Batch) -> tuple[Batch, list[Any] | None]:
        """The batch as it is trained on, and the states to start from; None: empty ones."""
        if self.carries and 0 < self.spec.training.short_steps <= self.state.step:
            return batch, None  # a graph has sequences of one length, so it never goes both ways
        if self.carries:
            return self._continued(batch)
        noise, generator = self.spec.training.state_noise, self.state.generator

        def draw(x: Tensor) -> Tensor:
            return noise * torch.randn(x.shape, generator=generator, device=x.device)

        empty = empty_states(self.state.model, len(batch.inputs))
        return batch, [layer._replace(S=draw(layer.S)) for layer in empty]

    def _continued(self, batch: Batch) -> tuple[Batch, list[Any]]:
        task, generator = self.spec.task, self.state.generator
        assert isinstance(task, WordProblem)
        products = self.state.kept[PRODUCTS]
        drawn = torch.rand(len(products), generator=generator, device=products.device)
        fresh = (drawn * self.spec.training.carried_batches < 1) | (products < 0)
        later = task.go_on(products.clamp(min=0), batch, generator)
        mixed = Batch(*(torch.where(fresh[:, None], a, b) for a, b in zip(batch, later, strict=True)))
        states = [torch.where(fresh.view(-1, *[1] * (x.ndim - 1)), 0.0, x) for x in self.carried]
        return mixed, self._as_states(states)

    def _as_states(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The inverse of `_tensors`."""
        left = iter(tensors)
        return [
            layer._replace(
                S=next(left), convolution=layer.convolution and tuple(next(left) for _ in range(3))
            )
            for layer in self.form
        ]

    def end(self, batch: Batch, states: list[Any], logits: Tensor) -> None:
        """Keep the states in which the sequences of the batch ended, if they are carried on.

        For batches that `begin` gave states to start from.
        """
        if not self.carries:
            return
        for place, x in zip(self.carried, _tensors(states), strict=True):
            place.copy_(x.detach())
        products = batch.targets[:, -1]
        if self.spec.training.initial_states == "carried-right":
            right = (logits.detach().argmax(-1) == batch.targets).all(-1)
            products = torch.where(right, products, -1)
        self.state.kept[PRODUCTS].copy_(products)
