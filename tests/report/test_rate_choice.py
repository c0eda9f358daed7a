"""From runs to a row of the table, counted by hand: learning rate, median, deviation, verdict."""

import json

import pytest
from hand_results import read, scaled, solved

from statetrack.errors import UserError
from statetrack.experiments.item import Claim
from statetrack.experiments.registry import ITEMS
from statetrack.report.results import read_index
from statetrack.report.summary import MARGIN, Verdict, judge, summarise

MODEL = "Diagonal LRNN [-1,1]"


def row_of(tmp_path, table, label=MODEL):
    """The row of one model of fig-parity; table[rate] are the scores of its seeds, None where unfinished."""

    def metrics(run):
        score = table.get(run.spec.training.lr, (None,) * 3)[run.spec.seed]
        return None if score is None else scaled(score, majority=0.1 * (1 + run.spec.seed))

    results = read(tmp_path, "fig-parity", "paper", metrics, lambda run: run.label == label)
    (row,) = summarise(results)
    return row


def test_a_rate_with_seeds_missing_does_not_win_by_its_lucky_one(tmp_path):
    row = row_of(tmp_path, {1e-2: (0.99, None, None), 1e-3: (0.5, 0.6, 0.7)})
    assert row.lr == 1e-3
    assert row.scores == [0.5, 0.6, 0.7]
    assert row.planned == 12


def test_rates_with_as_many_seeds_as_any_compete_by_their_median(tmp_path):
    """Two seeds each but for 5e-4: the medians are 0.5, 0.55 and, of a single one, 0.9."""
    table = {1e-2: (0.1, None, 0.9), 1e-3: (None, 0.5, 0.6), 5e-4: (None, None, 0.9)}
    row = row_of(tmp_path, table)
    assert (row.lr, row.scores) == (1e-3, [0.5, 0.6])
    assert row.median == pytest.approx(0.55)


def test_the_median_decides_and_not_the_mean_or_the_best(tmp_path):
    """1e-2 has the best seed, 5e-4 the best mean, 1e-3 the best median."""
    table = {1e-2: (0.0, 0.1, 1.0), 1e-3: (0.0, 0.5, 0.5), 5e-4: (0.4, 0.4, 0.9)}
    assert row_of(tmp_path, table).lr == 1e-3


@pytest.mark.parametrize("tied", [(1e-2, 1e-3), (1e-3, 1e-4)])
def test_on_a_tie_the_first_rate_of_the_grid_wins(tied, tmp_path):
    assert row_of(tmp_path, dict.fromkeys(tied, (0.5, 0.5, 0.5))).lr == tied[0]


def test_best_median_and_deviation_of_three_seeds(tmp_path):
    """Scores 0.1, 0.4 and 1: the median is 0.4, its distances 0.3, 0 and 0.6, their median 0.3."""
    row = row_of(tmp_path, {1e-3: (0.4, 1.0, 0.1)})
    assert (row.best, row.median) == (1.0, 0.4)
    assert row.deviation == pytest.approx(0.3)
    assert row.majority == pytest.approx(0.2), "the median of 0.1, 0.2 and 0.3"
    assert row.run.label == MODEL


def test_a_model_without_a_finished_run_has_no_numbers(tmp_path):
    row = row_of(tmp_path, {})
    assert row.chosen == []
    assert row.planned == 12
    numbers = (row.best, row.median, row.deviation, row.lr, row.majority, row.difference)
    assert numbers == (None,) * 6


def test_the_majority_is_only_that_of_tasks_that_have_one(tmp_path):
    results = read(
        tmp_path,
        "fig-s5",
        "quick",
        lambda run: solved(t8=1.0),
        lambda run: run.panel == "S5" and run.label == "DeltaNet [0,1] (1L)",
    )
    (row,) = summarise(results)
    assert row.majority is None


@pytest.mark.parametrize(
    ("panel", "label", "expected"),
    [
        ("Parity", "DeltaNet [0,1]", 0.6 - 0.017),  # best with best
        ("Brackets, no multiplication", "sLSTM", 0.5 - 0.153),  # the paper prints a median only
    ],
)
def test_the_difference_is_of_best_and_best_or_of_medians(panel, label, expected, tmp_path):
    def metrics(run):
        return scaled((0.5, 0.2, 0.6)[run.spec.seed]) if run.spec.training.lr == 1e-3 else None

    chosen = read(
        tmp_path, "tab-chomsky", "paper", metrics, lambda run: (run.panel, run.label) == (panel, label)
    )
    (row,) = summarise(chosen)
    assert row.difference == pytest.approx(expected)


def test_where_the_paper_gives_words_there_is_no_difference(tmp_path):
    wanted = ("S5, up to 3 points", "DeltaNet [-1,1] (5L)")
    results = read(
        tmp_path, "fig-s5", "quick", lambda run: solved(t8=1.0), lambda r: (r.panel, r.label) == wanted
    )
    (row,) = summarise(results)
    assert row.published.text == "generalises well"
    assert row.difference is None


def test_a_model_of_ours_has_nothing_published(tmp_path):
    results = read(
        tmp_path,
        "tab-chomsky",
        "quick",
        lambda run: scaled(0.5),
        lambda run: run.ours and run.panel == "Parity",
    )
    assert [row.published for row in summarise(results)] == [None, None]
    assert [row.difference for row in summarise(results)] == [None, None]


def test_rows_keep_the_order_of_the_item(tmp_path):
    results = read(tmp_path, "tab-chomsky", "quick", lambda run: None, lambda run: not run.ours)
    labels = [row.run.label for row in summarise(results) if row.run.panel == "Parity"]
    assert labels == [
        "Transformer",
        "mLSTM",
        "sLSTM",
        *("Mamba [0,1]", "Mamba [-1,1]"),
        *("DeltaNet [0,1]", "DeltaNet [-1,1]"),
    ]


def result_of(tmp_path, name, metrics):
    """The first run of an item, with these metrics."""
    first = ITEMS[name].runs("quick")[0].id
    return read(tmp_path, name, "quick", lambda run: metrics, lambda run: run.id == first).results[0]


def test_the_reach_is_the_longest_length_with_at_least_nine_in_ten(tmp_path):
    result = result_of(tmp_path, "fig-s5", solved(t8=1.0, t16=0.95, t32=0.9, t64=0.8999, t128=0.0))
    assert result.score() == 32
    assert isinstance(result.score(), int)
    assert result.curve() == ([8.0, 16.0, 32.0, 64.0, 128.0], [1.0, 0.95, 0.9, 0.8999, 0.0])
    assert result.height() == pytest.approx((1.0 + 0.95 + 0.9 + 0.8999) / 5)


def test_nothing_solved_reaches_nowhere(tmp_path):
    assert result_of(tmp_path, "fig-s5", solved(t8=0.89, t16=0.0)).score() == 0


def test_curves_of_bins_are_scaled_and_drawn_at_their_middle(tmp_path):
    """Parity, chance 1/2: 0.75 is half-way, 0.5 nothing, 0.4 below. The score is that over all samples."""
    metrics = {
        "accuracy": {"40-63": 0.75, "64-87": 0.5, "88-256": 0.4},
        "scaled_accuracy": 0.321,
        "majority_scaled_accuracy": 0.0,
    }
    result = result_of(tmp_path, "fig-parity", metrics)
    middles, values = result.curve()
    assert middles == [51.5, 75.5, 172.0]
    assert values == pytest.approx([0.5, 0.0, -0.2])
    assert result.height() == pytest.approx(0.1)
    assert result.score() == 0.321


def test_the_rows_of_a_result_are_those_of_its_metrics_file(tmp_path):
    (row,) = result_of(tmp_path, "fig-s5", solved(t8=1.0)).rows()
    assert row == {"step": 3, "loss": 1.0, "lr": 1e-3} | solved(t8=1.0)


@pytest.mark.parametrize(
    ("better", "worse", "holds", "words"),
    [
        (0.50, 0.44, True, "shown (mean over lengths 0.500 against 0.440)"),
        (0.50, 0.46, False, "NOT shown (mean over lengths 0.500 against 0.460)"),
        (0.05, 0.0, False, "NOT shown (mean over lengths 0.050 against 0.000)"),
        (0.2, 0.9, False, "NOT shown (mean over lengths 0.200 against 0.900)"),
        (None, 0.1, None, "not measured"),
        (0.9, None, None, "not measured"),
    ],
)
def test_an_ordering_needs_a_lead_of_more_than_the_margin(better, worse, holds, words):
    verdict = Verdict(Claim("Parity", "A", "B"), better, worse)
    assert MARGIN == 0.05
    assert verdict.holds is holds
    assert str(verdict) == f"Parity: A above B: {words}"


def verdicts(tmp_path, scale="paper"):
    """fig-parity, whose one claim is [-1,1] above [0,1]: one seed of [-1,1] leads, the other two do not."""

    def metrics(run):
        if run.spec.training.lr not in (1e-2,):
            return None
        return scaled((0.3, 0.3, 0.4)[run.spec.seed] if run.label == MODEL else 0.3)

    results = read(tmp_path, "fig-parity", scale, metrics)
    return judge(results, summarise(results))


def test_orderings_compare_the_best_seeds(tmp_path):
    (verdict,) = verdicts(tmp_path)
    assert (verdict.better, verdict.worse) == (pytest.approx(0.4), pytest.approx(0.3))
    assert verdict.holds is True


def test_smoke_runs_are_not_judged(tmp_path):
    assert verdicts(tmp_path, "smoke") == []


def test_a_side_that_has_not_run_leaves_its_ordering_open(tmp_path):
    results = read(tmp_path, "fig-parity", "quick", lambda run: scaled(0.9) if run.label == MODEL else None)
    (verdict,) = judge(results, summarise(results))
    assert verdict.worse is None
    assert verdict.holds is None
    alone = read(
        tmp_path / "alone", "fig-parity", "quick", lambda run: scaled(0.9), lambda run: run.label == MODEL
    )
    assert judge(alone, summarise(alone)) == [], "its other side is not in the index at all"


def test_an_index_is_a_file_called_runs_json(tmp_path):
    """Folders written by older versions are read by name."""
    read(tmp_path, "fig-parity", "smoke", lambda run: None)
    index = json.loads((tmp_path / "fig-parity/smoke/runs.json").read_text())
    assert (index["item"], index["scale"], index["runs_folder"]) == ("fig-parity", "smoke", "../../runs")
    assert [run["label"] for run in index["runs"]] == ["Diagonal LRNN [0,1]"] * 2 + [MODEL] * 2


def test_a_folder_without_an_index_and_an_unknown_scale_are_refused(tmp_path):
    with pytest.raises(UserError, match="Give the folder that `statetrack reproduce` printed"):
        read_index(tmp_path)
    read(tmp_path, "fig-parity", "smoke", lambda run: None)
    path = tmp_path / "fig-parity/smoke/runs.json"
    path.write_text(path.read_text().replace('"scale": "smoke"', '"scale": "smok"'))
    with pytest.raises(UserError, match="Did you mean 'smoke'"):
        read_index(path.parent)
