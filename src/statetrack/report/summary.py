"""Our numbers next to the published ones: a row per model and task, and the orderings in the paper."""

from dataclasses import dataclass
from statistics import median

from statetrack.experiments.item import Claim, LabelledRun, Published
from statetrack.report.results import ItemResults, Result

MARGIN = 0.05  # minimum difference of the means over lengths for an ordering


@dataclass(frozen=True)
class Row:
    """A model on a task: its seeds at the learning rate with the best median."""

    run: LabelledRun  # one of them, for its labels
    chosen: list[Result]
    planned: int
    published: Published | None

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


def summarise(results: ItemResults) -> list[Row]:
    """The rows of the table, in the order of the index."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results.results:
        groups.setdefault((result.run.panel, result.run.label), []).append(result)
    return [
        Row(group[0].run, _choose_rate(group), len(group), results.item.paper.get(key))
        for key, group in groups.items()
    ]


def _choose_rate(group: list[Result]) -> list[Result]:
    """The finished seeds at the learning rate with the best median (App. E.1); the first one on a tie."""
    by_rate: dict[float, list[Result]] = {}
    for result in group:
        if result.done is not None:
            by_rate.setdefault(result.run.spec.training.lr, []).append(result)
    # rates with missing seeds are considered only if no rate has more
    most = max(map(len, by_rate.values()), default=0)
    complete = [seeds for seeds in by_rate.values() if len(seeds) == most]
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
