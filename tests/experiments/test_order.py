"""Which runs come first: the paper's headline cells, one seed of everything, the other seeds, then rates."""

from itertools import groupby

import pytest

from statetrack.experiments import order as stages
from statetrack.experiments.item import Published
from statetrack.experiments.order import Order, Scored
from statetrack.experiments.registry import BY_IMPORTANCE, ITEMS
from statetrack.experiments.tab_chomsky import BRACKETS, NO_MULT, PARITY, PLAIN

CHOMSKY, S5 = ITEMS["tab-chomsky"], ITEMS["fig-s5"]


@pytest.fixture(scope="module")
def runs():
    return {of.name: of.runs("paper") for of in BY_IMPORTANCE}


def cell(run):
    return run.panel, run.label


def sort(of, pending, everything, finished=(), begun=()):
    return sorted(pending, key=Order(of, everything).key(finished, begun))


def stage_of(of, everything, finished=(), begun=()):
    key = Order(of, everything).key(finished, begun)
    return lambda run: key(run).stage


def pick(runs, panel, label, lr=None, seed=None):
    found = [
        run
        for run in runs
        if cell(run) == (panel, label)
        and (lr is None or run.spec.training.lr == lr)
        and (seed is None or run.spec.seed == seed)
    ]
    return found[0] if lr is not None and seed is not None else found


def scored(runs, panel, label, lr, scores):
    return [Scored(pick(runs, panel, label, lr, seed), score) for seed, score in enumerate(scores)]


@pytest.mark.parametrize("of", BY_IMPORTANCE, ids=lambda of: of.name)
def test_what_an_item_puts_first_is_among_its_runs(of, runs):
    cells = {cell(run) for run in runs[of.name]}
    labels = {run.label for run in runs[of.name]}
    assert set(of.headline) <= cells
    assert of.first_rate is None or of.first_rate in {run.spec.training.lr for run in runs[of.name]}
    assert {name for label, (own, _) in of.settings.items() for name in (label, own)} <= labels


def test_the_table_begins_with_both_ranges_of_deltanet_and_mamba(runs):
    everything = runs["tab-chomsky"]
    first = sort(CHOMSKY, everything, everything)
    assert (cell(first[0]), first[0].spec.training.lr, first[0].spec.seed) == (
        (PARITY, "DeltaNet [-1,1]"),
        1e-3,
        0,
    )
    headline = first[: 3 * len(CHOMSKY.headline)]
    assert [name for name, _ in groupby(headline, cell)] == list(CHOMSKY.headline)
    assert {run.spec.training.lr for run in headline} == {1e-3}


def test_then_one_seed_of_every_cell_of_the_paper_then_the_others_then_rates_then_ours(runs):
    everything = runs["tab-chomsky"]
    first = sort(CHOMSKY, everything, everything)
    rest = first[36:]
    others = [run for run in rest if not run.ours and run.spec.training.lr == 1e-3]
    assert [cell(run) for run in rest[:16]] == [cell(run) for run in others if run.spec.seed == 0]
    assert {run.spec.seed for run in rest[:16]} == {0}
    assert [panel for panel, _ in groupby(rest[:16], lambda run: run.panel)] == [
        PARITY,
        PLAIN,
        BRACKETS,
        NO_MULT,
    ]
    assert set(rest[:48]) == set(others)
    rates = rest[48 : 48 + 28 * 3 * 3]
    assert not any(run.ours for run in rates)
    assert [lr for lr, _ in groupby(rates, lambda run: run.spec.training.lr)] == [1e-2, 5e-4, 1e-4]
    ours = rest[48 + 28 * 3 * 3 :]
    assert all(run.ours for run in ours)
    assert {(run.spec.seed, run.spec.training.lr) for run in ours[:24]} == {(0, 1e-3)}
    assert {run.spec.training.lr for run in ours[:72]} == {1e-3}


def test_the_four_statements_on_s5_come_first_with_both_values_of_eps(runs):
    first = sort(S5, runs["fig-s5"], runs["fig-s5"])[:24]
    assert [name for name, _ in groupby(first, cell)] == [
        (panel, f"{label}{eps}")
        for panel, label in (
            ("S5, swaps", "DeltaNet [-1,1] (1L)"),
            ("S5, swaps", "DeltaNet [0,1] (5L)"),
            ("S5, up to 3 points", "DeltaNet [-1,1] (5L)"),
            ("S5, 4 tokens", "DeltaNet [-1,1] (5L)"),
        )
        for eps in ("", ", eps 1e-6")
    ]


@pytest.mark.parametrize(
    ("scores", "stage"),
    [
        ((1.0, 1.0, 0.99), stages.REST),  # the paper's 1.000 and median 1.000 are reached
        ((0.96, 0.97, 0.96), stages.REST),  # within the tolerance
        ((0.98, 0.28, 0.60), stages.OTHER_RATES),  # the median is not
        ((0.80, 0.80, 0.80), stages.OTHER_RATES),
        ((), stages.OTHER_RATES),  # the first rate failed, or waits before this one
    ],
)
def test_other_rates_matter_where_the_first_does_not_reach_the_number(scores, stage, runs):
    everything = runs["tab-chomsky"]
    finished = scored(everything, PARITY, "Mamba [-1,1]", 1e-3, scores)
    of_run = stage_of(CHOMSKY, everything, finished)
    for lr in (1e-2, 5e-4, 1e-4):
        assert of_run(pick(everything, PARITY, "Mamba [-1,1]", lr, 0)) == stage
    assert of_run(pick(everything, PARITY, "sLSTM", 1e-2, 0)) == stages.OTHER_RATES


def test_more_than_the_paper_has_needs_no_other_rate(runs):
    everything = runs["tab-chomsky"]
    finished = scored(everything, PARITY, "DeltaNet [0,1]", 1e-3, (0.2, 0.2, 0.2))
    assert stage_of(CHOMSKY, everything, finished)(pick(everything, PARITY, "DeltaNet [0,1]", 1e-2, 0)) == (
        stages.REST
    )


def test_a_rate_that_reaches_the_number_with_one_seed_gets_its_others(runs):
    everything = runs["tab-chomsky"]
    name = (PARITY, "Mamba [-1,1]")
    finished = scored(everything, *name, 1e-3, (0.5, 0.5, 0.5)) + scored(everything, *name, 1e-2, (1.0,))
    of_run = stage_of(CHOMSKY, everything, finished)
    assert of_run(pick(everything, *name, 1e-2, 1)) == stages.OTHER_RATES
    assert of_run(pick(everything, *name, 5e-4, 0)) == stages.REST
    finished += scored(everything, *name, 1e-2, (1.0, 0.1, 0.1))[1:]
    assert stage_of(CHOMSKY, everything, finished)(pick(everything, *name, 5e-4, 0)) == stages.OTHER_RATES


def test_where_the_paper_prints_a_median_only_the_median_decides(runs):
    everything = runs["tab-chomsky"]
    lower = scored(everything, NO_MULT, "sLSTM", 1e-3, (0.5, 0.0, 0.0))
    reached = scored(everything, NO_MULT, "sLSTM", 1e-3, (0.2, 0.12, 0.0))
    other = pick(everything, NO_MULT, "sLSTM", 1e-2, 0)
    assert stage_of(CHOMSKY, everything, lower)(other) == stages.OTHER_RATES
    assert stage_of(CHOMSKY, everything, reached)(other) == stages.REST


def test_a_run_with_a_checkpoint_comes_first_in_its_stage_and_not_before_it(runs):
    everything = runs["tab-chomsky"]
    late = pick(everything, BRACKETS, "Mamba [0,1]", 1e-3, 2)  # the last of the headline cells
    ours = pick(everything, PARITY, "DeltaProduct-2 [0,1]", 1e-3, 0)
    first = sort(CHOMSKY, everything, everything, begun={late.id, ours.id})
    assert first[0] is late
    assert [run.ours for run in first].index(True) == first.index(ours)
    assert first.index(ours) > 36 + 48


def test_nothing_is_lost_or_added(runs):
    for of in BY_IMPORTANCE:
        pending = runs[of.name][::7]
        assert sorted(run.id for run in sort(of, pending, runs[of.name])) == sorted(r.id for r in pending)


def test_more_seeds_than_the_item_has_are_other_seeds(runs):
    extra = [run for run in CHOMSKY.runs("paper", 5) if run.spec.seed == 4]
    of_run = stage_of(CHOMSKY, runs["tab-chomsky"])
    assert of_run(pick(extra, PARITY, "sLSTM", 1e-3, 4)) == stages.OTHER_SEEDS


@pytest.mark.parametrize(
    ("published", "scores", "expected"),
    [
        (Published("", best=0.5), (0.46, 0.1), "agrees"),
        (Published("", best=0.5), (0.56, 0.1), "higher"),
        (Published("", best=0.5), (0.44, 0.1), "lower"),
        (Published("", best=0.5, median=0.5), (0.9, 0.1, 0.1), "lower"),
        (Published("", best=500, tolerance=0), (500, 162), "agrees"),
        (Published("", best=500, tolerance=0), (492,), "lower"),
        (Published("", best=32, tolerance=10), (42,), "agrees"),
        (Published("", at_most=29, tolerance=0), (4, 28), "agrees"),
        (Published("", at_most=29, tolerance=0), (4, 32), "higher"),
        (Published("poor"), (4, 32), None),
        (Published("", best=0.5), (), None),
    ],
)
def test_scores_are_compared_by_best_and_by_median(published, scores, expected):
    assert published.compare(scores) == expected
