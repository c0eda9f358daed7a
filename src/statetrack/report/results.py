"""Results of an item, read from its files: the index runs.json and the folders of its runs."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from statetrack.errors import UserError
from statetrack.experiments.item import Item, LabelledRun, check_scale
from statetrack.experiments.registry import item
from statetrack.files import write_json
from statetrack.run import read_done
from statetrack.training import read_metrics

INDEX = "runs.json"
REACHED = 0.9  # sequence accuracy that still counts as right


@dataclass(frozen=True)
class Result:
    """A run and what came of it; `done` is None while it is unfinished."""

    run: LabelledRun
    folder: Path
    done: dict[str, Any] | None

    @property
    def metrics(self) -> dict[str, Any]:
        assert self.done is not None
        return self.done["metrics"]

    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return read_metrics(self.folder / "metrics.jsonl")

    def curve(self) -> tuple[list[float], list[float]]:
        """Lengths, and sequence accuracy (dense tasks) or scaled accuracy in bins (last-position tasks)."""
        if "sequence_accuracy" in self.metrics:
            values = {_length(name): a for name, a in self.metrics["sequence_accuracy"].items()}
            return list(values), list(values.values())
        chance = self.run.spec.task.chance
        middles = [_length(name) for name in self.metrics["accuracy"]]
        return middles, [(a - chance) / (1 - chance) for a in self.metrics["accuracy"].values()]

    def score(self) -> float:
        """The number of the table: overall scaled accuracy, or the reach of a word problem."""
        if "scaled_accuracy" in self.metrics:
            return self.metrics["scaled_accuracy"]
        lengths, values = self.curve()
        return max((int(t) for t, a in zip(lengths, values, strict=True) if a >= REACHED), default=0)

    def height(self) -> float:
        """The mean of the curve, which tells two models apart even when neither reaches far."""
        values = self.curve()[1]
        return sum(values) / len(values)


def _length(name: str) -> float:
    """The length "32", or the middle of the bin "40-63"."""
    ends = name.split("-")
    return sum(map(int, ends)) / len(ends)


@dataclass(frozen=True)
class ItemResults:
    item: Item
    scale: str
    results: list[Result]

    @property
    def finished(self) -> list[Result]:
        return [result for result in self.results if result.done is not None]


def write_index(folder: Path, of: Item, scale: str, runs: Iterable[LabelledRun], runs_folder: Path) -> None:
    """List the runs. Finished ones of an earlier call stay, unless the item no longer has their spec."""
    listed = {run.id: run for run in runs}
    order = {run.id: i for i, run in enumerate(of.runs(scale, 1))}
    if (folder / INDEX).exists():
        before = (result.run for result in read_index(folder).finished)
        listed = {run.id: run for run in before if _at_seed_0(run) in order} | listed
    chosen = sorted(listed.values(), key=lambda run: (order.get(_at_seed_0(run), len(order)), run.spec.seed))
    write_json(
        folder / INDEX,
        {
            "item": of.name,
            "scale": scale,
            "runs_folder": os.path.relpath(runs_folder, folder),
            "runs": [run.to_dict() for run in chosen],
        },
    )


def _at_seed_0(run: LabelledRun) -> str:
    return replace(run.spec, seed=0).id


def read_index(folder: Path) -> ItemResults:
    """The runs an item's folder lists, with the results that are there."""
    path = Path(folder) / INDEX
    try:
        data = json.loads(path.read_text())
        check_scale(data["scale"])
        runs_folder = Path(folder) / data["runs_folder"]
        runs = [LabelledRun.from_dict(entry) for entry in data["runs"]]
        results = [Result(run, runs_folder / run.id, _done(runs_folder / run.id)) for run in runs]
        return ItemResults(item(data["item"]), data["scale"], results)
    except FileNotFoundError:
        raise UserError(
            f"{folder} holds no {INDEX}. Give the folder that `statetrack reproduce` printed, such as "
            "results/reproduce/fig-parity/quick."
        ) from None
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as an index of runs: {error!r}") from error


def _done(folder: Path) -> dict[str, Any] | None:
    """done.json, if it is one."""
    done = read_done(folder)
    return done if isinstance(done, dict) and isinstance(done.get("metrics"), Mapping) else None


def merge(parts: list[ItemResults]) -> ItemResults:
    """One item from several folders; a run found in more than one of them counts once."""
    found: dict[str, Result] = {}
    for result in (result for part in parts for result in part.results):
        if result.run.id not in found or found[result.run.id].done is None:
            found[result.run.id] = result
    return ItemResults(parts[0].item, parts[0].scale, list(found.values()))
