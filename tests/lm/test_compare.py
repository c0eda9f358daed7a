"""Paired differences: small cases by hand, and intervals that cover the truth as often as they say."""

import numpy as np
import pytest

from statetrack.errors import UserError
from statetrack.lm.compare import as_table, bootstrap, compare
from statetrack.lm.layout import bin_edges, layout_of
from statetrack.lm.measured import Measured, Perplexities

LAYOUT = layout_of(np.array([0, 4, 9]), bin_edges(4, 2))  # two sequences of 4; documents of 4 and 5 tokens


def perplexities(**losses):
    """Models named LABEL_SEED, with their losses per token, (2, 4)."""
    models = []
    for name, values in losses.items():
        sums, label, seed = np.zeros(len(LAYOUT.tokens)), *name.split("_")
        for i in range(2):
            LAYOUT.add(sums, i, 0, np.array(values[i], dtype=float))
        models.append(Measured(name, label, {"heldout": sums}, int(seed), context=2))
    return Perplexities("", "concatenated", {"heldout": LAYOUT}, tuple(models))


def test_differences_by_hand():
    """Tokens 1 to 3 belong to document 0, tokens 4 to 8 to document 1: +3 and -5 nats."""
    found = perplexities(
        a_0=[[0, 0, 0, 0], [0, 0, 0, 0]],
        b_0=[[1, 1, 1, -1], [-1, -1, -1, -1]],
    )
    whole, within, past = compare(found, "a", "b", resamples=200)
    assert (whole.mean, whole.units, whole.tokens) == (pytest.approx((3 - 5) / 8), 2, 8)
    assert (within.low, within.high, within.mean) == (0, 2, pytest.approx((2 - 2) / 4))
    assert (past.low, past.high, past.mean) == (2, 4, pytest.approx((1 - 3) / 4))
    # both documents are drawn twice once in four times each: the ends of the interval
    assert (whole.lower, whole.upper) == (pytest.approx(-1), pytest.approx(1))
    (equal,) = compare(found, "a", "b", windows=[(0, 4)], weight="units", resamples=200)
    assert equal.mean == pytest.approx((1 - 1) / 2)
    (rows,) = compare(found, "a", "b", windows=[(0, 4)], unit="sequence", resamples=200)
    assert (rows.lower, rows.upper) == (pytest.approx(-1), pytest.approx(0.5))


def test_seeds_are_paired_by_number():
    ones = np.ones((2, 4))
    found = perplexities(a_0=0 * ones, a_1=10 * ones, b_1=11 * ones, b_0=3 * ones, b_7=100 * ones)
    whole = compare(found, "a", "b", resamples=200)[0]
    assert whole.by_seed == (pytest.approx(3), pytest.approx(1))
    assert whole.mean == pytest.approx(2)
    assert (whole.lower, whole.upper) == (pytest.approx(1), pytest.approx(3)), "one seed drawn twice"
    assert whole.spread == (pytest.approx(10 / 2**0.5), pytest.approx(8 / 2**0.5))
    assert "+3.0000 +1.0000" in as_table([whole])


def test_models_without_a_common_seed_are_refused():
    found = perplexities(a_0=np.ones((2, 4)), b_1=np.ones((2, 4)))
    with pytest.raises(UserError, match=r"seeds \[0\] and b \[1\]"):
        compare(found, "a", "b")
    with pytest.raises(UserError, match="'c' is not known"):
        compare(found, "a", "c")


def test_the_interval_of_equal_differences_is_a_point():
    tokens = np.array([[1], [5], [10]])
    mean, lower, upper = bootstrap(0.25 * tokens[None], tokens, resamples=100)
    assert mean == lower == upper == pytest.approx(0.25)


def test_equal_seeds_of_the_generator_give_equal_intervals():
    generator = np.random.default_rng(0)
    sums, tokens = generator.normal(size=(2, 30, 1)), np.ones((30, 1))
    again = [bootstrap(sums, tokens, resamples=300, seed=s) for s in (1, 1, 2)]
    assert np.array_equal(again[0], again[1])
    assert not np.array_equal(again[0], again[2])


def test_resamples_in_pieces_have_the_same_distribution(monkeypatch):
    sums, tokens = np.random.default_rng(0).normal(size=(1, 40, 1)), np.ones((40, 1))
    _, *whole = bootstrap(sums, tokens, resamples=4000)
    monkeypatch.setattr("statetrack.lm.compare.DRAWN", 40 * 7)
    _, *pieces = bootstrap(sums, tokens, resamples=4000)
    np.testing.assert_allclose(whole, pieces, atol=0.03)


@pytest.mark.parametrize(("seeds", "between"), [(1, 0.0), (12, 0.5)])
def test_the_interval_covers_the_truth_in_95_of_100_cases(seeds, between):
    """Documents of random sizes and differences, seeds with an effect of their own; the truth is 0.3."""
    generator, covered, trials = np.random.default_rng(5), 0, 300
    for trial in range(trials):
        tokens = generator.integers(20, 200, size=(60, 1))
        of_document = generator.normal(size=(1, 60, 1))
        of_seed = between * generator.normal(size=(seeds, 1, 1))
        noise = 0.3 * generator.normal(size=(seeds, 60, 1))
        sums = tokens * (0.3 + of_document + of_seed + noise)
        _, lower, upper = bootstrap(sums, tokens, resamples=400, seed=trial)
        covered += bool(lower[0] <= 0.3 <= upper[0])
    # three standard errors of a rate measured 300 times, and the little that percentile intervals fall short
    assert 0.90 <= covered / trials <= 0.985
