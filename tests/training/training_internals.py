"""The parts of `statetrack.training` that tests reach into, in one place: if one moves, it is mended here."""

import importlib.util

import torch

from statetrack.training import optimizer
from statetrack.training.optimizer import learning_rate

if importlib.util.find_spec("statetrack.training.source"):
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

else:
    from statetrack.training.data import batch_length, batch_width, training_batch
    from statetrack.training.optimizer import make_optimizer

    def step_width(spec, step):
        """The width of a step's batch."""
        return batch_width(spec, batch_length(spec, step))


__all__ = ["batch_length", "batch_width", "learning_rate", "make_optimizer", "step_width", "training_batch"]
