"""The paper's cells with ours beside them: a model on a task, in every setting that was tried, judged.

confirmed             our best and median agree with the paper's, within the tolerance of the cell
higher                at least as good as in the paper, and better by more than the tolerance
needs another setting below the paper's number as it stands, and not below it with a changed setting
not reached so far    below the paper's number, and rates or seeds of the protocol are still to be run
not reproduced        below the paper's number with every rate and seed of the protocol
no number             the paper describes the result in words; the orderings compare it
not run               no finished run
"""

from dataclasses import dataclass
from typing import Literal

from statetrack.experiments.item import Comparison, Item, Published
from statetrack.report.coverage import listed, rate
from statetrack.report.results import ItemResults
from statetrack.report.summary import Row, summarise
from statetrack.report.text import seeds

Kind = Literal[
    "confirmed",
    "higher",
    "needs another setting",
    "not reached so far",
    "not reproduced",
    "no number",
    "not run",
]
KINDS: tuple[Kind, ...] = Kind.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Cell:
    """A model on a task. `settings` has its row by the name of the setting, the protocol's own first."""

    panel: str
    label: str
    ours: bool
    published: Published | None
    measure: str
    settings: dict[str, Row]

    @property
    def has_run(self) -> bool:
        return any(row.tried for row in self.settings.values())

    @property
    def kind(self) -> Kind:
        """How our numbers compare with the paper's."""
        if not self.has_run:
            return "not run"
        found = [self._compare(row) for row in self.settings.values() if row.tried]
        if "lower" not in found:
            return "no number" if None in found else "confirmed" if "higher" not in found else "higher"
        if found[0] != "lower":  # the protocol's own setting, or the only one run
            return "confirmed" if found[0] == "agrees" else "higher"
        if set(found) != {"lower"}:
            return "needs another setting"
        return "not reached so far" if self._left() else "not reproduced"

    def _compare(self, row: Row) -> Comparison | None:
        return None if self.published is None else self.published.compare(row.scores)

    def sentence(self) -> str:
        """The verdict, what differs by how much, and what was not run."""
        if self.ours:
            return "Not in the paper."
        words = {
            "confirmed": "Confirmed",
            "higher": "Higher than in the paper",
            "needs another setting": "Needs another setting",
            "not reached so far": "Below the paper's number so far",
            "not reproduced": "Not reproduced",
            "no number": "The paper gives no number",
            "not run": "Not run",
        }[self.kind]
        differs = [text for name, row in self.settings.items() if (text := self._differs(name, row))]
        left = self._left() if self.has_run else []
        text = words + (f": {'; '.join(differs)}" if differs else "")
        return text + (f"; not run: {listed(left)}." if left else ".")

    def _differs(self, name: str, row: Row) -> str:
        """ "best lower by 0.019, median lower by 0.399"; what is within the tolerance is left out."""
        paper = self.published
        if paper is None or paper.compare(row.scores) is None or row.best is None or row.median is None:
            return ""
        pairs = (("best", row.best, paper.best), ("median", row.median, paper.median))
        off = [(what, ours - theirs) for what, ours, theirs in pairs if theirs is not None]
        if paper.at_most is not None:
            off.append(("best", max(0.0, row.best - paper.at_most)))
        digits = 0 if self.measure == "reach" else 3
        words = [
            f"{what} {'lower' if by < 0 else 'higher'} by {abs(by):.{digits}f}"
            for what, by in off
            if abs(by) > paper.tolerance
        ]
        if not name:
            return ", ".join(words)
        return f"with {name} {', '.join(words) or 'it agrees'}"

    def _left(self) -> list[str]:
        """What of the protocol was not run."""
        left = []
        for name, row in self.settings.items():
            setting = f" with {name}" if name else ""
            if not row.tried:
                left.append(name)
                continue
            if not row.complete:
                left.append(f"{row.planned_seeds - len(row.chosen)} of {row.planned_seeds} seeds{setting}")
            untried = [rate(lr) for lr in row.planned_rates if lr not in row.tried]
            if untried:
                left.append(f"rate{'s' if len(untried) > 1 else ''} {', '.join(untried)}{setting}")
        return left

    def numbers(self) -> str:
        """Ours, setting by setting: "0.981; median 0.601 ± 0.325, rate 1e-3", or the reach of every seed."""
        if not self.has_run:
            return "-"
        parts = [
            f"{name}: {self._numbers(row)}" if name else self._numbers(row)
            for name, row in self.settings.items()
        ]
        return "; ".join(parts)

    def _numbers(self, row: Row) -> str:
        if row.best is None or row.median is None or row.deviation is None or row.lr is None:
            return "not run"
        few = "" if row.complete else f" ({seeds(row)} seeds)"
        if self.measure == "reach":
            return ", ".join(f"{score:.0f}" for score in row.scores) + few
        at = f", rate {rate(row.lr)}" if len(row.planned_rates) > 1 else ""
        return f"{row.best:.3f}; median {row.median:.3f} ± {row.deviation:.3f}{at}{few}"


def cells_of(results: ItemResults) -> list[Cell]:
    """Every cell of the item, in its order; rows that repeat another with a changed setting belong to it."""
    rows = {(row.run.panel, row.run.label): row for row in summarise(results, everything=True)}
    of, found = results.item, {}
    for (panel, label), row in rows.items():
        own, setting = of.settings.get(label, (label, of.default_setting))
        if (panel, own) in rows:
            found.setdefault((panel, own), {})[setting] = row
    return [_cell(of, panel, label, settings) for (panel, label), settings in found.items()]


def _cell(of: Item, panel: str, label: str, settings: dict[str, Row]) -> Cell:
    own = next(iter(settings.values()))
    return Cell(panel, label, own.run.ours, of.paper.get((panel, label)), of.measure, settings)
