"""The table of our values, the paper's and the differences, as aligned text and as cells for the page."""

from statetrack.report.results import ItemResults
from statetrack.report.summary import Row, judge, summarise

COLUMNS = ("task", "model", "seeds", "lr", "best", "median", "MAD", "majority", "paper", "difference")


def cells(row: Row, measure: str) -> dict[str, str]:
    """One row of the table, every value formatted; an empty string where there is none."""
    digits = 0 if measure == "reach" else 3

    def number(value: float | None, sign: str = "") -> str:
        return "" if value is None else f"{value:{sign}.{digits}f}"

    return {
        "task": row.run.panel,
        "model": row.run.label + (" (ours)" if row.run.ours else ""),
        "seeds": f"{len(row.chosen)}" if row.chosen else "not run",
        "lr": "" if row.lr is None else f"{row.lr:g}",
        "best": number(row.best),
        "median": number(row.median),
        "MAD": number(row.deviation),
        "majority": number(row.majority),
        "paper": row.published.text if row.published else "-",
        "difference": number(row.difference, "+"),
    }


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
    missing = coverage(results)
    text = [headline(results), *([missing] if missing else []), ""]
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
        text += ["", "Orderings the paper reports:", *(f"  - {verdict}" for verdict in verdicts)]
    return "\n".join(text)


def headline(results: ItemResults) -> str:
    """Name, scale and what the numbers are. Every output that is not the paper's protocol says so here."""
    unit = "reach in tokens" if results.item.measure == "reach" else "scaled accuracy"
    return f"{results.item.name}, {scale_words(results.scale)}: {unit}"


def coverage(results: ItemResults) -> str:
    """How many runs of this item and scale are missing; empty where all are there."""
    listed = {result.run.spec for result in results.results}
    of_scale = listed | {run.spec for run in results.item.runs(results.scale)}
    missing = of_scale - {result.run.spec for result in results.finished}
    if not missing:
        return ""
    return f"{len(missing)} of the {len(of_scale)} runs of this scale are not finished or not included."


def scale_words(scale: str) -> str:
    return {
        "smoke": "SMOKE scale (a test of the machinery, the numbers mean nothing)",
        "quick": "QUICK scale (fewer seeds, steps and models than the paper)",
        "paper": "paper scale",
    }[scale]
