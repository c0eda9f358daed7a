"""The parts of `statetrack.training` that tests reach into, in one place: if one moves, it is mended here."""

from statetrack.training.data import batch_length, batch_width, training_batch
from statetrack.training.optimizer import learning_rate, make_optimizer

__all__ = ["batch_length", "batch_width", "learning_rate", "make_optimizer", "training_batch"]
