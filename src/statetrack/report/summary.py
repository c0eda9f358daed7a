"""Our numbers next to the published ones: a row per model and task, and the orderings in the paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from statetrack.experiments.item import Claim, LabelledRun, Published
from statetrack.report.results import ItemResults, Result

MARGIN = 0.05  # minimum difference of the means over lengths for an ordering


@dataclass(frozen=True)
class Row:
    """A model on a task: its seeds at the learning rate with the best median of those that were run."""

    run: LabelledRun  # one of them, for its labels
    chosen: list[Result]
    tried: dict[float, list[Result]]  # the finished seeds of every rate, in the order of the item
    planned: int  # runs, of all rates and seeds
    planned_rates: tuple[float, ...]
    planned_seeds: int
    published: Published | None

    @property
    def complete(self) -> bool:
        """Whether all seeds of one rate have finished."""
        return len(self.chosen) >= self.planned_seeds

    @property
    def scores(self) -> list[float]:
        return [result.score() for result in self.chosen]

    @property
    def best(self) -> float | None:
        return max(self.scores, default=None)

    @property
    def median(self) -> float | None:
        return median(self.scores) if self.chosen else None

    @property
    def deviation(self) -> float | None:
        """The median absolute deviation of the seeds."""
        middle = self.median
        return None if middle is None else median(abs(score - middle) for score in self.scores)

    @property
    def lr(self) -> float | None:
        return self.chosen[0].run.spec.training.lr if self.chosen else None

    @property
    def majority(self) -> float | None:
        """The score of always giving the most frequent answer, where the task has one."""
        values = [r.metrics.get("majority_scaled_accuracy") for r in self.chosen]
        known = [value for value in values if value is not None]
        return median(known) if known else None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's: best with best, else median with median."""
        if self.published is None or self.best is None or self.median is None:
            return None
        if self.published.best is not None:
            return self.best - self.published.best
        return None if self.published.median is None else self.median - self.published.median


def summarise(results: ItemResults, *, everything: bool = False) -> list[Row]:
    """The rows of the table, in the order of the item: one for every cell that the index lists.

    With `everything`, one for every cell of the item, those without a run included.
    """
    planned: dict[tuple[str, str], list[LabelledRun]] = {}
    for run in results.planned:
        planned.setdefault((run.panel, run.label), []).append(run)
    found: dict[tuple[str, str], list[Result]] = {}
    for result in results.results:
        found.setdefault((result.run.panel, result.run.label), []).append(result)
    paper = results.item.paper
    return [
        _row(planned[cell], found.get(cell, []), paper.get(cell))
        for cell in (planned if everything else found)
    ]


def _row(planned: Sequence[LabelledRun], group: Sequence[Result], published: Published | None) -> Row:
    rates = tuple(dict.fromkeys(run.spec.training.lr for run in planned))
    seeds = len({run.spec.seed for run in planned})
    tried: dict[float, list[Result]] = {lr: [] for lr in rates}
    for result in group:
        if result.done is not None:
            tried[result.run.spec.training.lr].append(result)
    tried = {lr: seeds for lr, seeds in tried.items() if seeds}
    run = group[0].run if group else planned[0]
    return Row(run, _choose_rate(tried), tried, len(planned), rates, seeds, published)


def _choose_rate(tried: Mapping[float, list[Result]]) -> list[Result]:
    """The finished seeds at the learning rate with the best median (App. E.1); the first one on a tie."""
    # rates with missing seeds are considered only if no rate has more
    most = max(map(len, tried.values()), default=0)
    complete = [seeds for seeds in tried.values() if len(seeds) == most]
    return max(complete, key=lambda seeds: median(r.score() for r in seeds), default=[])


@dataclass(frozen=True)
class Verdict:
    """Whether our runs show an ordering of the paper; None where a run is missing."""

    claim: Claim
    better: float | None
    worse: float | None

    @property
    def holds(self) -> bool | None:
        if self.better is None or self.worse is None:
            return None
        return self.better > self.worse + MARGIN

    def __str__(self) -> str:
        ordering = f"{self.claim.panel}: {self.claim.better} above {self.claim.worse}"
        if self.holds is None:
            return f"{ordering}: not measured"
        numbers = f"mean over lengths {self.better:.3f} against {self.worse:.3f}"
        return f"{ordering}: {'shown' if self.holds else 'NOT shown'} ({numbers})"


def judge(results: ItemResults, rows: list[Row]) -> list[Verdict]:
    """Every ordering whose panel has runs, judged by the best seed's mean over lengths."""
    heights = {
        (row.run.panel, row.run.label): max((r.height() for r in row.chosen), default=None) for row in rows
    }
    verdicts = []
    for claim in results.item.claims if results.scale != "smoke" else ():  # smoke runs learn nothing
        sides = [(claim.panel, name) for name in (claim.better, claim.worse)]
        if all(side in heights for side in sides):
            verdicts.append(Verdict(claim, *(heights[side] for side in sides)))
    return verdicts
