"""What changes while training, and how it begins."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Generator, Tensor

from statetrack.layers import Model
from statetrack.spec import RunSpec
from statetrack.training.initial import load_initial
from statetrack.training.initial_states import carried_states
from statetrack.training.optimizer import decayed_names, make_optimizer
from statetrack.training.selection import selected_weights


@dataclass
class TrainingState:
    """What changes while training. With sharded weights, the model and the moments are this rank's part."""

    model: Model
    optimizer: torch.optim.Optimizer
    generator: Generator  # of the training data
    loss_sum: Tensor  # over the steps since the last line of metrics
    step: int = 0
    # what options of the spec add: states carried from batch to batch, the weights selected so far
    kept: dict[str, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.loss_sum.device


def build_model(spec: RunSpec) -> Model:
    """The spec's model with its initial weights, which depend on the seed and on nothing else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return Model(spec.model, spec.task.vocab_size, spec.task.n_classes)


def new_state(
    spec: RunSpec,
    device: torch.device,
    shard: Callable[[Model], None] | None = None,
    to_fill: bool = False,
) -> TrainingState:
    """The state before the first step. `shard` leaves each rank its part of the weights, in place.

    `to_fill`: a checkpoint takes the place of the weights, so those that the run started from are not read.
    """
    model = build_model(spec)
    if spec.initial and not to_fill:
        load_initial(model, Path(spec.initial_path), spec.initial)
    model = model.to(device)
    decayed = decayed_names(model)  # before sharding, which drops the marks on parameters
    if shard is not None:
        shard(model)
    return TrainingState(
        model,
        make_optimizer(model, spec.training, decayed),
        # a stream of its own, so that data do not depend on how many numbers the initial weights took
        Generator(device).manual_seed(spec.seed * 2_654_435_761 % 2**63 + 1),
        torch.zeros((), device=device, dtype=torch.float64),
        kept=carried_states(spec, model) | selected_weights(spec, model),
    )
