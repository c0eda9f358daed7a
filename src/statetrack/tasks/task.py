"""What a task is: a way to draw sequences with labels. Tasks never see a model."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Generator, Tensor

from statetrack.errors import UserError

IGNORE = -100  # the target of a position that does not count


class Batch(NamedTuple):
    inputs: Tensor  # (B, T), integers below vocab_size
    targets: Tensor  # (B, T), integers below n_classes, or IGNORE


def answer_positions(targets: Tensor) -> Tensor:
    """Where the one position that counts is in each sequence of a "last" task, (B, 1)."""
    return (targets != IGNORE).byte().argmax(1, keepdim=True)


@dataclass(frozen=True)
class Task(ABC):
    """Sequences of tokens with labels. Randomness enters through `generator`, which also sets the device.

    `labels` says which positions count: "dense" tasks label every position, so one long batch measures all
    shorter lengths too; "last" tasks label one position per sequence and mix lengths in a batch; "given"
    tasks mix lengths and label any positions (see `StoredTask`).
    """

    labels: ClassVar[Literal["dense", "last", "given"]]
    train_lengths: ClassVar[tuple[int, int]]  # drawn uniformly, both ends included
    eval_lengths: ClassVar[tuple[int, ...]]  # where accuracy is reported, or edges of bins for "last"
    shortest: ClassVar[int] = 1
    # Whether `fill` with a width does the same operations whatever it draws, as a CUDA graph needs it.
    drawn_without_looking: ClassVar[bool] = True

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def n_classes(self) -> int: ...

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy of guessing uniformly among the possible answers."""

    @abstractmethod
    def fill(self, lengths: Tensor, generator: Generator, width: int | None = None) -> Batch:
        """One sequence for each length in `lengths` (B,), padded to what a length of `width` takes.

        Without a width they are padded to the longest, which on a GPU means to wait for `lengths`.
        """

    def sample(self, batch: int, lengths: tuple[int, int], generator: Generator) -> Batch:
        """`batch` sequences with lengths uniform in [low, high]; where lengths mix, padded to `high`."""
        known = self.labels == "last" or lengths[0] == lengths[1]
        return self.fill(
            self.draw_lengths(batch, lengths, generator), generator, lengths[1] if known else None
        )

    def draw_lengths(self, batch: int, lengths: tuple[int, int], generator: Generator) -> Tensor:
        """Lengths (batch,), uniform in [low, high]; dense tasks give a whole batch one length."""
        low, high = lengths
        if not self.shortest <= low <= high:
            raise UserError(
                f"{type(self).__name__}: lengths are {low} to {high}, expected "
                f"{self.shortest} <= low <= high."
            )
        size = 1 if self.labels == "dense" else batch
        drawn = torch.randint(low, high + 1, (size,), generator=generator, device=generator.device)
        return drawn.expand(batch)


def labelled_up_to(lengths: Tensor, batch: Batch) -> Batch:
    """Dense labels behind a start token, without those past each sequence's length: they do not count."""
    position = torch.arange(batch.targets.shape[1], device=batch.targets.device)
    return Batch(batch.inputs, torch.where(position <= lengths[:, None], batch.targets, IGNORE))
