"""A task and a mixer that are no part of the package, in a file of their own."""

import pytest

OUTSIDE = '''
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from statetrack import register_mixer, register_task
from statetrack.layers import Mixer
from statetrack.tasks import Batch, Task
from statetrack.tasks.task import labelled_up_to


@dataclass(frozen=True)
class CountTask(Task):
    """The number of ones so far, modulo `divisor`. Token 2 begins every sequence."""

    divisor: int = 3

    labels = "dense"
    train_lengths = (6, 6)
    eval_lengths = (6, 12)

    @property
    def vocab_size(self) -> int:
        return 3

    @property
    def n_classes(self) -> int:
        return self.divisor

    @property
    def chance(self) -> float:
        return 1 / self.divisor

    def fill(self, lengths: Tensor, generator: Generator, width: int | None = None) -> Batch:
        T = int(lengths[0]) if width is None else width
        bits = torch.randint(2, (lengths.numel(), T), generator=generator, device=generator.device)
        begin = torch.zeros_like(bits[:, :1])
        counts = torch.cat([begin, bits], 1).cumsum(1) % self.divisor
        return labelled_up_to(lengths, Batch(torch.cat([begin + 2, bits], 1), counts))


@dataclass(frozen=True)
class LeakyConfig:
    """h_t = decay h_{t-1} + W x_t."""

    decay: float = 0.5

    def build(self, d_model: int, layers: int) -> "Leaky":
        return Leaky(self, d_model)


class Leaky(Mixer):
    def __init__(self, config: LeakyConfig, d_model: int):
        super().__init__()
        self.decay = config.decay
        self.to_h = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        inputs = self.to_h(x)
        h = torch.zeros_like(inputs[:, 0]) if state is None else state
        states = []
        for u in inputs.unbind(1):
            h = self.decay * h + u
            states.append(h)
        return torch.stack(states, 1), h

    def transition_eigenvalues(self, x: Tensor) -> Tensor:
        return torch.full_like(x, self.decay)


register_task("count", CountTask())
register_mixer("leaky", LeakyConfig())
'''


@pytest.fixture
def plugin(tmp_path):
    """The path of the file."""
    path = tmp_path / "outside.py"
    path.write_text(OUTSIDE)
    return path
