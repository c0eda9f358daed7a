"""The interface of a task: it draws sequences with labels. Tasks never see a model."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Generator, Tensor

from statetrack.errors import UserError

IGNORE = -100  # the target of a position that does not count


class Batch(NamedTuple):
    """Sequences and their labels, both (B, T); positions without a label have the target IGNORE = -100.

    >>> inputs, targets = task("parity-dense").sample(4, (8, 8), torch.Generator().manual_seed(0))
    >>> inputs.shape, targets.shape                              # a start token, and 8 bits
    (torch.Size([4, 9]), torch.Size([4, 9]))
    """

    inputs: Tensor  # (B, T), integers below vocab_size
    targets: Tensor  # (B, T), integers below n_classes, or IGNORE


def answer_positions(targets: Tensor) -> Tensor:
    """The index of the labelled position of each sequence of a "last" task, (B, 1).

    `targets` (B, T) are those of a `Batch`; every row holds one target other than IGNORE.
    """
    return (targets != IGNORE).byte().argmax(1, keepdim=True)


@dataclass(frozen=True)
class Task(ABC):
    """Sequences of tokens with labels. Randomness enters through `generator`, which also sets the device.

        task = statetrack.task("s5-swaps")
        batch = task.sample(64, (32, 32), torch.Generator().manual_seed(0))     64 sequences of length 32

    `labels` says which positions have labels: "dense" tasks label every position, so one long batch measures
    all shorter lengths too, and put a start token first, so a sequence of length n has n + 1 tokens; "last"
    tasks label one position per sequence and mix lengths in a batch; "given" tasks mix lengths and label any
    positions (they derive from `StoredTask`); "next" is text, where the label is the next token (`Corpus`).
    """

    labels: ClassVar[Literal["dense", "last", "given", "next"]]
    train_lengths: ClassVar[tuple[int, int]]  # drawn uniformly, both ends included
    eval_lengths: ClassVar[tuple[int, ...]]  # where accuracy is reported; bin edges for "last"
    shortest: ClassVar[int] = 1

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens are integers below this."""

    @property
    @abstractmethod
    def n_classes(self) -> int:
        """Labels are integers below this."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy of guessing uniformly among the possible answers."""

    @abstractmethod
    def fill(self, lengths: Tensor, generator: Generator, width: int | None = None) -> Batch:
        """One sequence for each length in `lengths` (B,), padded to the size of a sequence of length `width`.

        Without a width they are padded to the longest, which on a GPU synchronises to read `lengths`.
        """

    def capturable(self, device: torch.device) -> bool:
        """Whether `fill` with a width runs the same operations whatever it draws, as CUDA graphs require."""
        return True

    def sample(self, batch: int, lengths: tuple[int, int], generator: Generator) -> Batch:
        """`batch` sequences with lengths uniform in [low, high]; mixed lengths are padded to `high`."""
        known = self.labels == "last" or lengths[0] == lengths[1]
        return self.fill(
            self.draw_lengths(batch, lengths, generator), generator, lengths[1] if known else None
        )

    def draw_lengths(self, batch: int, lengths: tuple[int, int], generator: Generator) -> Tensor:
        """Lengths (batch,), uniform in [low, high]; dense tasks use one length for a whole batch."""
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
    """The batch with targets past each sequence's length set to IGNORE; position 0 is the start token."""
    position = torch.arange(batch.targets.shape[1], device=batch.targets.device)
    return Batch(batch.inputs, torch.where(position <= lengths[:, None], batch.targets, IGNORE))
