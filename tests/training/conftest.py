"""A run that takes a second."""

from dataclasses import replace

import pytest

from statetrack.layers import model_config
from statetrack.run import run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import task
from statetrack.training import Options


@pytest.fixture
def small_spec():
    return RunSpec(
        task=task("parity-dense"),
        model=model_config("deltanet", d_model=8, heads=2, layers=2),
        training=TrainingConfig(steps=40, batch=4, train_lengths=(5, 9), log_every=5),
        evaluation=EvaluationConfig(eval_lengths=(8, 16), eval_samples=8, eval_every=20),
    ).resolved()


@pytest.fixture
def change():
    """Replace fields of a spec's training part."""
    return lambda spec, **fields: replace(spec, training=replace(spec.training, **fields)).resolved()


@pytest.fixture
def run_until():
    """Run, with a checkpoint after every step, and die without warning at the first log line from one on."""

    class Stop(Exception):
        pass

    def start(spec, folder, step):
        def die(at, row):
            if at >= step:
                raise Stop

        with pytest.raises(Stop):
            run(spec, folder, Options(checkpoint_seconds=0.0, progress=die, say=lambda text: None))

    return start
