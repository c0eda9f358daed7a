"""statetrack reproduce: one table or figure of the paper, our results next to the published ones."""

from collections.abc import Sequence

from statetrack.commands.flags import parse, take_first, take_plugins
from statetrack.errors import UserError, require
from statetrack.experiments.item import SCALES, Item
from statetrack.experiments.registry import ITEMS
from statetrack.report.build import write_overview, write_report
from statetrack.report.text import as_text
from statetrack.reproduce import EVERYTHING, Part, ReproduceOptions, reproduce


def main(arguments: Sequence[str]) -> None:
    name, flags = take_first(take_plugins(arguments))
    options = parse(ReproduceOptions, flags, "statetrack reproduce NAME")
    if options.list:
        print(_listing())
        return
    if name is None:
        raise UserError(f"reproduce: give the name of an item first: {', '.join((*ITEMS, EVERYTHING))}.")
    for module, what in (("matplotlib", "drawing figures"), ("jinja2", "writing HTML reports")):
        require(module, extra="report", for_=what)  # fail before hours of training, not after
    outcome = reproduce(name, options)
    _report(outcome.parts, options)
    outcome.exit_if_failed()


def _report(parts: Sequence[Part], options: ReproduceOptions) -> None:
    """A page for every item with a finished run; of a single item its table here, too."""
    pages = []
    for part in parts:
        results = part.results()
        if results.finished:
            pages.append((results, write_report(results, part.folder)))
    if len(pages) == 1:
        ((results, page),) = pages
        print(f"\n{as_text(results)}\n\nSee {page}, and figure.png and figure.pdf beside it.")
    elif pages:
        print(f"\nSee {write_overview(pages, options.out)}.")


def _listing() -> str:
    """Name, what, paper label and number of runs per scale."""
    rows = [("name", "paper label", *SCALES, "what")]
    rows += [(i.name, i.paper_label, *_counts(i), i.what) for i in ITEMS.values()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(
        [*lines, "", "Numbers are runs per scale. tab-chomsky and fig-chomsky-length share theirs."]
    )


def _counts(of: Item) -> list[str]:
    return [str(len(of.runs(scale))) for scale in SCALES]
