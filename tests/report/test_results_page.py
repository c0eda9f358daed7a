"""The page of all results: a verdict for every cell of the paper, computed from the runs."""

import re
from pathlib import Path

import pytest
from hand_results import read, scaled, solved

from statetrack.cli import main
from statetrack.errors import UserError
from statetrack.report.cells import cells_of
from statetrack.report.records import RECORDS
from statetrack.report.results import export, read_index
from statetrack.report.results_page import END, markdown, put, sections_of, write_results_page

DOCS = Path(__file__).parents[2] / "docs/results"
PARITY = "Parity"


def judged(tmp_path, panel, label, table):
    """The cell of tab-chomsky whose seeds score table[rate]."""

    def metrics(run):
        scores = table.get(run.spec.training.lr, ()) if (run.panel, run.label) == (panel, label) else ()
        return scaled(scores[run.spec.seed]) if run.spec.seed < len(scores) else None

    results = read(tmp_path, "tab-chomsky", "paper", metrics, lambda run: metrics(run) is not None)
    (cell,) = [cell for cell in cells_of(results) if (cell.panel, cell.label) == (panel, label)]
    return cell


EVERY_RATE = (1e-2, 1e-3, 5e-4, 1e-4)


@pytest.mark.parametrize(
    ("label", "table", "kind", "sentence"),
    [
        (
            "Mamba [-1,1]",
            dict.fromkeys(EVERY_RATE, (1.0, 0.97, 1.0)),
            "confirmed",
            "Confirmed.",
        ),
        (
            "Mamba [-1,1]",
            {1e-3: (1.0, 1.0)},
            "confirmed",
            "Confirmed; not run: 1 of 3 seeds and rates 1e-2, 5e-4, 1e-4.",
        ),
        (
            "DeltaNet [0,1]",
            dict.fromkeys(EVERY_RATE, (0.117, 0.01, 0.01)),
            "higher",
            "Higher than in the paper: best higher by 0.100.",
        ),
        (
            "Mamba [-1,1]",
            {1e-3: (0.98, 0.28, 0.6)},
            "not reached so far",
            "Below the paper's number so far: median lower by 0.400; not run: rates 1e-2, 5e-4, 1e-4.",
        ),
        (
            "Mamba [-1,1]",
            dict.fromkeys(EVERY_RATE, (0.5, 0.4, 0.6)),
            "not reproduced",
            "Not reproduced: best lower by 0.400, median lower by 0.500.",
        ),
        ("Mamba [-1,1]", {}, "not run", "Not run."),
    ],
)
def test_a_cell_of_the_table_is_judged_by_its_numbers(label, table, kind, sentence, tmp_path):
    cell = judged(tmp_path, PARITY, label, table)
    assert (cell.kind, cell.sentence()) == (kind, sentence)


def test_numbers_name_the_rate_and_missing_seeds(tmp_path):
    """The number behind the median is the MAD, as in the paper's column beside it."""
    cell = judged(tmp_path, PARITY, "Mamba [-1,1]", {1e-3: (0.98, 0.28)})
    assert cell.numbers() == "0.980; median 0.630 ± 0.350, rate 1e-3 (2 of 3 seeds)"


def swaps(tmp_path, label, by_eps):
    """A cell of Fig. 4: the reach of its seeds with each eps."""

    def metrics(run):
        if run.panel != "S5, swaps" or run.label not in (label, f"{label}, eps 1e-6"):
            return None
        scores = by_eps.get(f"eps {run.spec.training.eps:.0e}".replace("e-0", "e-"), ())
        if run.spec.seed >= len(scores):
            return None
        return solved(**{f"t{t}": float(t <= scores[run.spec.seed]) for t in (4, 32, 42, 162, 500)})

    results = read(tmp_path, "fig-s5", "paper", metrics, lambda run: metrics(run) is not None)
    (cell,) = [cell for cell in cells_of(results) if (cell.panel, cell.label) == ("S5, swaps", label)]
    return cell


@pytest.mark.parametrize(
    ("label", "by_eps", "kind", "sentence"),
    [
        (
            "DeltaNet [-1,1] (1L)",
            {"eps 1e-8": (162, 42, 42), "eps 1e-6": (500, 500, 500)},
            "needs another setting",
            "Needs another setting: with eps 1e-8 best lower by 338; with eps 1e-6 it agrees.",
        ),
        (
            "DeltaNet [-1,1] (1L)",
            {"eps 1e-6": (500, 500, 500)},
            "confirmed",
            "Confirmed: with eps 1e-6 it agrees; not run: eps 1e-8.",
        ),
        (
            "DeltaNet [-1,1] (1L)",
            {"eps 1e-8": (162, 42, 42)},
            "not reached so far",
            "Below the paper's number so far: with eps 1e-8 best lower by 338; not run: eps 1e-6.",
        ),
        (
            "DeltaNet [-1,1] (1L)",
            {"eps 1e-8": (162, 42, 42), "eps 1e-6": (162, 162, 162)},
            "not reproduced",
            "Not reproduced: with eps 1e-8 best lower by 338; with eps 1e-6 best lower by 338.",
        ),
        (
            "DeltaNet [-1,1] (1L)",
            {"eps 1e-8": (500, 500, 500), "eps 1e-6": (162, 162, 162)},
            "confirmed",
            "Confirmed: with eps 1e-8 it agrees; with eps 1e-6 best lower by 338.",
        ),
        (
            "Mamba [-1,1] (1L)",
            {"eps 1e-8": (4, 4, 4)},
            "no number",
            "The paper gives no number; not run: eps 1e-6.",
        ),
        (
            "DeltaNet [0,1] (5L)",
            {"eps 1e-8": (42, 32, 32), "eps 1e-6": (42, 4, 32)},
            "confirmed",
            "Confirmed: with eps 1e-8 it agrees; with eps 1e-6 it agrees.",
        ),
    ],
)
def test_a_curve_is_judged_in_both_settings(label, by_eps, kind, sentence, tmp_path):
    cell = swaps(tmp_path, label, by_eps)
    assert (cell.kind, cell.sentence()) == (kind, sentence)


def test_the_reach_of_every_seed_is_shown_by_setting(tmp_path):
    cell = swaps(tmp_path, "DeltaNet [-1,1] (1L)", {"eps 1e-8": (162, 42, 42), "eps 1e-6": (500,)})
    assert cell.numbers() == "eps 1e-8: 162, 42, 42; eps 1e-6: 500 (1 of 3 seeds)"


def test_an_upper_bound_of_the_paper_is_exceeded_by_what_is_above_it(tmp_path):
    """On S5 no model of the paper is right at length 30: at most 29, and here 32."""
    label = "DeltaNet [0,1] (1L)"
    results = read(
        tmp_path,
        "fig-s5",
        "paper",
        lambda run: solved(t32=1.0),
        lambda run: (run.panel, run.label) == ("S5", label),
    )
    (cell,) = [cell for cell in cells_of(results) if (cell.panel, cell.label) == ("S5", label)]
    assert cell.sentence().startswith("Higher than in the paper: with eps 1e-8 best higher by 3")


def test_full_s5_in_one_layer_has_its_own_setting(tmp_path):
    results = read(
        tmp_path, "fig-s5", "paper", lambda run: solved(t32=1.0) if "decaying" in run.label else None
    )
    (cell,) = [cell for cell in cells_of(results) if cell.has_run]
    assert cell.ours
    assert (cell.numbers(), cell.sentence()) == ("32, 32, 32", "Not in the paper.")


def test_the_committed_page_is_what_the_committed_runs_give():
    """After new runs: `statetrack report docs/results/*/paper --page docs/results` in the root folder."""
    reports = [
        (read_index(path.parent), path.parent / "report.html") for path in DOCS.glob(f"*/paper/{RECORDS}")
    ]
    text = (DOCS / "README.md").read_text()
    generated = markdown(sections_of(reports, DOCS), DOCS)
    assert put(DOCS / "README.md", generated, Path("docs/results")) == text


@pytest.fixture
def kept(tmp_path):
    """One finished model of fig-parity at quick scale, exported."""
    folder = tmp_path / "kept/fig-parity/quick"
    results = read(tmp_path, "fig-parity", "quick", lambda run: scaled(0.9 + 0.05 * run.spec.seed))
    export(results, folder)
    return folder


def test_text_around_the_generated_part_stays(kept, tmp_path, capsys):
    readme = tmp_path / "kept/README.md"
    readme.write_text("# Ours\n\nBy hand.\n")
    main(["report", str(kept), "--page", str(tmp_path / "kept")])
    first = readme.read_text()
    assert first.startswith("# Ours\n\nBy hand.\n\n<!-- begin: generated by `statetrack report")
    readme.write_text(first.replace("0.950", "0.123") + "\nBelow, by hand.\n")
    main(["report", str(kept), "--page", str(tmp_path / "kept")])
    assert readme.read_text() == first + "\nBelow, by hand.\n"
    assert readme.read_text().count(END) == 1


def test_the_page_has_every_item_with_its_figure_and_single_runs(kept, tmp_path):
    results = read_index(kept)
    _, page = write_results_page([(results, kept / "report.html")], tmp_path / "kept")
    html = page.read_text()
    assert not re.search(r"https?://|<script|src=\"(?!data:)", html)
    assert html.count("data:image/svg+xml") == 1
    assert 'href="fig-parity/quick/report.html"' in html
    assert all(result.run.id in html for result in results.results)
    for name in ("tab-chomsky", "fig-s5", "fig-z60", "fig-parity"):
        assert f"{name} (" in html
    assert "None of its 30 runs." in html
    assert "QUICK scale" in html


def test_items_kept_beside_those_given_are_not_called_missing(kept, tmp_path):
    """A page written after the export of one item still shows the other."""
    other = read(tmp_path, "fig-z60", "quick", lambda run: solved(t8=1.0))
    found = sections_of([(other, tmp_path / "report.html")], tmp_path / "kept")
    assert {s.results.item.name for s in found if s.results.finished} == {"fig-z60", "fig-parity"}


def test_two_scales_make_no_page(kept, tmp_path):
    other = read(tmp_path, "fig-z60", "smoke", lambda run: solved(t8=1.0))
    with pytest.raises(UserError, match="one scale"):
        sections_of([(other, tmp_path), (read_index(kept), kept)], tmp_path)


def test_folders_without_a_finished_run_are_left_out(kept, tmp_path, capsys):
    read(tmp_path / "empty", "fig-z60", "quick", lambda run: None)
    main(["report", str(tmp_path / "empty/fig-z60/quick"), str(kept), "--out", str(tmp_path / "all")])
    assert "lists no finished run yet: left out" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "empty/fig-z60/quick")])
