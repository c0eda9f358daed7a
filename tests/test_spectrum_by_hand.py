"""The spectrum and the horizon counted by hand: shares, lowest eigenvalues, closeness, growth."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from statetrack.horizon import Growth, diagnose_states, fit_growth, hidden_states
from statetrack.layers import build, model_config
from statetrack.spec import RunSpec, TrainingConfig
from statetrack.spectrum import Spectrum, learned_spectra
from statetrack.tasks import task


def spectrum(values, tokens):
    return Spectrum(0, torch.tensor(values), torch.tensor(tokens))


def test_shares_are_counted_by_the_real_part_and_an_edge_belongs_to_the_range_above_it():
    values = [[[-1.0, -0.91, -0.9], [-0.5, -0.1, 0.0], [0.1, 0.5, 0.9], [1.0, 0.95, 0.05]]]
    assert spectrum(values, [[0, 0, 0, 0]]).shares() == {
        "below -0.9": pytest.approx(2 / 12),
        "-0.9 to -0.1": pytest.approx(2 / 12),
        "-0.1 to 0.1": pytest.approx(3 / 12),
        "0.1 to 0.9": pytest.approx(2 / 12),
        "above 0.9": pytest.approx(3 / 12),
    }


def test_rotations_are_those_with_a_noticeable_imaginary_part():
    values = [[[1 + 0j, 0.5 + 0.05j, -0.5 + 0.2j, -0.5 - 0.2j]]]
    found = spectrum(values, [[3]])
    assert found.share_complex() == pytest.approx(2 / 4)
    assert found.shares()["-0.9 to -0.1"] == pytest.approx(2 / 4)
    assert spectrum([[[1.0]]], [[3]]).share_complex() == 0.0


def test_the_lowest_eigenvalue_of_a_token_is_the_mean_over_its_positions():
    """Token 5 twice, lowest -1 and 0: -0.5; token 2 once, lowest 0.3."""
    found = spectrum([[[1.0, -1.0], [0.4, 0.3], [0.0, 0.5]]], [[5, 2, 5]])
    assert found.lowest_by_token() == {2: pytest.approx(0.3), 5: pytest.approx(-0.5)}


def given(values):
    """A model whose transitions have these eigenvalues at every position."""

    def transition_eigenvalues(inputs):
        return [torch.tensor(values).expand(*inputs.shape, *torch.tensor(values).shape)]

    model = SimpleNamespace(transition_eigenvalues=transition_eigenvalues)
    model.eval = lambda: model
    return model


def spec_of(name, **changes):
    training = TrainingConfig(train_lengths=(4, 9))
    return RunSpec(task("s5"), model_config(name, **changes), training)


@pytest.mark.parametrize(
    ("name", "changes", "values", "kept"),
    [
        ("deltanet", {}, [[-0.5, 1.0, 1.0]], [-0.5]),  # 1 - beta comes first
        ("deltaproduct", {"householders": 2}, [[0.9, -1.0, 1.0, 0.2]], [-1.0, 0.2]),
        ("deltaproduct", {"householders": 3}, [[0.9, -1.0]], [-1.0, 0.9]),  # no more than there are
        ("mamba", {}, [0.1, 0.2, 0.3], [0.1, 0.2, 0.3]),  # all of them
    ],
)
def test_only_eigenvalues_that_can_differ_from_one_are_kept(name, changes, values, kept):
    (found,) = learned_spectra(given(values), spec_of(name, **changes), samples=3, seed=1)
    assert found.eigenvalues.shape == (3, 10, len(kept)), "three sequences of the longest training length"
    assert found.eigenvalues[0, 0].tolist() == pytest.approx(kept)
    drawn = task("s5").sample(3, (9, 9), torch.Generator().manual_seed(1))
    assert torch.equal(found.tokens, drawn.inputs)
    assert found.layer == 0


def test_growth_reaches_a_value_where_its_formula_says():
    growth = Growth(floor=0.1, scale=0.02, exponent=0.5)
    assert growth.reaches(0.5) == pytest.approx((0.4 / 0.02) ** 2)
    assert Growth(0.5, 0.02, 1.0).reaches(0.5) == 1.0, "it is there from the start"
    assert Growth(0.1, 0.0, 1.0).reaches(0.5) == math.inf


def test_the_fit_of_a_constant_has_no_growth():
    t = np.array([8.0, 16, 32, 64])
    found = fit_growth(t, np.array([0.2, 0.21, 0.19, 0.2]))
    assert found.scale == 0.0
    assert found.floor == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_the_fit_of_a_power_without_a_floor(exponent):
    t = np.array([8.0, 16, 32, 64, 128])
    found = fit_growth(t, 0.001 * t**exponent)
    assert found.exponent == pytest.approx(exponent)
    assert found.scale == pytest.approx(0.001, rel=1e-6)
    assert found.floor == pytest.approx(0.0, abs=1e-9)


def on_a_line(closeness, length=8, sequences=20):
    """Two elements at 0 and 1 on a line. Of every ten states one is `closeness` of the way to the other; the
    first `length` positions, where the centres are learned, are exact."""
    labels = torch.arange(sequences).repeat_interleave(3 * length).view(sequences, -1) % 2
    hidden = labels.double()
    moved = torch.zeros_like(hidden)
    moved[::10, length:] = closeness
    moved[1::10, length:] = closeness
    hidden = hidden + moved * torch.where(labels == 0, 1.0, -1.0)
    right = (hidden.round() == labels) & (moved < 0.5)
    return diagnose_states(hidden[..., None].float(), labels, right, length)


def test_closeness_is_the_way_to_the_nearest_wrong_centre():
    """Two in ten states are 0.3 of the way to the other centre, so the 90 % quantile is 0.3."""
    found = on_a_line(0.3)
    beyond = [q for t, q in zip(found.positions, found.closeness, strict=True) if t >= 12]
    assert beyond == pytest.approx([0.3] * len(beyond), abs=1e-6)
    assert found.separation == pytest.approx(1.0)
    assert found.spread[-1] == pytest.approx((0.2 * 0.09) ** 0.5, abs=1e-6)
    assert found.spread[0] == pytest.approx(0.0, abs=1e-6)
    assert set(found.accuracy) == {1.0}
    assert set(found.majority) == {0.5}, "half of the sequences are at either element"
    assert found.measured is None


def test_a_tracker_breaks_at_the_first_position_below_nine_in_ten():
    """From position 9 on two in ten are wrong; a window of four positions ends at the one it is named for."""
    found = on_a_line(0.8)
    by_position = dict(zip(found.positions, found.accuracy, strict=True))
    assert by_position[8] == 1.0
    assert by_position[10] == pytest.approx(0.9)  # two of its four positions have two in ten wrong
    assert by_position[12] == pytest.approx(0.8)
    assert found.measured == min(t for t, a in by_position.items() if a < 0.9)


def test_positions_go_from_half_the_training_length_to_the_end():
    found = on_a_line(0.0)
    assert (found.positions[0], found.positions[-1]) == (4, 24)
    assert found.positions == sorted(set(found.positions))
    assert found.train_length == 8
    for a, b in zip(found.positions, found.positions[1:], strict=False):
        assert b <= max(a + 1, a * 2 ** (1 / 8) + 1), "about eight per doubling"


def test_hidden_states_are_what_the_head_reads():
    torch.manual_seed(0)
    model = build("deltanet", vocab_size=7, d_model=8, heads=2)
    inputs = torch.randint(7, (2, 11), generator=torch.Generator().manual_seed(0))
    hidden, right = hidden_states(model, inputs, inputs, piece=4)
    with torch.no_grad():
        logits, _ = model(inputs)
    torch.testing.assert_close(model.head(hidden), logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(right, logits.argmax(-1) == inputs)
