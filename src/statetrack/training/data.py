"""Where training batches come from: drawn fresh every step, or from a fixed set.

A step's shape is known before anything is drawn, so a GPU never waits for the host, and a whole step can be
one CUDA graph. Tasks that mix lengths in a batch pad it to the longest there may be: of 1,024 sequences of 3
to 40 tokens one nearly always has 40. Tasks that give a batch one length go through a few widths.
"""

import random
from functools import lru_cache

import torch
from torch import Generator, Tensor

from statetrack.spec import RunSpec
from statetrack.tasks import IGNORE, Batch, Task

FIXED_SEED = 20_241_102  # of the fixed set: the same sequences for every seed of a run
WIDTHS = 4  # a batch is padded to the next of this many widths


def batch_length(spec: RunSpec, step: int) -> int:
    """The length of a step's sequences, or the longest where they mix. No state, so runs resume anywhere."""
    low, high = spec.training.train_lengths or (1, 1)
    if spec.task.labels == "last" or low == high or spec.training.train_samples:
        return high
    return random.Random(f"{spec.seed} {step}").randint(low, high)


def batch_width(spec: RunSpec, length: int) -> int:
    """The smallest of a few evenly spaced lengths that holds `length`."""
    low, high = spec.training.train_lengths or (1, 1)
    widths = (high - (high - low) * i // WIDTHS for i in reversed(range(WIDTHS)))
    return next(width for width in widths if width >= length)


def drawn_in_graph(spec: RunSpec) -> bool:
    """Whether `training_batch` does the same operations in every step of one width."""
    return spec.task.drawn_without_looking and not spec.training.train_samples


def training_batch(spec: RunSpec, step: int, generator: Generator, length: Tensor | None = None) -> Batch:
    """The batch of step 0, 1, ...: fresh sequences, or the next of this seed's walk through the fixed set.

    `length` () holds `batch_length` on the device of the generator; it is put there when not given.
    """
    config = spec.training
    assert config.train_lengths is not None
    if config.train_samples:
        return _from_fixed_set(spec, step, generator.device)
    low, high = config.train_lengths
    if spec.task.labels == "last" or low == high:
        return spec.task.sample(config.batch, (low, high), generator)
    known = batch_length(spec, step)
    if length is None:
        length = torch.tensor(known, device=generator.device)
    return spec.task.fill(length.expand(config.batch), generator, batch_width(spec, known))


def _from_fixed_set(spec: RunSpec, step: int, device: torch.device) -> Batch:
    config = spec.training
    assert config.train_lengths is not None
    data = _fixed_set(spec.task, config.train_lengths, config.train_samples, device)
    per_epoch = config.train_samples // config.batch
    order = _order(config.train_samples, spec.seed, step // per_epoch)
    start = step % per_epoch * config.batch
    rows = order[start : start + config.batch].to(device)
    return Batch(data.inputs[rows].long(), data.targets[rows].long())


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
def _order(samples: int, seed: int, epoch: int) -> Tensor:
    """The order in which one seed walks through the set in one epoch; no state, so a run resumes anywhere."""
    return torch.randperm(samples, generator=Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63))
