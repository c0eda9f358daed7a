"""Training: optimiser, evaluation, checkpoints and the loop."""

from statetrack.training.evaluation import evaluate
from statetrack.training.loop import Diverged, Interrupted, Options, build_model, read_metrics, train

__all__ = ["Diverged", "Interrupted", "Options", "build_model", "evaluate", "read_metrics", "train"]
