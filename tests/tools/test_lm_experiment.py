"""The runner of the language-model experiment: data in pieces, interrupted runs, files for the page."""

import importlib.util
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from statetrack.experiments import language_models
from statetrack.lm.measured import read_perplexities
from statetrack.lm.shards import write_shards
from statetrack.report.language_model_results import differences, judge, read_results
from statetrack.run_folder import read_done
from statetrack.tasks.token_shards import TokenShards

TOOL = Path(__file__).parents[2] / "tools/lm_experiment.py"
SPLITS = ("mixture", "code", "math", "recall", "prose")


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("lm_experiment", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def shards(tmp_path):
    generator = np.random.default_rng(0)

    def documents(n):
        return [(np.cumsum(generator.integers(1, 3, size=60)) % 19).tolist() for _ in range(n)]

    splits = {"train": documents(20)} | {f"heldout-{name}": documents(3) for name in SPLITS}
    return write_shards(tmp_path / "made", splits, 20, 19)


@pytest.fixture
def planned(shards):
    training = replace(language_models.TRAINING, steps=6, batch=2, log_every=2, precision="float32")
    evaluation = replace(language_models.EVALUATION, eval_samples=1, eval_every=3)
    small = {"models": {"DeltaNet": "deltanet"}, "seeds": 1, "context": 8}
    return language_models.runs(str(shards.folder), **small, training=training, evaluation=evaluation)


def quiet(tool, tmp_path, clock):
    return tool.Log(tmp_path / "state/log.txt", clock)


def test_the_data_come_in_pieces_and_are_whole_when_all_are_there(tool, shards, tmp_path):
    pieces, target = tmp_path / "pieces", tmp_path / "state/shards"
    pieces.mkdir()
    say = quiet(tool, tmp_path, tool.Clock(60, 1))
    files = sorted(path.name for path in shards.folder.iterdir())
    for number, names in enumerate((files[:3], files[3:])):
        with tarfile.open(pieces / f"{number}.tar.xz", "w:xz") as tar:
            for name in names:
                tar.add(shards.folder / name, arcname=name)
        tool.unpack(pieces, target, say)
    unpacked = TokenShards.open(target)
    unpacked.verify()
    assert unpacked.sha256 == shards.sha256


def test_an_interrupted_run_goes_on_and_its_results_can_be_judged(tool, shards, planned, tmp_path, capsys):
    folder, state = tmp_path / "state/runs", tmp_path / "state"
    planned = [  # long enough to be cut on any machine
        replace(r, spec=replace(r.spec, training=replace(r.spec.training, steps=90))) for r in planned
    ]
    assert planned[0].id != planned[1].id  # takes a while the first time
    short = tool.Clock(0.5, 0.2)
    tool.carry_out(planned, folder, short, quiet(tool, tmp_path, short))
    assert "Stopped at step" in capsys.readouterr().out
    assert read_done(folder / planned[0].spec.id) is None
    clock = tool.Clock(600, 1)
    say = quiet(tool, tmp_path, clock)
    tool.carry_out(planned, folder, clock, say)
    tool.evaluate(planned, folder, shards, 32, clock, say)
    tool.collect(planned, state, tmp_path / "out")
    results = read_results(tmp_path / "out")
    assert {r.name for r in results.runs if r.done} == {"DeltaNet [0,1], seed 0", "DeltaNet [-1,1], seed 0"}
    judged = {v.name: v.answer for v in judge(results, differences(results))}
    assert judged["S"] == "yes"
    assert judged["C"] in ("yes", "no", "undecided")
    assert judged["B"] == "not measured"


def test_an_evaluation_that_runs_out_of_time_leaves_no_half_measured_model(tool, shards, planned, tmp_path):
    folder, clock = tmp_path / "state/runs", tool.Clock(600, 1)
    say = quiet(tool, tmp_path, clock)
    tool.carry_out(planned[:1], folder, clock, say)
    with pytest.raises(tool.OutOfTime):
        tool.evaluate(planned, folder, shards, 32, tool.Clock(0, 1), say)
    assert not (folder.parent / "perplexity.json").exists()
    tool.evaluate(planned, folder, shards, 32, clock, say)
    (model,) = read_perplexities(folder.parent / "perplexity.json").models
    assert model.losses.keys() == {f"heldout-{name}" for name in SPLITS}


def test_a_diverged_run_is_recorded_and_the_next_one_is_carried_out(tool, shards, planned, tmp_path):
    bad = replace(planned[0].spec, training=replace(planned[0].spec.training, lr=1e30, warmup=0.0, clip=0.0))
    runs = [replace(planned[0], spec=bad), planned[1]]
    folder, clock = tmp_path / "state/runs", tool.Clock(600, 1)
    tool.carry_out(runs, folder, clock, quiet(tool, tmp_path, clock))
    assert "loss is" in json.loads((folder / bad.id / "diverged.json").read_text())["message"]
    assert read_done(folder / planned[1].spec.id) is not None
