"""Reports: right numbers from files alone, the same bytes every time."""

import json
import re

import pytest

from statetrack.cli import main
from statetrack.errors import UserError
from statetrack.experiments.registry import ITEMS
from statetrack.experiments.tab_chomsky import PARITY
from statetrack.report import drawing
from statetrack.report.build import write_report
from statetrack.report.drawing import interval
from statetrack.report.item_figures import learning_curves, loss_band, lower_limit
from statetrack.report.results import INDEX, merge, read_index
from statetrack.report.summary import judge, summarise
from statetrack.report.text import as_text


def rows_of(folder):
    return {row.run.label: row for row in summarise(read_index(folder))}


def test_the_learning_rate_is_chosen_by_the_median_of_the_seeds(pretend):
    """1e-2 has the best single seed, 1e-3 the best median."""
    table = {1e-2: (0.0, 0.1, 0.9), 1e-3: (0.5, 0.6, 0.8), 5e-4: (0.2, 0.3, 0.4), 1e-4: (0.0, 0.0, 0.0)}
    folder = pretend("fig-parity", "paper", lambda run: table[run.spec.training.lr][run.spec.seed])
    row = rows_of(folder)["Diagonal LRNN [-1,1]"]
    assert (row.lr, row.best, row.median) == (1e-3, 0.8, 0.6)
    assert row.deviation == pytest.approx(0.1)
    assert row.difference == pytest.approx(0.8 - 1.0)


def test_the_reach_is_the_longest_length_that_is_solved(pretend):
    folder = pretend(
        "fig-s5",
        "quick",
        lambda run: 64 if run.eigenvalues == "[-1,1]" else 3,
        lambda run: run.panel == "S5, swaps",
    )
    rows = rows_of(folder)
    assert (rows["DeltaNet [-1,1] (1L)"].best, rows["DeltaNet [0,1] (1L)"].best) == (64, 0)
    assert rows["DeltaNet [-1,1] (1L)"].difference == 64 - 500
    assert rows["DeltaNet [0,1] (1L)"].difference is None


def test_orderings_are_judged_only_where_both_sides_ran(pretend):
    def score(run):
        return 1.0 if run.label in ("Mamba [-1,1]", "sLSTM") else 0.0

    results = read_index(pretend("tab-chomsky", "quick", score, lambda run: run.panel == PARITY))
    verdicts = {(v.claim.better, v.claim.worse): v.holds for v in judge(results, summarise(results))}
    assert verdicts["Mamba [-1,1]", "Mamba [0,1]"] is True
    assert verdicts["DeltaNet [-1,1]", "DeltaNet [0,1]"] is False
    assert all(v.claim.panel == PARITY for v in judge(results, summarise(results)))


def test_the_majority_baseline_stands_beside_every_score(pretend):
    text = as_text(
        read_index(pretend("tab-chomsky", "quick", lambda run: 0.5, lambda run: run.panel == PARITY))
    )
    assert "majority" in text
    assert all("0.100" in line for line in text.splitlines() if line.startswith(PARITY))
    assert "QUICK scale" in text


def test_a_page_of_ours_compares_with_no_paper(pretend):
    def page(name):
        folder = pretend(name, "quick", lambda run: 64, lambda run: run.spec.seed == 0)
        return write_report(read_index(folder), folder).read_text()

    ours, papers = page("ours-gates"), page("fig-s5")
    assert "ours-gates; not in the paper</p>" in ours
    assert "fig-s5; in the paper fig:s5" in papers
    for text in ("and the difference</h2>", "The difference compares", "Shaded rows"):
        assert text not in ours
        assert text in papers


def test_a_report_says_how_many_runs_it_lacks(pretend):
    folder = pretend("fig-parity", "quick", lambda run: 1.0, lambda run: run.spec.seed < 2, every=2)
    text = as_text(read_index(folder))
    assert text.splitlines()[1] == (
        "2 of 6 runs: 0 of 2 cells (a model on a task) with 3 seeds, 2 with fewer."
    )
    whole = pretend("fig-parity", "quick", lambda run: 1.0)
    assert " of 6 runs" not in as_text(read_index(whole))


@pytest.mark.parametrize("name", ["fig-parity", "tab-chomsky", "fig-chomsky-length", "fig-s5", "fig-z60"])
def test_a_report_is_complete_self_contained_and_the_same_when_rebuilt(name, pretend, capsys):
    folder = pretend(name, "quick", lambda run: 0.3 * (run.eigenvalues == "[-1,1]"), every=2)
    write_report(read_index(folder), folder)
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(first) == {INDEX, "report.html", "figure.png", "figure.pdf"}
    for path in folder.iterdir():
        if path.name != INDEX:
            path.unlink()
    main(["report", str(folder)])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    page = first["report.html"].decode()
    results = read_index(folder)
    assert not re.search(r"https?://|<script|src=\"(?!data:)", page)
    assert "QUICK scale" in page
    assert f"{len(results.finished)} of {len(results.results)} runs: " in page
    assert all(result.run.id in page for result in results.results)
    assert page.count("<pre>") == len(results.results)
    assert "CPU, 1 threads" in page
    assert first["figure.png"].startswith(b"\x89PNG")
    assert first["figure.pdf"].startswith(b"%PDF")


def test_a_run_that_one_folder_has_finished_counts_whatever_another_says(pretend, tmp_path):
    half = read_index(pretend("fig-parity", "quick", lambda run: 1.0, out=tmp_path / "half", every=2))
    whole = read_index(pretend("fig-parity", "quick", lambda run: 1.0, out=tmp_path / "whole"))
    assert len(half.finished) == 3
    assert len(merge([half, whole]).finished) == len(merge([whole, half]).finished) == 6


def test_folders_of_one_item_are_merged_and_no_run_counts_twice(pretend, tmp_path, monkeypatch, capsys):
    parts = [
        pretend(
            "fig-parity",
            "quick",
            lambda run: 1.0,
            lambda run, i=i: run.spec.seed in (i, 2),
            tmp_path / str(i),
        )
        for i in (0, 1)
    ]
    assert len(merge([read_index(part) for part in parts]).finished) == 6
    other = pretend("fig-z60", "smoke", lambda run: 8)
    monkeypatch.chdir(tmp_path)
    main(["report", *map(str, parts), str(other), "--out", "all"])
    assert "2 of" not in capsys.readouterr().err
    assert (tmp_path / "all/fig-parity/quick/report.html").exists()
    overview = (tmp_path / "all/index.html").read_text()
    assert 'href="fig-parity/quick/report.html"' in overview
    assert 'href="../fig-z60/smoke/report.html"' in overview


def test_an_earlier_finished_run_stays_in_the_index(pretend):
    folder = pretend("fig-parity", "quick", lambda run: 1.0, lambda run: run.spec.seed == 0)
    again = pretend("fig-parity", "quick", lambda run: 1.0, lambda run: run.spec.seed == 1)
    assert again == folder
    assert {result.run.spec.seed for result in read_index(folder).results} == {0, 1}


def test_runs_of_an_older_definition_of_the_item_leave_the_index(pretend):
    folder = pretend("fig-parity", "quick", lambda run: 1.0)
    index = json.loads((folder / INDEX).read_text())
    index["runs"][0]["spec"]["training"]["batch"] = 7
    (folder / INDEX).write_text(json.dumps(index))
    assert {result.run.spec.training.batch for result in read_index(folder).finished} == {7, 64}
    pretend("fig-parity", "quick", lambda run: 1.0)
    assert {result.run.spec.training.batch for result in read_index(folder).results} == {64}


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"item": "fig-parity"}', '{"item": "no", "scale": "quick", "runs_folder": "", "runs": []}'],
)
def test_a_damaged_index_is_a_clear_error(content, tmp_path):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(UserError):
        read_index(tmp_path)


def test_a_damaged_result_counts_as_unfinished(pretend, tmp_path):
    folder = pretend("fig-parity", "quick", lambda run: 1.0)
    results = read_index(folder)
    (results.results[0].folder / "done.json").write_text(json.dumps([1]))
    (results.results[1].folder / "done.json").write_text("{")
    assert len(read_index(folder).finished) == len(results.results) - 2


@pytest.mark.parametrize(
    ("values", "half"),
    [([0.5, 0.5, 0.5], 0.0), ([0.4, 0.6], 12.706 * 0.1), ([0.0], 1.96 * 0.5 / 10 / 0.5)],
)
def test_intervals_are_students_over_seeds_and_binomial_for_one(values, half):
    assert interval(values, 100, 0.5) == pytest.approx(half, abs=1e-9)


class Rows:
    """A run of which only the learning curve is asked."""

    def __init__(self, **losses):
        self.losses = losses

    def rows(self):
        return [{"step": int(step[1:]), "loss": loss} for step, loss in self.losses.items()]


def test_learning_curves_are_the_median_of_the_seeds_between_the_lowest_and_the_highest():
    """The third seed has no row at step 2: half-way between 1e-2 and 1 on a logarithmic axis is 0.1."""
    seeds = [Rows(s1=1.0, s2=0.5, s3=0.1), Rows(s1=2.0, s2=0.4, s3=0.2), Rows(s1=1e-2, s3=1.0)]
    steps, low, middle, high = loss_band(seeds)
    assert steps.tolist() == [1, 2, 3]
    assert low == pytest.approx([1e-2, 0.1, 0.1])
    assert middle == pytest.approx([1.0, 0.4, 0.2])
    assert high == pytest.approx([2.0, 0.5, 1.0])


def test_learning_curves_mark_the_loss_of_guessing(pretend):
    """Text in an SVG is drawn as paths, after a comment with the words."""
    svg = learning_curves(read_index(pretend("fig-parity", "quick", lambda run: 0.5))).decode()
    assert svg.count("<!-- guessing -->") == 1


@pytest.mark.parametrize("lost", [1, None])
def test_a_report_is_written_where_curves_are_lost(pretend, lost):
    """metrics.jsonl of one run, or of all, is gone or empty; done.json has the numbers of the table."""
    folder = pretend("fig-parity", "quick", lambda run: 0.5)
    before = read_index(folder)
    for i, result in enumerate(before.results[:lost]):
        path = result.folder / "metrics.jsonl"
        path.unlink() if i % 2 else path.write_text("")
    write_report(read_index(folder), folder)
    assert "0.500" in (folder / "report.html").read_text()


@pytest.mark.parametrize(("score", "limit"), [(0.9, -0.12), (-0.05, -0.12), (-0.6, -0.66)])
def test_the_accuracy_axis_reaches_below_every_curve(pretend, score, limit):
    """Scaled accuracy is negative below guessing; such a curve is drawn, not cut off."""
    folder = pretend("fig-parity", "quick", lambda run: score)
    assert lower_limit(summarise(read_index(folder))) == pytest.approx(limit)


def test_every_family_of_an_item_has_a_look_of_its_own():
    """Sixteen settings have seven colours and seven markers: a colour comes again with another marker."""
    runs = [run for run in ITEMS["ours-length"].runs("paper") if run.spec.seed == 0]
    families = drawing.families_of(runs)
    looks = {run.family: tuple(map(str, drawing.look(run, families).values())) for run in runs}
    assert len(families) == len(set(looks.values())) == 16
