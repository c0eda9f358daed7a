"""Tasks whose sequences are stored, not drawn: a training set and a test set of mixed lengths."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from statetrack.errors import UserError
from statetrack.tasks.task import IGNORE, Batch, Task

Split = Literal["train", "test"]
BINS = 4  # of test lengths, where none are given


class Sequences(NamedTuple):
    """S sequences of mixed lengths, concatenated."""

    inputs: Tensor  # (N,)
    targets: Tensor  # (N,), IGNORE where there is no label
    starts: Tensor  # (S,), where each sequence starts
    lengths: Tensor  # (S,), at least 1

    def batch(self, rows: Tensor, width: int) -> Batch:
        """The sequences `rows` (B,) padded to `width`: input 0 and no label."""
        position = torch.arange(width)
        inside = position < self.lengths[rows, None]
        where = torch.where(inside, self.starts[rows, None] + position, 0)
        return Batch(
            torch.where(inside, self.inputs[where], 0), torch.where(inside, self.targets[where], IGNORE)
        )

    def of_lengths(self, low: int, high: int) -> Tensor:
        """The rows of the sequences with `low` to `high` tokens."""
        return ((self.lengths >= low) & (self.lengths <= high)).nonzero()[:, 0]


@dataclass(frozen=True)
class StoredTask(Task):
    """A task with sequences of its own, split into "train" and "test".

    `train_lengths` chooses among the training sequences, `eval_lengths` are edges of bins of test lengths; by
    default all sequences are used.
    """

    labels = "given"

    @abstractmethod
    def sequences(self, split: Split) -> Sequences:
        """The sequences of a split, on the CPU. Called often: cache them."""

    @property
    def train_lengths(self) -> tuple[int, int]:  # type: ignore[override]
        lengths = self.sequences("train").lengths
        return int(lengths.min()), int(lengths.max())

    @property
    def eval_lengths(self) -> tuple[int, ...]:  # type: ignore[override]
        """Edges of a few bins of equal width; of one where all test sequences are equally long."""
        lengths = self.sequences("test").lengths
        low, high = int(lengths.min()), int(lengths.max())
        edges = {low + (high - low) * i // BINS for i in range(BINS + 1)}
        return tuple(sorted(edges)) if len(edges) > 1 else (low, low + 1)

    def capturable(self, device: torch.device) -> bool:
        return False

    def fill(self, lengths: Tensor, generator: Generator, width: int | None = None) -> Batch:
        raise UserError(f"{type(self).__name__}: its sequences are stored and cannot be drawn by length.")

    def sample(self, batch: int, lengths: tuple[int, int], generator: Generator) -> Batch:
        """`batch` test sequences with lengths in [low, high], drawn with replacement."""
        sequences = self.sequences("test")
        rows = sequences.of_lengths(*lengths)
        if not len(rows):
            raise UserError(
                f"{type(self).__name__}: no test sequence has {lengths[0]} to {lengths[1]} tokens, expected "
                f"lengths from {sequences.lengths.min()} to {sequences.lengths.max()}."
            )
        chosen = torch.randint(len(rows), (batch,), generator=generator, device=generator.device)
        drawn = sequences.batch(rows[chosen.cpu()], lengths[1])
        return Batch(*(x.to(generator.device) for x in drawn))
