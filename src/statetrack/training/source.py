"""Where training batches come from: drawn fresh every step, from a fixed set, or from a task's own sequences.

A step's shape is known before anything is drawn, so a GPU never waits for the host, and a whole step can be
one CUDA graph. Tasks that mix lengths in a batch pad it to the longest there may be: of 1,024 sequences of 3
to 40 tokens one nearly always has 40. Tasks that give a batch one length go through a few widths.
"""

import random
from functools import lru_cache
from typing import Any

import torch
from torch import Generator, Tensor

from statetrack.errors import UserError
from statetrack.spec import RunSpec
from statetrack.tasks import IGNORE, Batch, Corpus, StoredTask, Task, answer_positions
from statetrack.training.corpus_source import CorpusSource
from statetrack.training.protocols import WHOLE, Share, Source

FIXED_SEED = 20_241_102  # of the fixed set: the same sequences for every seed of a run
WIDTHS = 4  # a batch is padded to the next of this many widths


def source_of(spec: RunSpec, device: torch.device) -> Source:
    """The source that a spec asks for."""
    if isinstance(spec.task, Corpus):
        return CorpusSource(spec)
    if isinstance(spec.task, StoredTask):
        return StoredSource(spec)
    return FixedSource(spec) if spec.training.train_samples else DrawnSource(spec, device)


def read_where_labelled(task: Task, batch: Batch) -> tuple[Tensor, dict[str, Any], Tensor]:
    """Tokens, the model's options, and the targets of the logits it then gives: one each for "last" tasks."""
    if task.labels != "last":
        return batch.inputs, {}, batch.targets
    at = answer_positions(batch.targets)
    return batch.inputs, {"at": at}, batch.targets.gather(1, at)


def real_positions(task: Task, inputs: Tensor, at: Tensor | None, targets: Tensor) -> Tensor | None:
    """Which of the `inputs` (B, T) come before the padding of a batch; None where there is no padding.

    A row is real up to its last label. Dense tasks have letters beyond it. Of a packed batch, one row, the
    answers are `at` several positions, and what follows the last is left over.
    """
    if task.labels not in ("last", "given"):
        return None
    position = torch.arange(inputs.shape[1], device=inputs.device)
    if at is None:
        at = torch.where(targets != IGNORE, position, -1)
    return position <= at.amax(1, keepdim=True)


def lengths_at(spec: RunSpec, step: int) -> tuple[int, int]:
    """The shortest and the longest sequence that a step may draw."""
    training = spec.training
    if step < training.short_steps:
        return training.short_length, training.short_length
    return training.train_lengths or (1, 1)


def batch_length(spec: RunSpec, step: int) -> int:
    """The length of a step's sequences, or the longest where they mix. No state, so runs resume anywhere."""
    low, high = lengths_at(spec, step)
    if spec.task.labels == "last" or low == high:
        return high
    return random.Random(f"{spec.seed} {step}").randint(low, high)


def batch_width(lengths: tuple[int, int], length: int) -> int:
    """The smallest of a few lengths, evenly spaced from shortest to longest, that holds `length`."""
    low, high = lengths
    widths = (high - (high - low) * i // WIDTHS for i in reversed(range(WIDTHS)))
    return next(width for width in widths if width >= length)


class DrawnSource:
    """Fresh sequences in every step. Each rank draws the whole batch, from equal generators, and cuts it."""

    def __init__(self, spec: RunSpec, device: torch.device):
        self.spec, self.capturable = spec, spec.task.capturable(device)
        # the length of a dense batch: a graph reads it where it is
        self.length, self.length_there = torch.zeros((), dtype=torch.long, device=device), 0
        self.drawn: tuple[int, Batch] | None = None  # the step that is being cut, and its batch

    def width(self, step: int) -> int:
        return batch_width(lengths_at(self.spec, step), batch_length(self.spec, step))

    def prepare(self, step: int) -> None:
        length = batch_length(self.spec, step)
        if length != self.length_there:
            self.length.fill_(length)
            self.length_there = length

    def batch(self, step: int, share: Share, generator: Generator) -> Batch:
        if share == WHOLE:
            return self._draw(step, generator)
        if self.drawn is None or self.drawn[0] != step:
            self.drawn = step, self._draw(step, generator)
        rows = share.rows(self.spec.training.batch_at(step))
        return Batch(*(x[rows] for x in self.drawn[1]))

    def _draw(self, step: int, generator: Generator) -> Batch:
        batch, (low, high) = self.spec.training.batch_at(step), lengths_at(self.spec, step)
        if self.spec.task.labels == "last" or low == high:
            return self.spec.task.sample(batch, (low, high), generator)
        return self.spec.task.fill(self.length.expand(batch), generator, self.width(step))


class FixedSource:
    """Batches of a fixed set of `train_samples` sequences, every epoch in an order of its own by the seed."""

    capturable = False

    def __init__(self, spec: RunSpec):
        self.spec = spec

    def width(self, step: int) -> int:
        return (self.spec.training.train_lengths or (1, 1))[1]

    def prepare(self, step: int) -> None:
        pass

    def batch(self, step: int, share: Share, generator: Generator) -> Batch:
        config, device = self.spec.training, generator.device
        assert config.train_lengths is not None
        data = _fixed_set(self.spec.task, config.train_lengths, config.train_samples, device)
        per_epoch = config.train_samples // config.batch
        order = _epoch_order(config.train_samples, self.spec.seed, step // per_epoch)
        start = step % per_epoch * config.batch
        rows = order[start : start + config.batch][share.rows(config.batch)].to(device)
        return Batch(data.inputs[rows].long(), data.targets[rows].long())


class StoredSource:
    """The training sequences of a `StoredTask`, every one once per epoch; a batch may reach into the next."""

    capturable = False

    def __init__(self, spec: RunSpec):
        assert isinstance(spec.task, StoredTask)
        assert spec.training.train_lengths is not None
        low, high = spec.training.train_lengths
        self.spec, self.sequences = spec, spec.task.sequences("train")
        self.rows = self.sequences.of_lengths(low, high)
        if not len(self.rows):
            lengths = self.sequences.lengths
            raise UserError(
                f"training: no training sequence has {low} to {high} tokens, expected lengths from "
                f"{lengths.min()} to {lengths.max()}."
            )

    def width(self, step: int) -> int:
        longest = int(self.sequences.lengths[self._rows(step)].max())
        return batch_width(lengths_at(self.spec, step), longest)

    def prepare(self, step: int) -> None:
        pass

    def batch(self, step: int, share: Share, generator: Generator) -> Batch:
        rows = self._rows(step)[share.rows(self.spec.training.batch)]
        batch = self.sequences.batch(rows, self.width(step))
        return Batch(*(x.to(generator.device) for x in batch))

    def _rows(self, step: int) -> Tensor:
        """The rows of a step's batch: places step * batch, ... in the epochs put one after the other."""
        size, samples, taken = self.spec.training.batch, len(self.rows), []
        place, end = step * size, (step + 1) * size
        while place < end:
            epoch, start = divmod(place, samples)
            taken.append(_epoch_order(samples, self.spec.seed, epoch)[start : start + end - place])
            place += len(taken[-1])
        return self.rows[torch.cat(taken)]


@lru_cache(maxsize=1)
def _fixed_set(task: Task, lengths: tuple[int, int], samples: int, device: torch.device) -> Batch:
    """`samples` sequences, drawn on the CPU: the same on every device; int16 to save memory."""
    generator = Generator().manual_seed(FIXED_SEED)
    parts = []
    for start in range(0, samples, 4096):
        parts.append(task.sample(min(4096, samples - start), lengths, generator))
    longest = max(part.inputs.shape[1] for part in parts)

    def stacked(tensors: list[Tensor], padding: int) -> Tensor:
        padded = [torch.nn.functional.pad(x, (0, longest - x.shape[1]), value=padding) for x in tensors]
        return torch.cat(padded).short().to(device)

    return Batch(stacked([p.inputs for p in parts], 0), stacked([p.targets for p in parts], IGNORE))


@lru_cache(maxsize=2)
def _epoch_order(samples: int, seed: int, epoch: int) -> Tensor:
    """The order in which one seed walks through the set in one epoch; no state, so a run resumes anywhere."""
    return torch.randperm(samples, generator=Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63))
