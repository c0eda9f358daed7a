"""Which pending runs of an item matter most, given the results so far.

    headline       the headline cells (`Item.headline`) at the first learning rate, all seeds
    first seeds    one seed of every other cell of the paper, at the first rate
    other seeds    the seeds of these cells that are left
    other rates    of the paper's cells whose number is not reached at the rates run so far, rate by rate
    ours           one seed of every model beyond the paper, at the first rate
    ours, seeds    their other seeds
    the rest       other rates of cells that reached their number, and of ours

A cell is a model on a task: the runs that share panel and label and differ in rate and seed.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from statetrack.experiments.item import Item, LabelledRun

STAGES = (
    "headline cells",
    "first seeds",
    "other seeds",
    "other rates, where the number is not reached",
    "ours, first seeds",
    "ours, other seeds",
    "the rest",
)
HEADLINE, FIRST_SEEDS, OTHER_SEEDS, OTHER_RATES, OURS, OURS_SEEDS, REST = range(len(STAGES))


class Scored(NamedTuple):
    """A finished run and its score, in the measure of its item."""

    run: LabelledRun
    score: float


class Importance(NamedTuple):
    """The smallest comes first. Within a stage, what has begun comes first: its checkpoint is of use."""

    stage: int
    fresh: bool  # False for a run with a checkpoint
    place: tuple[int, ...]  # within the stage


class Order:
    """The importance of an item's runs at one scale; `everything` are all its runs, in the item's order."""

    def __init__(self, of: Item, everything: Iterable[LabelledRun]):
        self.item = of
        self.cells: dict[tuple[str, str], int] = {}
        self.rates: dict[tuple[str, str], list[float]] = {}
        for run in everything:
            cell, lr = _cell(run), run.spec.training.lr
            self.cells.setdefault(cell, len(self.cells))
            if lr not in self.rates.setdefault(cell, []):
                self.rates[cell].append(lr)
        self.panels = list(dict.fromkeys(panel for panel, _ in self.cells))
        for rates in self.rates.values():
            if of.first_rate in rates:
                rates.sort(key=lambda lr: lr != of.first_rate)  # stable: the others keep their order

    def key(
        self, finished: Sequence[Scored] = (), begun: Collection[str] = ()
    ) -> Callable[[LabelledRun], Importance]:
        """The key to sort pending runs by. `finished`: the results so far; `begun`: ids with a checkpoint."""
        reached = self._reached(finished)

        def importance(run: LabelledRun) -> Importance:
            cell, lr = _cell(run), run.spec.training.lr
            rates = self.rates.get(cell, [])
            rate = rates.index(lr) if lr in rates else len(rates)
            panel = self.panels.index(run.panel) if run.panel in self.panels else len(self.panels)
            stage = self._stage(run, rate, reached.get(cell))
            place = (panel, self.cells.get(cell, len(self.cells)))
            if stage == HEADLINE:
                place = (self.item.headline.index(cell),)
            elif stage == OTHER_RATES:
                place = (rate, *place)
            return Importance(stage, run.id not in begun, (*place, rate, run.spec.seed))

        return importance

    def _stage(self, run: LabelledRun, rate: int, reached: set[float] | None) -> int:
        """`rate` is the place of the run's rate; `reached` are the rates at which its cell has its number."""
        first_seed = run.spec.seed == 0
        if run.ours and _cell(run) not in self.item.headline:
            return REST if rate else OURS if first_seed else OURS_SEEDS
        if rate:  # the seeds of a rate that seems to be the right one are completed
            return REST if reached and run.spec.training.lr not in reached else OTHER_RATES
        if _cell(run) in self.item.headline:
            return HEADLINE
        return FIRST_SEEDS if first_seed else OTHER_SEEDS

    def _reached(self, finished: Sequence[Scored]) -> dict[tuple[str, str], set[float]]:
        """By cell, the rates at which its seeds so far are not below the paper's numbers.

        Where the paper prints no number, every rate will do.
        """
        scores: dict[tuple[str, str], dict[float, list[float]]] = {}
        for run, score in finished:
            scores.setdefault(_cell(run), {}).setdefault(run.spec.training.lr, []).append(score)
        paper = self.item.paper
        return {
            cell: {lr for lr, s in by_rate.items() if cell not in paper or paper[cell].compare(s) != "lower"}
            for cell, by_rate in scores.items()
        }


def _cell(run: LabelledRun) -> tuple[str, str]:
    return run.panel, run.label
