"""The table of our values, the paper's and the differences, as aligned text and as cells for the page."""

from statetrack.report.coverage import partial
from statetrack.report.results import ItemResults
from statetrack.report.summary import Row, judge, summarise

COLUMNS = (
    "task",
    "model",
    "seeds",
    "lr",
    "rates",
    "best",
    "median",
    "MAD",
    "majority",
    "paper",
    "difference",
)


def cells(row: Row, measure: str) -> dict[str, str]:
    """One row of the table, every value formatted; an empty string where there is none."""
    digits = 0 if measure == "reach" else 3

    def number(value: float | None, sign: str = "") -> str:
        return "" if value is None else f"{value:{sign}.{digits}f}"

    return {
        "task": row.run.panel,
        "model": row.run.label + (" (ours)" if row.run.ours else ""),
        "seeds": seeds(row),
        "lr": "" if row.lr is None else f"{row.lr:g}",
        "rates": rates(row),
        "best": number(row.best),
        "median": number(row.median),
        "MAD": number(row.deviation),
        "majority": number(row.majority),
        "paper": row.published.text if row.published else "-",
        "difference": number(row.difference, "+"),
    }


def seeds(row: Row) -> str:
    """How many seeds the numbers are of: "3", or "2 of 3" where some are missing."""
    if not row.chosen:
        return "not run"
    return f"{len(row.chosen)}" if row.complete else f"{len(row.chosen)} of {row.planned_seeds}"


def rates(row: Row) -> str:
    """How many learning rates were run, where the item has several: "1 of 4"."""
    planned = len(row.planned_rates)
    return f"{len(row.tried)} of {planned}" if row.tried and planned > 1 else ""


def measure_words(measure: str, rows: list[Row]) -> str:
    """What the numbers of the table are, and at which of the learning rates."""
    if measure == "reach":
        return (
            "Reach: the longest evaluated length, in tokens, up to which at least 90 % of the test "
            "sequences are right at every position. 0 where even the shortest is not reached."
        )
    text = (
        "Scaled accuracy over all evaluation lengths: 0 is guessing, 1 is perfect. Best, median and median "
    )
    text += "absolute deviation (MAD) are over the seeds"
    counts = {len(row.tried) for row in rows if row.tried}
    if any(len(row.planned_rates) > 1 for row in rows):
        if max(counts, default=1) == 1:
            text += " at the one learning rate that was run"
        elif min(counts) == 1:
            text += (
                " at the learning rate with the best median where several were run, else at the only one run"
            )
        else:
            text += " at the learning rate with the best median of those that were run"
    return f"{text}."


def table(rows: list[Row], measure: str) -> tuple[list[str], list[list[str]]]:
    """Column names and cells; a column that is empty throughout is left out."""
    filled = [cells(row, measure) for row in rows]
    columns = [name for name in COLUMNS if any(line[name] for line in filled)]
    return columns, [[line[name] for name in columns] for line in filled]


def as_text(results: ItemResults) -> str:
    """What `statetrack reproduce` prints at the end."""
    rows = summarise(results)
    columns, lines = table(rows, results.item.measure)
    widths = [max(len(line[i]) for line in [columns, *lines]) for i in range(len(columns))]
    left = {"task", "model", "paper"}
    covered = partial(results)
    text = [headline(results), *([covered] if covered else []), ""]
    for line in [columns, *lines]:
        padded = [
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        ]
        text.append("  ".join(padded).rstrip())
    text += ["", f"What differs from the paper ({results.item.paper_label}):"]
    text += [f"  - {line}" for line in results.item.differences[results.scale]]
    verdicts = judge(results, rows)
    if verdicts:
        text += [
            "",
            f"{orderings_title(results)}:",
            *(f"  - {verdict}" for verdict in verdicts),
        ]
    return "\n".join(text)


def orderings_title(results: ItemResults) -> str:
    """Whose the orderings are, and what they are judged on, where runs are missing."""
    whose = "Orderings expected" if results.item.is_ours else "Orderings the paper reports"
    return whose + (", judged on the runs that there are" if partial(results) else "")


def headline(results: ItemResults) -> str:
    """Name, scale and what the numbers are. Every output that is not the paper's protocol says so here."""
    unit = "reach in tokens" if results.item.measure == "reach" else "scaled accuracy"
    return f"{results.item.name}, {scale_words(results.scale)}: {unit}"


def scale_words(scale: str) -> str:
    return {
        "smoke": "SMOKE scale (a test of the machinery, the numbers mean nothing)",
        "quick": "QUICK scale (fewer seeds, steps and models than the paper)",
        "paper": "paper scale",
    }[scale]
