"""The parts of `statetrack.training` that tests reach into, in one place: if one moves, it is mended here."""

import torch

from statetrack.training import optimizer
from statetrack.training.optimizer import learning_rate
from statetrack.training.protocols import WHOLE
from statetrack.training.source import batch_length, batch_width, source_of


def training_batch(spec, step, generator):
    """The whole batch of a step."""
    source = source_of(spec, generator.device)
    source.prepare(step)
    return source.batch(step, WHOLE, generator)


def step_width(spec, step):
    """The width of a step's batch."""
    return source_of(spec, torch.device("cpu")).width(step)


def make_optimizer(model, config):
    return optimizer.make_optimizer(model, config, optimizer.decayed_names(model))


__all__ = ["batch_length", "batch_width", "learning_rate", "make_optimizer", "step_width", "training_batch"]
