"""How much of an item has been run: what a report says at its top, and what is still missing."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from statetrack.report.results import ItemResults
from statetrack.report.summary import Row, summarise

LACKS = ("not run", "fewer seeds than planned", "below the paper's number at the rates run")
MOST_NAMED = 3  # cells with rates of their own; where there are more, they are counted


def partial(results: ItemResults) -> str:
    """What a report of some of the runs covers, as one sentence; empty where all runs are there."""
    finished, planned = len(results.finished), len(results.planned)
    if finished == planned:
        return ""
    everything = summarise(results, everything=True)
    rows = [row for row in everything if row.tried]
    cells, rates = _cells(rows, everything), _rates(rows)
    return f"{finished} of {planned} runs: {cells}" + (f"; {rates}" if rates else "") + "."


def _cells(rows: Sequence[Row], everything: Sequence[Row]) -> str:
    """ "5 of 52 cells (a model on a task) with all seeds, 1 with fewer" """
    whole = sum(row.complete for row in rows)
    fewer = len(rows) - whole
    words = f"{whole} of {len(everything)} cells (a model on a task) with {_seeds(everything)}"
    return words + (f", {fewer} with fewer" if fewer else "")


def _seeds(rows: Iterable[Row]) -> str:
    counts = {row.planned_seeds for row in rows}
    if len(counts) != 1:
        return "all seeds"
    (count,) = counts
    return f"{count} seed{'s' if count > 1 else ''}"


def _rates(rows: Sequence[Row]) -> str:
    """ "rates 1e-3 and, for DeltaNet [-1,1] on Parity, 1e-2"; empty where every cell has all its rates."""
    if all(len(row.tried) == len(row.planned_rates) for row in rows):
        return ""
    usual = Counter(tuple(row.tried) for row in rows).most_common(1)[0][0]
    others: dict[tuple[float, ...], list[Row]] = {}
    for row in rows:
        if tuple(row.tried) != usual:
            others.setdefault(tuple(row.tried), []).append(row)
    text = f"rate{'s' if len(usual) > 1 or others else ''} {listed(map(rate, usual))}"
    for tried, cells in others.items():
        more = [rate(lr) for lr in tried if lr not in usual] if set(tried) > set(usual) else None
        named = [f"{row.run.label} on {row.run.panel}" for row in cells]
        where = listed(named) if len(cells) <= MOST_NAMED else f"{len(cells)} other cells"
        text += f" and, for {where}, " + (listed(more) if more else f"{listed(map(rate, tried))} instead")
    return text


def counts(results: ItemResults) -> str:
    """ "fig-z60: 3 of 18 cells of the paper with 1 seed; 0 of 12 of ours with 1 seed; 3 of 30 runs" """
    rows = summarise(results, everything=True)
    paper, ours = ([row for row in rows if row.run.ours == side] for side in (False, True))
    parts = []
    for group, whose in ((paper, "cells of the paper"), (ours, "of ours")):
        if group:
            whole = sum(row.complete for row in group)
            fewer = sum(bool(row.tried) for row in group) - whole
            parts.append(f"{whole} of {len(group)} {whose} with {_seeds(group)}")
            parts[-1] += f", {fewer} with fewer" if fewer else ""
    parts.append(f"{len(results.finished)} of {len(results.planned)} runs")
    return f"{results.item.name}: {'; '.join(parts)}"


def missing(results: ItemResults) -> list[str]:
    """What the paper's cells lack, a line per panel: runs, seeds, or a rate that reaches the number."""
    lacks: dict[tuple[str, str], list[str]] = {}
    rows = [row for row in summarise(results, everything=True) if not row.run.ours]
    for row in rows:
        lack = _lack(row)
        if lack is not None:
            kind, words = lack
            lacks.setdefault((kind, row.run.panel), []).append(f"{row.run.label}{words}")
    of_panel = Counter(row.run.panel for row in rows)
    return [
        f"{kind}: {panel}: {'all' if len(cells) == of_panel[panel] else '; '.join(cells)}"
        for (kind, panel), cells in sorted(lacks.items(), key=lambda entry: LACKS.index(entry[0][0]))
    ]


def _lack(row: Row) -> tuple[str, str] | None:
    not_run, fewer, below = LACKS
    if not row.tried:
        return not_run, ""
    if not row.complete:
        return fewer, f" ({len(row.chosen)} of {row.planned_seeds})"
    untried = [lr for lr in row.planned_rates if lr not in row.tried]
    if untried and row.published is not None and row.published.compare(row.scores) == "lower":
        return below, f" (not run: {listed(map(rate, untried))})"
    return None


def rate(lr: float) -> str:
    """ "1e-3" """
    exponent = math.floor(math.log10(lr) + 1e-9)
    return f"{lr / 10**exponent:g}e{exponent}"


def listed(words: Iterable[str]) -> str:
    """ "a, b and c" """
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
