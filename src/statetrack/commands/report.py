"""statetrack report: rebuild, merge and keep reports, from result files alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from statetrack.commands.flags import parse, take_leading
from statetrack.errors import UserError
from statetrack.report.build import write_overview, write_report
from statetrack.report.records import RECORDS
from statetrack.report.results import ItemResults, export, merge, read_index
from statetrack.report.results_page import write_results_page
from statetrack.report.text import as_text


@dataclass(frozen=True)
class ReportOptions:
    """Rebuild reports: `statetrack report DIR...` with folders that `statetrack reproduce` or --export wrote.

    Folders of the same item and scale are merged into one report.
    """

    out: Path = Path("results/report")  # where merged reports and the overview of several items go
    export: Path | None = None  # add the finished runs to EXPORT/ITEM/SCALE/runs.jsonl, report beside it
    # write PAGE/README.md, between its markers, and PAGE/report.html: all items in one
    page: Path | None = None


def main(arguments: Sequence[str]) -> None:
    given, rest = take_leading(arguments)
    folders = [Path(name) for name in given]
    options = parse(ReportOptions, rest, "statetrack report DIR...")
    if not folders:
        raise UserError("report: give at least one folder, such as results/reproduce/fig-parity/quick.")
    groups: dict[tuple[str, str], list[tuple[Path, ItemResults]]] = {}
    for folder in folders:
        results = read_index(folder)
        groups.setdefault((results.item.name, results.scale), []).append((folder, results))
    pages = []
    for (name, scale), parts in groups.items():
        results = merge([part for _, part in parts])
        if not results.finished:
            if len(groups) == 1:
                raise UserError(f"report: {parts[0][0]} lists no finished run yet.")
            print(f"{parts[0][0]} lists no finished run yet: left out.\n")
            continue
        target = parts[0][0] if len(parts) == 1 else options.out / name / scale
        if options.export is not None:
            target = options.export / name / scale
            results = _export(results, target)
        pages.append((results, write_report(results, target)))
        print(as_text(results), f"\n\nSee {pages[-1][1]}\n")
    if not pages:
        raise UserError("report: none of the folders lists a finished run yet.")
    if options.page is not None:
        print("All of them in one page:", *write_results_page(pages, options.page))
    elif len(pages) > 1:
        print(f"All of them: {write_overview(pages, options.out)}")


def _export(results: ItemResults, folder: Path) -> ItemResults:
    merged, differing = export(results, folder)
    if differing:
        print(
            f"{folder / RECORDS} has other results of {', '.join(differing)}, and they stay: delete those "
            "lines and repeat the command to put the new ones in their place.\n"
        )
    return merged
