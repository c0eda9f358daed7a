"""Where training batches come from: drawn fresh every step, or from a fixed set."""

from functools import lru_cache

import torch
from torch import Generator, Tensor

from statetrack.spec import RunSpec
from statetrack.tasks import IGNORE, Batch, Task

FIXED_SEED = 20_241_102  # of the fixed set: the same sequences for every seed of a run


def training_batch(spec: RunSpec, step: int, generator: Generator) -> Batch:
    """The batch of step 0, 1, ...: fresh sequences, or the next of this seed's walk through the fixed set."""
    config = spec.training
    assert config.train_lengths is not None
    if not config.train_samples:
        return spec.task.sample(config.batch, config.train_lengths, generator)
    data = _fixed_set(spec.task, config.train_lengths, config.train_samples, generator.device)
    per_epoch = config.train_samples // config.batch
    order = _order(config.train_samples, spec.seed, step // per_epoch)
    start = step % per_epoch * config.batch
    rows = order[start : start + config.batch].to(generator.device)
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
