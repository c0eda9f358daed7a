"""The horizon diagnosis: right where the answer is known, sensible on a trained run."""

import math

import numpy as np
import pytest
import torch

from statetrack.cli import main
from statetrack.errors import UserError
from statetrack.horizon import BORDER, Growth, diagnose, diagnose_states, fit_growth
from statetrack.layers import model_config
from statetrack.run import load_run, run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import task
from statetrack.training import Options


def synthetic(drift, longest=512, sequences=256, classes=6):
    """One-hot centres; at length t a state has moved drift(t) |N(0, 1)| of the way to its neighbour."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.eye(classes)
    labels = torch.randint(classes, (sequences, longest), generator=generator)
    way = centres[(labels + 1) % classes] - centres[labels]
    size = torch.randn(sequences, longest, generator=generator).abs() * drift(torch.arange(1, longest + 1))
    hidden = centres[labels] + size[..., None] * way
    right = torch.cdist(hidden, centres[None]).argmin(-1) == labels
    return diagnose_states(hidden, labels, right, train_length=32)


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_the_break_of_a_known_drift_is_predicted_and_measured(exponent):
    """90 % of |N(0, 1)| lies below 1.645: the quantile reaches 1/2 where drift(t) = 0.304."""
    scale = 0.304 / 300**exponent
    found = synthetic(lambda t: scale * t**exponent)
    assert found.separation == pytest.approx(2**0.5, rel=0.1)
    assert found.fitted_to <= 128
    assert found.measured == pytest.approx(300, rel=0.2)
    assert found.predicted == pytest.approx(300, rel=0.35)


def test_states_that_do_not_spread_never_break():
    found = synthetic(lambda t: torch.full(t.shape, 0.02))
    assert found.measured is None
    assert found.predicted == math.inf


def test_a_tracker_that_never_worked_is_said_to_be_one():
    assert synthetic(lambda t: torch.full(t.shape, 2.0)).growth is None


def test_the_fit_recovers_floor_and_power():
    t = np.array([16.0, 24, 32, 48, 64, 96, 128])
    growth = fit_growth(t, 0.01 + 0.0002 * t**1.2)
    assert growth.floor == pytest.approx(0.01, rel=0.1)
    assert growth.exponent == pytest.approx(1.2, abs=0.051)
    assert growth.reaches(BORDER) == pytest.approx((0.49 / 0.0002) ** (1 / 1.2), rel=0.15)
    assert Growth(0.1, 0.0, 1.0).reaches(0.5) == math.inf


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Parity with a one-layer DeltaNet: a few seconds of training."""
    folder = tmp_path_factory.mktemp("tracker")
    spec = RunSpec(
        task("parity-dense"),
        model_config("deltanet-no-conv", d_model=32, heads=1),
        TrainingConfig(steps=150, batch=64, lr=1e-2, train_lengths=(16, 16), weight_decay=0.01),
        EvaluationConfig(eval_lengths=(16, 128), eval_samples=64),
    )
    run(spec, folder, Options("cpu", say=lambda text: None))
    return folder


def test_a_trained_tracker_is_diagnosed_from_its_folder(trained, capsys):
    spec, model = load_run(trained)
    found = diagnose(model, spec, longest=256, sequences=64)
    assert found.accuracy[0] == 1.0
    assert found.measured is None or found.predicted > spec.training.train_lengths[1]
    assert found.spread[-1] > 0
    main(["diagnose", str(trained), "--longest", "128", "--sequences", "32"])
    shown = capsys.readouterr().out
    assert "predicted at length" in shown
    assert "measured at length" in shown


def test_what_cannot_be_diagnosed_is_refused(trained):
    spec, model = load_run(trained)
    with pytest.raises(UserError, match="at least 32, twice the training length"):
        diagnose(model, spec, longest=20)
    with pytest.raises(UserError, match="expected a group word problem"):
        diagnose(model, RunSpec(task=task("parity")).resolved(), longest=100)


def test_the_spectrum_of_a_trained_parity_tracker_reaches_minus_one(trained, capsys):
    """Ids of S2: 0 is the identity, 1 the swap, which must flip the state (Theorem 1)."""
    from statetrack.spectrum import learned_spectra

    spec, model = load_run(trained)
    (spectrum,) = learned_spectra(model, spec)
    assert spectrum.eigenvalues.shape == (64, 17, 1)
    assert spectrum.lowest_by_token()[1] < -0.9
    assert sum(spectrum.shares().values()) == pytest.approx(1, abs=1e-5)
    main(["plot-spectrum", str(trained)])
    assert "below -0.9" in capsys.readouterr().out
    assert (trained / "spectrum.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "changes", "shape"),
    [
        ("mamba", {"d_model": 8}, (4, 10, 16 * 16)),
        ("deltaproduct", {"d_model": 8, "heads": 2, "householders": 3}, (4, 10, 6)),
        ("gated-deltanet", {"d_model": 8, "heads": 2}, (4, 10, 2)),
        ("dense-transition", {"d_model": 8, "size": 4}, (4, 10, 4)),
        ("diagonal-toy", {}, (4, 10, 10)),
    ],
)
def test_every_linear_mixer_has_a_spectrum(name, changes, shape):
    from statetrack.spectrum import learned_spectra
    from statetrack.training import build_model

    training = TrainingConfig(train_lengths=(9, 9))
    spec = RunSpec(task("parity-dense"), model_config(name, **changes), training).resolved()
    (spectrum,) = learned_spectra(build_model(spec), spec, samples=4)
    assert tuple(spectrum.eigenvalues.shape) == shape


def test_attention_has_no_spectrum():
    from statetrack.spectrum import learned_spectra
    from statetrack.training import build_model

    spec = RunSpec(task("parity-dense"), model_config("transformer", d_model=8, heads=2)).resolved()
    with pytest.raises(UserError, match="no state transition"):
        learned_spectra(build_model(spec), spec, samples=2)
