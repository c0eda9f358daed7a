"""A corpus on a GPU: the CUDA graph is the eager step, with and without resets at documents."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from statetrack.layers import model_config
from statetrack.lm.shards import write_shards
from statetrack.run import run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import Corpus
from statetrack.training import Options
from statetrack.training.corpus_source import CorpusSource
from statetrack.training.graph_step import GraphStep
from statetrack.training.protocols import WHOLE
from statetrack.training.state import new_state

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of 20 to 900 tokens that count up modulo 63."""
    folder, generator = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    splits = {}
    for split, count in (("train", 400), ("heldout", 40)):
        starts, lengths = generator.integers(63, size=count), generator.integers(20, 900, size=count)
        splits[split] = [((s + np.arange(n)) % 63).tolist() for s, n in zip(starts, lengths, strict=True)]
    write_shards(folder, splits, 64, 63, documents_per_shard=100)
    return Corpus(str(folder), context=256)


def spec_of(corpus, mixer, **training):
    training = {"steps": 60, "batch": 8, "log_every": 20, "precision": "bfloat16"} | training
    evaluation = EvaluationConfig(eval_lengths=(64, 256, 1024), eval_samples=16)
    return RunSpec(corpus, model_config(mixer, layers=2), TrainingConfig(**training), evaluation).resolved()


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("mixer", ["deltanet", "mamba"])
def test_a_graph_takes_the_eager_steps(corpus, mixer, reset):
    spec = spec_of(replace(corpus, reset=reset), mixer, precision="float32")
    losses = []
    for graphs in (True, False):
        device = torch.device("cuda")
        step = GraphStep(spec, new_state(spec, device), CorpusSource(spec), pytest.fail, graphs)
        with step.on_stream():
            for _ in range(spec.training.steps):
                step()
        torch.cuda.synchronize()
        assert bool(step.graphs) is graphs
        losses.append(step.state.loss_sum.item() / spec.training.steps)
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert losses[0] < 0.9 * np.log(64)


def test_batches_read_ahead_are_those_of_their_step(corpus):
    source = CorpusSource(spec_of(corpus, "deltanet"))
    generator, host = torch.Generator("cuda"), torch.Generator()
    for step in (0, 1, 2, 7, 3, 4):  # in order, and after jumps
        there, here = source.batch(step, WHOLE, generator), source.batch(step, WHOLE, host)
        assert torch.equal(there.inputs.cpu(), here.inputs)
        assert torch.equal(there.targets.cpu(), here.targets)


@pytest.mark.parametrize("reset", [False, True])
def test_a_run_in_bfloat16_learns_and_evaluates_past_its_context(corpus, tmp_path, reset):
    said = []
    done = run(
        spec_of(replace(corpus, reset=reset), "deltanet", steps=300), tmp_path, Options(say=said.append)
    )
    assert said == []
    assert done["metrics"]["heldout_loss"] < 1.5
    assert set(done["metrics"]["perplexity"]) == {"64", "256", "1024"}
