"""Several processes seen from one: who is first, and when gradients are exchanged."""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from process_specs import SPEC

from statetrack.training.protocols import Share
from statetrack.training.ranks import Ranks, is_first_process, under_torchrun
from statetrack.training.sharded_step import ShardedStep
from statetrack.training.source import source_of
from statetrack.training.state import new_state

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("environment", "several", "first"),
    [
        ({}, False, True),
        ({"RANK": "1"}, False, True),
        ({"LOCAL_RANK": "0", "RANK": "3"}, False, True),
        ({"WORLD_SIZE": "4", "RANK": "3"}, False, True),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2", "RANK": "0"}, True, True),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2", "RANK": "1"}, True, False),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "4", "RANK": "3"}, True, False),
    ],
)
def test_the_first_process_is_rank_0_of_torchruns_or_the_only_one(environment, several, first, monkeypatch):
    for name in ("LOCAL_RANK", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (under_torchrun(), is_first_process()) == (several, first)


def test_a_process_alone_is_the_first_and_keeps_what_it_has():
    ranks, x, tensors = Ranks(), torch.tensor([1.0, 2.0]), {"x": torch.zeros(2)}
    assert (ranks.rank, ranks.size, ranks.is_first, ranks.distributed) == (0, 1, True, False)
    assert ranks.on_first(lambda: 7) == 7
    assert ranks.agree(True, False) == (True, False)
    assert ranks.sum(x) is x
    assert ranks.send_from_first(tensors) is tensors
    assert ranks.device(CPU) == CPU


class Wrapped(torch.nn.Module):
    """The model as DDP and FSDP wrap it, which writes down what it is asked for and when it runs."""

    def __init__(self, model):
        super().__init__()
        self.model, self.said = model, []

    def forward(self, *inputs, **options):
        self.said.append("forward")
        return self.model(*inputs, **options)

    @contextlib.contextmanager
    def no_sync(self):
        self.said.append("no exchange")
        yield

    def set_requires_gradient_sync(self, last):
        self.said.append(f"exchange {last}")


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (None, ["forward"] * 3),
        ("ddp", ["no exchange", "forward", "no exchange", "forward", "forward"]),
        ("fsdp", ["exchange False", "forward"] * 2 + ["exchange True", "forward"]),
        ("zero2", ["exchange False", "forward"] * 2 + ["exchange True", "forward"]),
    ],
)
def test_gradients_are_exchanged_behind_the_last_micro_batch_only(parallel, said):
    spec = replace(SPEC, training=replace(SPEC.training, batch=6)).resolved()
    step = ShardedStep(spec, new_state(spec, CPU), source_of(spec, CPU), Ranks(), None, 3)
    assert step.shares == [Share(0, 1, i, 3) for i in range(3)]
    step.parallel, step.model = parallel, Wrapped(step.state.model)
    step()
    assert step.model.said == said
    assert step.state.step == 1


@pytest.mark.parametrize(
    ("ends", "code", "words"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(2)", 2, ""),
        ("raise RuntimeError('broken')", 1, "RuntimeError: broken"),
    ],
)
def test_a_process_of_torchrun_leaves_with_its_exit_code_and_its_output(ends, code, words):
    script = f"from statetrack.training import ranks\nwith ranks.leaving_at_once():\n print('said'); {ends}"
    places = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | places, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (code, "said\n")
    assert words in ended.stderr
