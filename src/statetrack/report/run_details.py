"""Single runs, each by length, and the machines they ran on."""

from collections.abc import Sequence
from dataclasses import dataclass

from statetrack.report.coverage import rate
from statetrack.report.results import ItemResults, Result

MOST_LENGTHS = 10  # columns


@dataclass(frozen=True)
class Table:
    columns: list[str]
    lines: list[list[str]]

    def markdown(self) -> list[str]:
        """The lines of a Markdown table."""
        rows = [self.columns, ["---"] * len(self.columns), *self.lines]
        return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def details(items: Sequence[ItemResults]) -> list[tuple[str, str, Table]]:
    """Title, what the numbers are, and a line per finished run, for every panel with runs."""
    found = []
    for results in items:
        panels = dict.fromkeys(result.run.panel for result in results.finished)
        for panel in panels:
            runs = [result for result in results.finished if result.run.panel == panel]
            table = _by_length(runs, results.item.measure)
            found.append((panel, _words(runs, results.item.measure), table))
    return found


def _words(runs: Sequence[Result], measure: str) -> str:
    lengths = runs[0].run.spec.training.train_lengths
    assert lengths is not None
    trained = f"{lengths[1]}" if lengths[0] == lengths[1] else f"{lengths[0]} to {lengths[1]}"
    what = (
        "Sequence accuracy: the fraction of test sequences with every label right up to a length"
        if measure == "reach"
        else "Scaled accuracy by length, and over all lengths"
    )
    return f"{what}. Trained on length {trained}."


def _by_length(runs: Sequence[Result], measure: str) -> Table:
    names = list(runs[0].metrics["sequence_accuracy" if measure == "reach" else "accuracy"])
    if measure == "reach":
        names = _few(names, runs[0])
    middle = "reach" if measure == "reach" else "all"
    columns = ["model", "rate", "seed", *names, middle, "minutes", "commit", "run"]
    lines = []
    for result in runs:
        spec, done = result.run.spec, result.done or {}
        values = dict(zip(_names(result), result.curve()[1], strict=True))
        score = f"{result.score():.0f}" if measure == "reach" else f"{result.score():.3f}"
        numbers = [f"{values[name]:.3f}" if name in values else "" for name in names]
        tail = [f"{done['seconds'] / 60:.1f}", (done.get("commit") or "")[:7], result.run.id]
        lines.append([result.run.label, rate(spec.training.lr), f"{spec.seed}", *numbers, score, *tail])
    return Table(columns, lines)


def _names(result: Result) -> list[str]:
    metrics = result.metrics
    return list(metrics["sequence_accuracy"] if "sequence_accuracy" in metrics else metrics["accuracy"])


def _few(names: Sequence[str], result: Result) -> list[str]:
    """The training length, its halves and doublings, and the longest length, of those evaluated."""
    lengths = result.run.spec.training.train_lengths
    assert lengths is not None
    wanted = {lengths[1] * 2**i for i in range(10)} | {lengths[1] // 2**i for i in range(1, 4)}
    few = [name for name in names if int(name) in wanted or name == names[-1]]
    return few[-MOST_LENGTHS:]


def machines(finished: Sequence[Result]) -> Table:
    """Per kind of machine: runs and their time, which counts runs that shared a GPU each in full."""
    seconds: dict[str, list[float]] = {}
    for result in finished:
        done = result.done or {}
        machine = done.get("machine", {})
        parts = [machine.get("device", "unknown device"), machine.get("processor", "")]
        parts.append(f"Python {machine.get('python')}, torch {machine.get('torch')}")
        words = "; ".join(part for part in parts if part)
        seconds.setdefault(words, []).append(float(done.get("seconds", 0)))
    lines = [
        [words, f"{len(values)}", f"{sum(values) / 60:.1f} min"] for words, values in sorted(seconds.items())
    ]
    return Table(["machine", "runs", "training time, all runs"], lines)
