"""Runs: named by their spec, finished once, resumed exactly, never half-written."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from statetrack.errors import UserError
from statetrack.files import load_tensors
from statetrack.layers import model_config
from statetrack.run import load_run, run
from statetrack.run_folder import claim
from statetrack.spec import RunSpec
from statetrack.tasks import task
from statetrack.training import Diverged, Interrupted, Options, evaluate
from statetrack.training.initial import starting_from
from statetrack.training.store import checkpoints

QUIET = {"say": lambda text: None}
OFTEN = {"checkpoint_seconds": 0.0} | QUIET


def test_a_run_leaves_spec_metrics_weights_and_result(small_spec, tmp_path):
    done = run(small_spec, tmp_path, Options(**QUIET))
    assert {p.name for p in tmp_path.iterdir()} == {
        ".lock",
        "spec.json",
        "metrics.jsonl",
        "model.safetensors",
        "done.json",
    }
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(5, 41, 5))
    assert rows[-1] == done["metrics"]
    assert set(rows[-1]["accuracy"]) == {"8", "16"}
    assert RunSpec.load(tmp_path / "spec.json") == small_spec


def test_a_finished_run_is_not_run_twice(small_spec, tmp_path):
    first = run(small_spec, tmp_path, Options(**QUIET))
    again = run(small_spec, tmp_path, Options(progress=lambda step, row: pytest.fail("ran again"), **QUIET))
    assert again == first


def test_a_finished_run_is_read_where_no_lock_can_be_had(small_spec, tmp_path):
    """As on a read-only disk, which stops root too."""
    first = run(small_spec, tmp_path, Options(**QUIET))
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").mkdir()
    assert run(small_spec, tmp_path, Options(**QUIET)) == first


def test_a_time_that_is_no_number_counts_as_none(small_spec, tmp_path):
    (tmp_path / "timing.json").write_text('{"seconds": NaN}')
    assert 0 < run(small_spec, tmp_path, Options(**QUIET))["seconds"] < 100


def test_a_run_with_a_checkpoint_goes_on_without_the_weights_it_started_from(small_spec, tmp_path, run_until):
    run(small_spec, tmp_path / "first", Options(**QUIET))
    spec = starting_from(replace(small_spec, seed=1), tmp_path / "first")
    run(spec, tmp_path / "whole", Options(**QUIET))
    run_until(spec, tmp_path / "cut", 10)
    (tmp_path / "first").rename(tmp_path / "moved")
    run(RunSpec.load(tmp_path / "cut" / "spec.json"), tmp_path / "cut", Options(**QUIET))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert weights[0] == weights[1]
    with pytest.raises(UserError, match=r"initial: .* cannot be read"):
        run(spec, tmp_path / "new", Options(**QUIET))


def test_weights_load_into_the_model_that_made_the_metrics(small_spec, tmp_path):
    done = run(small_spec, tmp_path, Options(**QUIET))
    spec, model = load_run(tmp_path)
    measured = evaluate(model, spec, torch.device("cpu"))
    assert measured["accuracy"] == done["metrics"]["accuracy"]


def test_the_safetensors_package_reads_our_weights(small_spec, tmp_path):
    from safetensors.torch import load_file

    run(small_spec, tmp_path, Options(**QUIET))
    theirs, (ours, _) = (
        load_file(tmp_path / "model.safetensors"),
        load_tensors(tmp_path / "model.safetensors"),
    )
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


@pytest.mark.parametrize("mixer", ["deltanet", "mamba"])
@pytest.mark.parametrize("step", [5, 20, 25])
def test_a_resumed_run_ends_with_the_same_bytes(small_spec, tmp_path, step, mixer, run_until):
    spec = replace(small_spec, model=model_config(mixer, d_model=8)).resolved()
    run(spec, tmp_path / "whole", Options(**QUIET))
    run_until(spec, tmp_path / "cut", step)
    said = []
    run(spec, tmp_path / "cut", Options(say=said.append))
    assert any("Going on from step" in text for text in said)
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_files_cut_short_by_a_kill_are_swept_up(small_spec, tmp_path):
    (tmp_path / ".checkpoint-000000001.safetensors.x.partial").write_bytes(b"half")
    run(small_spec, tmp_path, Options(**QUIET))
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_metrics(small_spec, change, tmp_path):
    """SIGKILL at three moments in one run, as a power cut would."""
    spec = change(small_spec, steps=120)
    run(spec, tmp_path / "whole", Options(**QUIET))
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_dict()))
    cut = tmp_path / "cut"
    command = [sys.executable, "-m", "statetrack.run", str(tmp_path / "spec.json"), "--out", str(cut)]
    command += ["--checkpoint-seconds", "0", "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    kills = 0
    for wanted in (1, 25, 60):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        while process.poll() is None and not _reached(cut, wanted):
            time.sleep(0.005)
        kills += process.poll() is None
        process.kill()
        process.wait()
    assert kills == 3
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    assert (cut / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def _reached(folder, step):
    return any(int(path.stem.split("-")[1]) >= step for path in checkpoints(folder))


def test_control_c_saves_and_the_next_start_goes_on(small_spec, tmp_path):
    def interrupt(step, row):
        if step == 10:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="Stopped at step 10 of 40"):
        run(small_spec, tmp_path / "cut", Options(progress=interrupt, **QUIET))
    run(small_spec, tmp_path / "cut", Options(**QUIET))
    run(small_spec, tmp_path / "whole", Options(**QUIET))
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_a_folder_of_another_spec_is_refused_and_kept(small_spec, change, tmp_path):
    run(small_spec, tmp_path, Options(**QUIET))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"different spec \(lr 0.001, here 0.01\). Choose another --out"):
        run(change(small_spec, lr=0.01), tmp_path, Options(**QUIET))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_folder_in_use_is_refused(small_spec, tmp_path):
    with claim(tmp_path), pytest.raises(UserError, match="another process: the run is running elsewhere"):
        run(small_spec, tmp_path, Options(**QUIET))


def test_the_result_of_another_run_is_refused(small_spec, change, tmp_path):
    other = change(small_spec, lr=0.01)
    run(other, tmp_path / "other", Options(**QUIET))
    (tmp_path / "here").mkdir()
    shutil.copy(tmp_path / "other/done.json", tmp_path / "here")
    with pytest.raises(UserError, match=rf"result of another run \({other.id}, here {small_spec.id}\)"):
        run(small_spec, tmp_path / "here", Options(**QUIET))


def test_a_done_json_of_something_else_is_not_overwritten(small_spec, tmp_path):
    (tmp_path / "done.json").write_text('{"finished": true}')
    with pytest.raises(UserError, match=r"done.json is not of a run of this library. Choose another --out"):
        run(small_spec, tmp_path, Options(**QUIET))
    assert (tmp_path / "done.json").read_text() == '{"finished": true}'


def test_a_full_disk_is_no_mistake_of_the_user_when_the_folder_is_made(small_spec, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="No space left") as error:
        run(small_spec, tmp_path / "out", Options(**QUIET))
    assert not isinstance(error.value, UserError)


def test_a_full_disk_leaves_the_last_checkpoint_whole(small_spec, tmp_path, monkeypatch, run_until):
    run(small_spec, tmp_path / "whole", Options(**QUIET))
    cut = tmp_path / "cut"
    run_until(small_spec, cut, 10)
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        run(small_spec, cut, Options(**OFTEN))
    monkeypatch.setattr(os, "fsync", real)
    assert not [p for p in cut.iterdir() if p.name.startswith(".") and p.name != ".lock"]
    run(small_spec, cut, Options(**QUIET))
    assert (cut / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_a_loss_that_is_not_a_number_stops_the_run_with_advice(small_spec, change, tmp_path):
    with pytest.raises(Diverged, match="smaller --lr"):
        run(change(small_spec, lr=1e30, warmup=0.0, clip=0.0), tmp_path, Options(**QUIET))


def test_a_fixed_training_set_is_walked_through_once_per_epoch_in_another_order_for_every_seed(
    small_spec, change
):
    from torch import Generator

    from statetrack.training.protocols import WHOLE
    from statetrack.training.source import source_of

    spec = change(small_spec, train_samples=12, train_lengths=(30, 30))

    def epoch(seed, number):
        run_spec = replace(spec, seed=seed)
        source = source_of(run_spec, torch.device("cpu"))
        batches = [source.batch(3 * number + i, WHOLE, Generator()).inputs for i in range(3)]
        return [tuple(row) for row in torch.cat(batches).tolist()]

    assert len(set(epoch(0, 0))) == 12
    assert set(epoch(0, 0)) == set(epoch(0, 1)) == set(epoch(1, 0))
    assert epoch(0, 0) != epoch(0, 1)
    assert epoch(0, 0) != epoch(1, 0)


def test_a_run_on_a_fixed_set_resumes_exactly(small_spec, change, tmp_path, run_until):
    spec = replace(change(small_spec, train_samples=10), task=task("parity")).resolved()
    run(spec, tmp_path / "whole", Options(**QUIET))
    run_until(spec, tmp_path / "cut", 15)
    run(spec, tmp_path / "cut", Options(**QUIET))
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_training_seeds_share_the_evaluation_set(small_spec):
    from torch import Generator

    seen = []
    for seed in (0, 1):
        spec = replace(small_spec, seed=seed)
        generator = Generator().manual_seed(spec.evaluation.eval_seed)
        seen.append(spec.task.sample(4, (16, 16), generator).inputs)
    assert torch.equal(*seen)


@pytest.mark.parametrize(
    "name", ["deltanet", "mamba", "transformer", "mlstm", "slstm", "dense-transition", "diagonal-toy"]
)
def test_every_mixer_trains_on_the_paper_form_of_parity(name, small_spec, tmp_path):
    changes = {} if name == "diagonal-toy" else {"d_model": 16}
    spec = replace(
        small_spec,
        task=task("parity"),
        model=model_config(name, **changes),
        evaluation=replace(small_spec.evaluation, eval_lengths=(10, 20, 30)),
    )
    metrics = run(spec, tmp_path, Options(**QUIET))["metrics"]
    assert list(metrics["accuracy"]) == ["10-19", "20-30"]
    assert -1 <= metrics["scaled_accuracy"] <= 1


def test_a_small_model_learns_parity_far_beyond_its_training_length(tmp_path):
    """The effect itself, in miniature: [-1,1] solves eight times the training length, [0,1] guesses."""
    from statetrack.spec import EvaluationConfig, TrainingConfig

    accuracy = {}
    for eigenvalues in ("[0,1]", "[-1,1]"):
        model = model_config("deltanet-no-conv", d_model=32, heads=1, eigenvalues=eigenvalues)
        spec = RunSpec(
            task("parity-dense"),
            model,
            TrainingConfig(steps=150, batch=64, lr=1e-2, train_lengths=(16, 16), weight_decay=0.01),
            EvaluationConfig(eval_lengths=(16, 128), eval_samples=256),
        )
        accuracy[eigenvalues] = run(spec, tmp_path / eigenvalues, Options(**QUIET))["metrics"]["accuracy"][
            "128"
        ]
    assert accuracy["[-1,1]"] > 0.95
    assert 0.4 < accuracy["[0,1]"] < 0.6
