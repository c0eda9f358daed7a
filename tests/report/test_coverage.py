"""A report of some runs says so, and never more than was run."""

import pytest
from hand_results import read, scaled, solved

from statetrack.report.build import write_report
from statetrack.report.coverage import counts, missing, partial, rate
from statetrack.report.summary import summarise
from statetrack.report.text import as_text, cells, measure_words

PARITY, PLAIN = "Parity", "Mod. arithmetic w/o brackets"


def chomsky(tmp_path, table, select=lambda run: True):
    """table[panel, label][rate] are the scores of the seeds, None where a run has not finished."""

    def listed(run):  # the others are counted all the same
        return (run.panel, run.label) in table and select(run)

    def metrics(run):
        scores = table.get((run.panel, run.label), {}).get(run.spec.training.lr, ())
        score = dict(enumerate(scores)).get(run.spec.seed)
        return None if score is None else scaled(score)

    return read(tmp_path, "tab-chomsky", "paper", metrics, listed)


THREE = (0.5, 0.6, 0.7)
ONE_RATE = {(PARITY, "DeltaNet [0,1]"): {1e-3: THREE}, (PARITY, "DeltaNet [-1,1]"): {1e-3: THREE}}
EXAMPLE = {
    (PARITY, "DeltaNet [0,1]"): {1e-3: THREE},
    (PARITY, "Mamba [-1,1]"): {1e-3: THREE},
    (PARITY, "DeltaNet [-1,1]"): {1e-3: THREE, 1e-2: (1.0, 1.0, 1.0)},
}


def test_the_rates_are_named_and_those_of_single_cells_besides(tmp_path):
    results = chomsky(tmp_path, EXAMPLE)
    assert partial(results) == (
        "12 of 624 runs: 3 of 52 cells (a model on a task) with 3 seeds; "
        "rates 1e-3 and, for DeltaNet [-1,1] on Parity, 1e-2."
    )
    assert as_text(results).splitlines()[1] == partial(results)


def test_it_is_the_same_for_a_selection_of_runs(tmp_path):
    """As `--only 'parity deltanet'` leaves it: the index does not list the others."""
    results = chomsky(tmp_path, EXAMPLE, lambda run: run.panel == PARITY and run.family == "DeltaNet")
    assert partial(results).startswith("9 of 624 runs: 2 of 52 cells")
    assert partial(results).endswith("; rates 1e-3 and, for DeltaNet [-1,1] on Parity, 1e-2.")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (ONE_RATE, "; rate 1e-3."),
        ({(PARITY, "sLSTM"): {1e-2: THREE, 1e-4: THREE}}, "; rates 1e-2 and 1e-4."),
        (
            ONE_RATE | {(PLAIN, "sLSTM"): {5e-4: THREE}},
            "; rates 1e-3 and, for sLSTM on Mod. arithmetic w/o brackets, 5e-4 instead.",
        ),
        (
            {(PARITY, name): {1e-3: THREE} for name in ("Mamba [0,1]", "sLSTM", "mLSTM", "Transformer")}
            | {(PLAIN, name): {1e-3: THREE, 1e-2: THREE} for name in ("Transformer", "mLSTM", "sLSTM")},
            f"; rates 1e-3 and, for Transformer on {PLAIN}, mLSTM on {PLAIN} and sLSTM on {PLAIN}, 1e-2.",
        ),
        (
            {(PARITY, name): {1e-3: THREE} for name in ("Mamba [0,1]", "sLSTM", "mLSTM", "Transformer")}
            | {(PLAIN, name): {1e-3: THREE, 1e-2: THREE} for name in ("Mamba [0,1]", "sLSTM", "mLSTM")}
            | {(PARITY, "DeltaNet [0,1]"): {1e-3: THREE, 1e-2: THREE}},
            "; rates 1e-3 and, for 4 other cells, 1e-2.",
        ),
    ],
)
def test_rates_in_words(table, words, tmp_path):
    assert partial(chomsky(tmp_path, table)).endswith(words)


def test_all_runs_need_no_words_and_more_seeds_count_as_planned(tmp_path):
    assert partial(read(tmp_path, "fig-parity", "quick", lambda run: scaled(1.0))) == ""


def test_cells_with_fewer_seeds_are_counted_and_say_how_many(tmp_path):
    results = chomsky(tmp_path, ONE_RATE | {(PARITY, "sLSTM"): {1e-3: (1.0, None, 0.9)}})
    assert "2 of 52 cells (a model on a task) with 3 seeds, 1 with fewer" in partial(results)
    table = {row.run.label: cells(row, "scaled accuracy") for row in summarise(results) if row.tried}
    assert {label: line["seeds"] for label, line in table.items()} == {
        "sLSTM": "2 of 3",
        "DeltaNet [0,1]": "3",
        "DeltaNet [-1,1]": "3",
    }
    assert table["sLSTM"]["rates"] == "1 of 4"


def test_items_with_one_rate_do_not_speak_of_rates(tmp_path):
    results = read(tmp_path, "fig-s5", "quick", lambda run: solved(t8=1.0), lambda run: run.panel == "S5")
    assert partial(results) == "4 of 23 runs: 4 of 18 cells (a model on a task) with all seeds."
    assert all(cells(row, "reach")["rates"] == "" for row in summarise(results))


def test_the_best_median_is_named_only_where_there_was_a_choice(tmp_path):
    one = measure_words("scaled accuracy", summarise(chomsky(tmp_path / "a", ONE_RATE)))
    assert one.endswith("over the seeds at the one learning rate that was run.")
    some = measure_words("scaled accuracy", summarise(chomsky(tmp_path / "b", EXAMPLE)))
    assert some.endswith("with the best median where several were run, else at the only one run.")
    two = {(PARITY, "sLSTM"): {1e-2: THREE, 1e-4: THREE}}
    all_of_two = measure_words("scaled accuracy", summarise(chomsky(tmp_path / "c", two)))
    assert all_of_two.endswith("at the learning rate with the best median of those that were run.")
    quick = summarise(read(tmp_path / "d", "fig-parity", "quick", lambda run: scaled(1.0)))
    assert measure_words("scaled accuracy", quick).endswith("(MAD) are over the seeds.")


def test_the_page_of_one_rate_says_what_it_covers_and_claims_no_choice(tmp_path):
    results = chomsky(tmp_path, ONE_RATE)
    page = write_report(results, tmp_path / "page").read_text()
    assert "6 of 624 runs: 2 of 52 cells (a model on a task) with 3 seeds; rate 1e-3." in page
    assert "best median" not in page
    assert "<td>1 of 4</td>" in page
    assert "judged on the runs that there are" in page
    assert "<li>not run: Mod. arithmetic with brackets: all</li>" in page


def test_counts_tell_the_papers_cells_from_ours(tmp_path):
    results = chomsky(tmp_path, EXAMPLE | {(PARITY, "DeltaProduct-2 [0,1]"): {1e-3: (0.1, None, None)}})
    assert counts(results) == (
        "tab-chomsky: 3 of 28 cells of the paper with 3 seeds; 0 of 24 of ours with 3 seeds, 1 with fewer; "
        "13 of 624 runs"
    )


def test_what_is_missing_is_listed_by_task(tmp_path):
    results = chomsky(tmp_path, EXAMPLE | {(PARITY, "sLSTM"): {1e-3: (1.0, None, None)}})
    assert missing(results) == [
        "not run: Parity: Transformer; mLSTM; Mamba [0,1]",
        "not run: Mod. arithmetic w/o brackets: all",
        "not run: Mod. arithmetic with brackets: all",
        "not run: Brackets, no multiplication: all",
        "fewer seeds than planned: Parity: sLSTM (1 of 3)",
        "below the paper's number at the rates run: Parity: Mamba [-1,1] (not run: 1e-2, 5e-4 and 1e-4)",
    ]


@pytest.mark.parametrize(("lr", "words"), [(1e-3, "1e-3"), (5e-4, "5e-4"), (0.0025, "2.5e-3"), (0.1, "1e-1")])
def test_rates_are_written_with_an_exponent(lr, words):
    assert rate(lr) == words
