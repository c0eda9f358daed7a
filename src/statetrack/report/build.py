"""From result files to report.html, figure.png and figure.pdf. Reads results, never trains."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from statetrack.files import write_atomically
from statetrack.report.coverage import missing, partial
from statetrack.report.item_figures import item_figure, learning_curves
from statetrack.report.page import embedded, write_page
from statetrack.report.results import ItemResults, Result
from statetrack.report.run_details import machines
from statetrack.report.summary import judge, summarise
from statetrack.report.text import measure_words, orderings_title, scale_words, table

DIFFERENCE = "The difference compares best with best, or median with median where the paper prints no best."


def write_report(results: ItemResults, folder: Path) -> Path:
    """Write the page and the pictures of one item; returns the page's path."""
    figure = item_figure(results)
    for kind in ("png", "pdf"):
        write_atomically(folder / f"figure.{kind}", [figure[kind]])
    rows = summarise(results)
    columns, lines = table(rows, results.item.measure)
    page = folder / "report.html"
    write_page(
        page,
        "item.html",
        figure=embedded(figure["svg"]),
        learning=embedded(learning_curves(results)),
        title=results.item.what,
        name=results.item.name,
        beyond=results.item.is_ours,
        label=results.item.paper_label,
        scale=results.scale,
        scale_words=scale_words(results.scale),
        coverage=partial(results),
        missing=missing(results),
        orderings_title=orderings_title(results),
        measure=measure_words(results.item.measure, rows),
        difference=DIFFERENCE,
        columns=columns,
        lines=lines,
        ours=[row.run.ours for row in rows],
        verdicts=[{"text": str(v), "holds": v.holds} for v in judge(results, rows)],
        differences=results.item.differences[results.scale],
        hardware=machines(results.finished),
        runs=[_run(result) for result in results.results],
    )
    return page


def write_overview(pages: Sequence[tuple[ItemResults, Path]], folder: Path) -> Path:
    """A page that links to the pages of several items."""
    import os

    entries = [
        {
            "title": results.item.what,
            "name": f"{results.item.name}, {results.scale}",
            "link": Path(os.path.relpath(page, folder)).as_posix(),
            "finished": f"{len(results.finished)} of {len(results.planned)} runs",
        }
        for results, page in pages
    ]
    path = folder / "index.html"
    write_page(path, "overview.html", entries=entries)
    return path


def _run(result: Result) -> dict[str, Any]:
    spec, done = result.run.spec, result.done
    score = "" if done is None else f"{result.score():.3f}".removesuffix(".000")
    return {
        "id": result.run.id,
        "panel": result.run.panel,
        "label": result.run.label,
        "lr": f"{spec.training.lr:g}",
        "seed": spec.seed,
        "score": score or "unfinished",
        "seconds": "" if done is None else f"{done['seconds']:.0f}",
        "device": "" if done is None else done["machine"]["device"],
        "commit": (done or {}).get("commit") or "",
        "json": json.dumps(spec.to_dict(), indent=1),
    }
