"""A run that takes a second."""

from dataclasses import replace

import pytest

from statetrack.layers import model_config
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import task


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
