"""statetrack demo: small models on parity and S5, in both eigenvalue ranges, in about a minute."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statetrack.commands.flags import parse
from statetrack.commands.progress import progress_bars
from statetrack.errors import require
from statetrack.experiments.demo import MULTIPLES, DemoRun, runs
from statetrack.files import write_atomically
from statetrack.report.figures import Curve, Panel, accuracy_against_length, panel_pictures
from statetrack.report.page import embedded, write_page
from statetrack.run import run
from statetrack.training import Options

TITLE = "The same linear RNN, with and without negative eigenvalues"
MOST_FREQUENT = "most frequent answer"  # the answer of a model that has learned nothing else


@dataclass(frozen=True)
class DemoOptions:
    """Train small models on parity and on swaps of five items, in both eigenvalue ranges; print and plot."""

    quick: bool = False  # shorter sequences and fewer steps: half the time
    out: Path = Path("results/demo")  # folder for the runs, the figure and the page
    device: str = "auto"  # auto, cpu or cuda


def main(arguments: Sequence[str]) -> None:
    options = parse(DemoOptions, arguments, "statetrack demo")
    for module, what in (("matplotlib", "drawing figures"), ("jinja2", "writing HTML reports")):
        require(module, extra="report", for_=what)  # fail before the training, not after
    out = options.out / "quick" if options.quick and options.out == DemoOptions.out else options.out
    started, planned = time.monotonic(), runs(options.quick)
    with progress_bars([(f"{r.panel}, {r.label}", r.spec.training.steps) for r in planned]) as bar:
        results = []
        for i, r in enumerate(planned):
            report = bar(i)
            done = run(r.spec, out / r.spec.id, Options(options.device, progress=report, say=_quiet))
            report(
                r.spec.training.steps, done["metrics"]
            )  # a run that was already finished reports no progress
            results.append(done)
    length = (planned[0].spec.training.train_lengths or (0, 0))[1]
    rows = _rows(planned, results, length)
    _print_table(rows, length)
    panels = _panels(planned, results, length)
    write_atomically(out / "accuracy.png", [accuracy_against_length(panels, TITLE)])
    _write_report(out / "report.html", panels, planned, results, rows)
    print(f"\n{time.monotonic() - started:.0f} s. See {out / 'accuracy.png'} and {out / 'report.html'}")


def _rows(planned: list[DemoRun], results: list[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """A row per run, and after those of a task one for always giving the most frequent answer."""
    rows = []
    for panel in dict.fromkeys(r.panel for r in planned):
        own = [(r, done) for r, done in zip(planned, results, strict=True) if r.panel == panel]
        rows += [
            {
                "task": panel,
                "model": r.model,
                "eigenvalues": r.eigenvalues,
                "values": [done["metrics"]["accuracy"][str(m * length)] for m in MULTIPLES],
                "seconds": done["seconds"],
            }
            for r, done in own
        ]
        # Runs of earlier versions did not count the answers; all answers of these tasks are equally likely.
        r, done = own[0]
        majority = done["metrics"].get("majority_accuracy", {})
        guesses = [majority.get(str(m * length), r.spec.task.chance) for m in MULTIPLES]
        rows.append({"task": panel, "model": MOST_FREQUENT, "eigenvalues": "", "values": guesses})
    return rows


def _print_table(rows: list[dict[str, Any]], length: int) -> None:
    """Accuracy by length, aligned; the same text in a terminal and in a file."""
    print(f"\nAccuracy at one position, trained on length {length}:\n")
    columns = "".join(f"{f'{m}x = {m * length}':>11}" for m in MULTIPLES)
    print(f"{'task':<26}{'model':<10}{'eigenvalues':<12}{columns}")
    for row in rows:
        values = "".join(f"{value:>11.3f}" for value in row["values"])
        print(f"{row['task']:<26}" + f"{row['model']:<10}{row['eigenvalues']}".ljust(22) + values)


def _panels(planned: list[DemoRun], results: list[dict[str, Any]], length: int) -> list[Panel]:
    panels: dict[str, list[Curve]] = {}
    chance = {r.panel: r.spec.task.chance for r in planned}
    for r, done in zip(planned, results, strict=True):
        accuracy = {int(t): a for t, a in done["metrics"]["accuracy"].items()}
        panels.setdefault(r.panel, []).append(
            Curve(r.model, r.eigenvalues, list(accuracy), list(accuracy.values()))
        )
    return [Panel(title, curves, length, chance[title]) for title, curves in panels.items()]


def _write_report(path: Path, panels: list[Panel], planned: list[DemoRun], results, rows) -> None:
    length = panels[0].train_length
    machines = sorted({f"{d['machine']['device']}, torch {d['machine']['torch']}" for d in results})
    write_page(
        path,
        "demo.html",
        pictures=[(p.title, embedded(svg)) for p, svg in zip(panels, panel_pictures(panels), strict=True)],
        title=TITLE,
        lead=f"Every model was trained on sequences of {length} tokens only; at longer ones it must keep its "
        "state without fading. With eigenvalues in [0,1] no finite-precision linear RNN can do so for parity "
        "(Theorem 1). With [-1,1] there are weights that can; the curves show how far the trained ones hold.",
        columns=[f"{m}x = {m * length}" for m in MULTIPLES],
        rows=rows,
        note=f"Share of {planned[0].spec.evaluation.eval_samples} fresh sequences whose label at exactly "
        "that position is right. A demonstration, not the paper's protocol: one seed and one learning rate "
        "per model, no Mamba on swaps, no other tasks.",
        machine="; ".join(machines) + f"; {sum(d['seconds'] for d in results):.0f} s of training in all.",
        specs=[
            {"label": f"{r.panel}, {r.label}", "json": json.dumps(r.spec.to_dict(), indent=2)}
            for r in planned
        ],
    )


def _quiet(text: str) -> None:
    """Print messages of a run to stderr, so that they do not disturb the progress bars."""
    if not text.endswith("finished already."):
        print(text, file=sys.stderr)
