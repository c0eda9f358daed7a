"""The parts of a run that the loop holds together: a source, a step, a store and an evaluation.

The loop (`loop.py`) knows these and nothing more, so another kind of model, data or machine brings its own
parts and no second loop:

    source       which batch belongs to a step                      source.py
    step         one step of the optimiser                          graph_step.py, sharded_step.py
    store        checkpoints and the final weights                  store.py
    evaluation   what a line of metrics holds beside the loss       evaluation.py

With several processes every rank has its own parts and calls them in the same order; what one rank alone may
do (print, write) goes through `ranks.py`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Generator

from statetrack.tasks import Batch
from statetrack.training.state import TrainingState
from statetrack.training.throughput import Meter


class Share(NamedTuple):
    """Part of a step's batch: the rows of one micro-batch of one rank. The default is all of it."""

    rank: int = 0
    ranks: int = 1
    micro: int = 0
    micros: int = 1

    def rows(self, batch: int) -> slice:
        """The rows out of `batch`, which ranks x micros divides. A rank's micro-batches are neighbours."""
        size = batch // (self.ranks * self.micros)
        start = (self.rank * self.micros + self.micro) * size
        return slice(start, start + size)


WHOLE = Share()


class Source(Protocol):
    """Batches by step. A source keeps no position: a run that resumes at step n asks for batch n.

    Data that are drawn, not stored, are the one exception: they come from `generator`, which is part of the
    training state and so of every checkpoint. Such a source is asked for each step once per share, in order.
    """

    @property
    def capturable(self) -> bool:
        """Whether `batch` launches the same kernels in every step of one width, as a CUDA graph needs it."""
        ...

    def width(self, step: int) -> int:
        """Known without drawing anything: batches of equal width have equal shapes."""
        ...

    def prepare(self, step: int) -> None:
        """Put what `batch` reads on the device. Called before each step, never inside a CUDA graph."""
        ...

    def batch(self, step: int, share: Share, generator: Generator) -> Batch:
        """The share's rows of the batch of step 0, 1, ..., on the device of `generator`."""
        ...


class Step(Protocol):
    """One step of training on `state`: batch, loss, gradients, clipping, optimiser."""

    state: TrainingState

    def __call__(self) -> None:
        """Take a step: `state.step` grows by one, `state.loss_sum` by the loss of the whole batch."""
        ...

    def last_rate(self) -> float:
        """The learning rate of the last step."""
        ...

    def last_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping; None where nothing is clipped."""
        ...

    def on_stream(self) -> AbstractContextManager:
        """Where everything that touches the state must run."""
        ...


class Store(Protocol):
    """Checkpoints of one run. Every rank calls every method; all return, or all raise."""

    def save(self, state: TrainingState, rows: int) -> None:
        """Keep the state. `rows` is how many rows of metrics there are so far."""
        ...

    def load_latest(self, new_state: Callable[[], TrainingState], rows: list[int]) -> TrainingState | None:
        """A new state brought to the newest usable checkpoint, or None. `rows` are the steps of the rows of
        metrics that are there; a checkpoint counts on those before it."""
        ...

    def newest(self) -> Path | None:
        """Where the newest checkpoint is, if there is one."""
        ...

    def finish(self, state: TrainingState) -> None:
        """Keep the weights of the last step, for those who use the model."""
        ...


# What a line of metrics holds beside step, loss and learning rate. Every rank evaluates; rank 0 writes.
Evaluation = Callable[[TrainingState], dict[str, Any]]


@dataclass(frozen=True)
class Parts:
    """One run, ready for the loop."""

    new_state: Callable[..., TrainingState]  # before the first step; `to_fill`: for a checkpoint to fill
    step: Callable[[TrainingState], Step]
    store: Store
    evaluate: Evaluation
    steps: int
    log_every: int
    eval_every: int  # 0 for the last step only
    # behind every step: keeps the weights that are to be the final ones, says so in a row
    select: Callable[[TrainingState], dict[str, Any]] | None = None
    meter: Meter | None = None  # of a language model: rows have its gradient norm too
