"""Results of an item with metrics written by hand, as folders that its runs would leave."""

import functools
import json

from statetrack.experiments.registry import ITEMS
from statetrack.report.results import read_index, write_index

MACHINE = {"device": "CPU, 1 threads", "processor": "one", "python": "3.11", "torch": "2"}


@functools.cache
def _runs(name, scale):
    return ITEMS[name].runs(scale)


def finish(folder, run, metrics):
    """What a finished run leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    row = {"step": 3, "loss": 1.0, "lr": 1e-3} | metrics
    (folder / "spec.json").write_text(json.dumps(run.spec.to_dict()))
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    done = {"id": run.id, "metrics": row, "seconds": 2.0, "machine": MACHINE}
    (folder / "done.json").write_text(json.dumps(done))


def read(out, name, scale, metrics_of, select=lambda run: True):
    """The item's results; `metrics_of(run)` is None for a run that has not finished."""
    runs = [run for run in _runs(name, scale) if select(run)]
    for run in runs:
        metrics = metrics_of(run)
        if metrics is not None:
            finish(out / "runs" / run.id, run, metrics)
    folder = out / name / scale
    write_index(folder, ITEMS[name], scale, runs, out / "runs")
    return read_index(folder)


def scaled(score, majority=0.1):
    """Metrics of a last-position task with the same scaled accuracy in two bins; chance is 1/2."""
    bins = {"40-63": 0.5 + 0.5 * score, "64-256": 0.5 + 0.5 * score}
    return {"accuracy": bins, "scaled_accuracy": score, "majority_scaled_accuracy": majority}


def solved(**by_length):
    """Metrics of a word problem: sequence accuracy by length, given as t8=1.0."""
    values = {name.removeprefix("t"): value for name, value in by_length.items()}
    return {"accuracy": dict.fromkeys(values, 0.123), "sequence_accuracy": values}
