"""The weights with the largest predicted horizon so far: in training, long lengths are learned and lost.

Every `select_every` steps the horizon is predicted (`statetrack.horizon`) from sequences of the training
length: no test sequence and no longer one is looked at. After the last step the weights that were best by it
take the place of the last ones, before the last evaluation.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from statetrack.horizon import horizon_in_training
from statetrack.layers import Model
from statetrack.spec import RunSpec
from statetrack.training.precision import autocast

if TYPE_CHECKING:
    from statetrack.training.state import TrainingState

SEQUENCES = 1024
SEED = 20_241_103  # of the sequences; neither that of training data nor that of the evaluation
SELECTED = "selected."  # in the names of `TrainingState.kept`
SCORE, STEP, WEIGHTS = f"{SELECTED}score", f"{SELECTED}step", f"{SELECTED}model."


def selected_weights(spec: RunSpec, model: Model) -> dict[str, Tensor]:
    """Places for the selected weights, by name; none for a run that selects no weights."""
    if spec.training.select != "horizon":
        return {}
    weights = {f"{WEIGHTS}{name}": x.detach().clone() for name, x in model.state_dict().items()}
    score = torch.full((2,), -torch.inf, dtype=torch.float64)
    return weights | {SCORE: score, STEP: torch.zeros((), dtype=torch.long)}


class Selection:
    """Called behind every step; returns what a row of metrics is to say of it."""

    def __init__(self, spec: RunSpec):
        self.spec = spec

    def __call__(self, state: "TrainingState") -> dict[str, Any]:
        training = self.spec.training
        last = state.step == training.steps
        if not last and state.step % training.select_every:
            return {}
        score = self._score(state)
        if tuple(score.tolist()) > tuple(state.kept[SCORE].tolist()):
            state.kept[SCORE].copy_(score)
            state.kept[STEP].fill_(state.step)
            for name, x in state.model.state_dict().items():
                state.kept[f"{WEIGHTS}{name}"].copy_(x)
        if not last:
            return {"horizon": score[0].item()}
        weights = {
            name.removeprefix(WEIGHTS): x for name, x in state.kept.items() if name.startswith(WEIGHTS)
        }
        state.model.load_state_dict(weights)
        return {"horizon": state.kept[SCORE][0].item(), "selected_step": int(state.kept[STEP])}

    def _score(self, state: "TrainingState") -> Tensor:
        """(2,): the horizon, and minus the closeness for horizons that are equal. The larger is better."""
        was_training = state.model.training
        state.model.eval()
        try:
            with autocast(self.spec, state.device):
                horizon, closeness = horizon_in_training(state.model, self.spec, SEQUENCES, SEED)
        finally:
            state.model.train(was_training)
        return torch.tensor([horizon, -closeness], dtype=torch.float64).nan_to_num(nan=-torch.inf)
