"""Results of an item, read from its files: the index runs.json with the folders of its runs, or runs.jsonl.

runs.json is what `statetrack reproduce` writes while it works; runs.jsonl (see `records`) is what is kept. A
folder may hold both.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from statetrack.errors import UserError
from statetrack.experiments.item import Item, LabelledRun, check_scale
from statetrack.experiments.registry import item
from statetrack.files import write_json
from statetrack.report.records import RECORDS, Record, Row, read_records, thin, write_records
from statetrack.run_folder import read_done
from statetrack.training import read_metrics

INDEX = "runs.json"
REACHED = 0.9  # sequence accuracy that still counts as right


@dataclass(frozen=True)
class Result:
    """A run and its result; `done` is None while it is unfinished."""

    run: LabelledRun
    folder: Path | None  # None where the run was read from runs.jsonl
    done: dict[str, Any] | None
    kept: list[Row] | None = None  # the thinned learning curve of runs.jsonl

    @property
    def metrics(self) -> dict[str, Any]:
        assert self.done is not None
        return self.done["metrics"]

    def rows(self) -> list[Row]:
        """The lines of metrics.jsonl, or those that were kept of them."""
        if self.kept is not None:
            return self.kept
        return [] if self.folder is None else read_metrics(self.folder / "metrics.jsonl")

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

    @cached_property
    def planned(self) -> list[LabelledRun]:
        """Every run of the item at this scale, and those listed here besides, such as more seeds."""
        runs = {run.spec: run for run in self.item.runs(self.scale)}
        runs |= {result.run.spec: result.run for result in self.results}
        return _in_order(self.item, self.scale, runs.values())


def write_index(
    folder: Path, of: Item, scale: str, runs: Iterable[LabelledRun], runs_folder: Path
) -> list[LabelledRun]:
    """List the runs; returns them with the ids they have in the index.

    Finished ones of an earlier call stay, under their id, unless the item no longer has their spec.
    """
    of_item = {run.spec for run in of.runs(scale, 1)}
    there = any((folder / name).exists() for name in (INDEX, RECORDS))
    before = read_index(folder).finished if there else []
    listed = {r.run.spec: r.run for r in before if replace(r.run.spec, seed=0) in of_item}
    asked = [listed.setdefault(run.spec, run) for run in runs]
    write_json(
        folder / INDEX,
        {
            "item": of.name,
            "scale": scale,
            "runs_folder": os.path.relpath(runs_folder, folder),
            "runs": [run.to_dict() for run in _in_order(of, scale, listed.values())],
        },
    )
    return asked


def _in_order(of: Item, scale: str, runs: Iterable[LabelledRun]) -> list[LabelledRun]:
    """As the item lists them, seeds of a kind together; runs it no longer has come last."""
    place = {run.spec: i for i, run in enumerate(of.runs(scale, 1))}

    def key(run: LabelledRun) -> tuple:
        at = place.get(replace(run.spec, seed=0), len(place))
        return at, run.panel, run.label, run.spec.training.lr, run.spec.seed, run.id

    return sorted(runs, key=key)


def read_index(folder: Path) -> ItemResults:
    """The runs that an item's folder lists, with the results that are there."""
    folder = Path(folder)
    readers = {RECORDS: _read_records, INDEX: _read_runs_json}
    parts = [read(folder) for name, read in readers.items() if (folder / name).exists()]
    if not parts:
        raise UserError(
            f"{folder} holds no {INDEX} or {RECORDS}. Give the folder that `statetrack reproduce` printed, "
            "such as results/reproduce/fig-parity/quick."
        )
    return merge(parts)


def _read_runs_json(folder: Path) -> ItemResults:
    path = folder / INDEX
    try:
        data = json.loads(path.read_text())
        check_scale(data["scale"])
        runs_folder = folder / data["runs_folder"]
        runs = [LabelledRun.from_dict(entry) for entry in data["runs"]]
        results = [Result(run, runs_folder / run.id, read_done(runs_folder / run.id, run.id)) for run in runs]
        return ItemResults(item(data["item"]), data["scale"], results)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as an index of runs: {error!r}") from error


def _read_records(folder: Path) -> ItemResults:
    path = folder / RECORDS
    records = read_records(path)
    kinds = {(record.item, record.scale) for record in records}
    if len(kinds) != 1:
        found = ", ".join(f"{name} at {scale} scale" for name, scale in sorted(kinds)) or "none"
        raise UserError(f"{path}: the runs are of {found}, expected those of one item at one scale.")
    ((name, scale),) = kinds
    results = [Result(record.run, None, record.done, record.rows) for record in records]
    return ItemResults(item(name), scale, results)


def read_kept(folder: Path, of: Item, scale: str) -> list[Result]:
    """The item's runs at this scale that any FOLDER/NAME/SCALE/runs.jsonl holds: items share runs."""
    planned = {replace(run.spec, seed=0) for run in of.runs(scale, 1)}
    records = (
        record for path in sorted(folder.glob(f"*/{scale}/{RECORDS}")) for record in read_records(path)
    )
    return [
        Result(record.run, None, record.done, record.rows)
        for record in records
        if replace(record.run.spec, seed=0) in planned
    ]


def merge(parts: list[ItemResults]) -> ItemResults:
    """One item from several files, in the order of the item; a run in more than one of them counts once."""
    of, scale = parts[0].item, parts[0].scale
    for part in parts:
        if (part.item.name, part.scale) != (of.name, scale):
            raise UserError(
                f"there are runs of {of.name}, {scale} scale, and of {part.item.name}, {part.scale} scale; "
                "expected those of one item at one scale."
            )
    found: dict[str, Result] = {}
    for result in (result for part in parts for result in part.results):
        known = found.setdefault(result.run.id, result)
        if known.run.spec != result.run.spec:
            raise UserError(f"run {result.run.id} is listed twice, with two different specs. Remove one.")
        if known.done is None:
            found[result.run.id] = result
    order = [run.id for run in _in_order(of, scale, (result.run for result in found.values()))]
    return ItemResults(of, scale, [found[name] for name in order])


def export(results: ItemResults, folder: Path) -> tuple[ItemResults, list[str]]:
    """Add the finished runs to the folder's runs.jsonl, where those that are there stay as they are.

    Returns all of them, and the ids of runs that are there with other metrics than those given.
    """
    there = [_read_records(folder)] if (folder / RECORDS).exists() else []
    known = {result.run.id: result.metrics for part in there for result in part.results}
    differing = [r.run.id for r in results.finished if known.get(r.run.id, r.metrics) != r.metrics]
    merged = merge([*there, replace(results, results=results.finished)])
    records = [_record(merged, result) for result in merged.results]
    write_records(folder / RECORDS, records)
    return merged, differing


def _record(of: ItemResults, result: Result) -> Record:
    assert result.done is not None
    rows = thin(result.rows()) if result.kept is None else result.kept
    return Record(of.item.name, of.scale, result.run, result.done, rows)
