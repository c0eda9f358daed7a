"""Training: one loop over exchangeable parts (`protocols.py`)."""

from statetrack.errors import Diverged, Interrupted
from statetrack.training.evaluation import evaluate
from statetrack.training.loop import Options, train
from statetrack.training.metrics_file import read_metrics
from statetrack.training.state import build_model

__all__ = ["Diverged", "Interrupted", "Options", "build_model", "evaluate", "read_metrics", "train"]
