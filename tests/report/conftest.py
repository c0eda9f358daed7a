"""Results of an item without training: folders as a run would leave them."""

import itertools
import json

import pytest

from statetrack.experiments.registry import ITEMS
from statetrack.report.results import write_index


@pytest.fixture
def pretend(tmp_path, pretend_in):
    """Write an item's folder whose runs score `score(run)`; returns the folder."""

    def write(name, scale, score, select=lambda run: True, out=tmp_path, every=1):
        return pretend_in(out, name, scale, score, select, every)

    return write


@pytest.fixture(scope="session")
def pretend_in():
    """The same in a given folder."""

    def write(out, name, scale, score, select=lambda run: True, every=1):
        runs = [run for run in ITEMS[name].runs(scale) if select(run)]
        folder = out / name / scale
        for run in runs[::every]:
            _finish(out / "runs" / run.id, run, score(run))
        write_index(folder, ITEMS[name], scale, runs, out / "runs")
        return folder

    return write


def _finish(folder, run, score):
    """`score` is scaled accuracy, or the length up to which a word problem is solved."""
    lengths = run.spec.resolved().evaluation.eval_lengths
    if run.spec.task.labels == "dense":
        values = {str(t): 1.0 if t <= score else 0.0 for t in lengths}
        metrics = {"accuracy": values, "sequence_accuracy": values}
    else:
        chance = run.spec.task.chance
        bins = {f"{a}-{b - 1}": chance + (1 - chance) * score for a, b in itertools.pairwise(lengths)}
        metrics = {"accuracy": bins, "scaled_accuracy": score, "majority_scaled_accuracy": 0.1}
    rows = [{"step": step, "loss": 1 / step, "lr": 1e-3} for step in (1, 2, 3)]
    rows[-1] |= metrics
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text(json.dumps(run.spec.to_dict()))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    machine = {"device": "CPU, 1 threads", "python": "3.11", "torch": "2"}
    done = {"id": run.id, "metrics": rows[-1], "seconds": 2.0, "machine": machine}
    (folder / "done.json").write_text(json.dumps(done))
