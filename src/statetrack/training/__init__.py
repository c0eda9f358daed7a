"""Training: optimiser, evaluation, checkpoints and the loop."""

from statetrack.errors import Diverged, Interrupted
from statetrack.training.evaluation import evaluate
from statetrack.training.loop import Options, build_model, read_metrics, train

__all__ = ["Diverged", "Interrupted", "Options", "build_model", "evaluate", "read_metrics", "train"]
