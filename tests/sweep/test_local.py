"""The queue on one machine: nothing twice, nothing lost, one broken run breaks no other."""

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace

import pytest

from statetrack.errors import UserError
from statetrack.layers import model_config
from statetrack.run_folder import claim
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.sweep import Job, Monitor, sweep
from statetrack.sweep.display import Lines, Table, duration
from statetrack.tasks import task
from statetrack.training import Interrupted

TINY = RunSpec(
    task("parity-dense"),
    model_config("deltanet-no-conv", d_model=8, heads=2),
    TrainingConfig(steps=6, batch=2, train_lengths=(5, 5), log_every=2),
    EvaluationConfig(eval_lengths=(5, 8), eval_samples=4),
)


def jobs(folder, count=3, **changes):
    """`count` seeds of a run that takes a moment."""
    specs = [
        replace(TINY, seed=i, training=replace(TINY.training, **changes)).resolved() for i in range(count)
    ]
    return [Job(f"tiny, lr 1, seed {spec.seed}", spec, folder / spec.id) for spec in specs]


class Recorder(Monitor):
    def __init__(self, on_step=lambda job, step: None):
        self.begun_with, self.ended, self.failures, self.on_step = None, [], [], on_step

    def begun(self, total, finished_before, workers):
        self.begun_with = (total, finished_before, workers)

    def progress(self, job, step):
        self.on_step(job, step)

    def finished(self, job, seconds):
        self.ended.append(job)

    def failed(self, failure):
        self.failures.append(failure)


def test_every_run_finishes_once_and_a_crash_stops_no_other(tmp_path):
    """A foreign spec in the folder, a run that diverges, one whose process is killed; and two good ones."""
    fine, planned = jobs(tmp_path, 2), jobs(tmp_path, 5)
    refused, killed = planned[2], planned[3]
    diverging = replace(
        planned[4].spec, training=replace(TINY.training, lr=1e30, warmup=0.0, clip=0.0)
    ).resolved()
    diverges = Job("diverges", diverging, tmp_path / diverging.id)
    refused.folder.mkdir(parents=True)
    (refused.folder / "spec.json").write_text(json.dumps(fine[0].spec.to_dict()))
    long = replace(killed.spec, training=replace(TINY.training, steps=10**6)).resolved()
    killed = Job("killed", long, tmp_path / long.id)
    monitor = Recorder(lambda job, step: job is killed and _kill_children_of_this_process())
    failures = sweep([*fine, refused, diverges, killed, fine[0]], workers=1, device="cpu", monitor=monitor)
    assert monitor.begun_with == (5, 0, 1)
    assert [job.label for job in monitor.ended] == [job.label for job in fine]
    reasons = {failure.job.label: failure.reason for failure in failures}
    assert "different spec" in reasons[refused.label]
    assert "The loss is" in reasons["diverges"]
    assert "ended with code -9" in reasons["killed"]
    for failure in failures:
        assert str(failure.job.log) in str(failure)
        assert failure.job.log.exists()
        assert (failure.job.folder / "spec.json").exists()
    assert "error: The loss is" in diverges.log.read_text()

    again = Recorder()
    assert sweep(fine, device="cpu", monitor=again) == []
    assert again.begun_with == (2, 2, 0)
    assert again.ended == []


def test_a_run_that_diverged_is_not_repeated_until_its_note_is_deleted(tmp_path):
    diverges, *fine = jobs(tmp_path, 2)
    spec = replace(diverges.spec, training=replace(TINY.training, lr=1e30, warmup=0.0, clip=0.0)).resolved()
    diverges = Job("diverges", spec, tmp_path / spec.id)
    assert [failure.job for failure in sweep([diverges, *fine], device="cpu")] == [diverges]
    log = diverges.log.read_text()
    again = Recorder()
    (failure,) = sweep([diverges, *fine], device="cpu", monitor=again)
    assert "The loss is" in failure.reason
    assert f"delete {diverges.folder / 'diverged.json'} to try again" in failure.reason
    assert again.failures == [failure]
    assert diverges.log.read_text() == log, "nothing was run"
    (diverges.folder / "diverged.json").unlink()
    sweep([diverges], device="cpu")
    assert diverges.log.read_text() != log


def test_a_run_of_another_process_is_left_to_it_and_has_not_failed(tmp_path, capsys):
    (job, other), lines = jobs(tmp_path, 2), Lines([])
    with claim(job.folder):
        assert sweep([job, other], device="cpu", monitor=lines) == []
    assert f"{job.label}: running elsewhere, in another process" in capsys.readouterr().out
    assert "1 of 2 runs done, 0 running, 1 running elsewhere" in lines.line()
    assert not (job.folder / "done.json").exists()


def test_a_result_of_another_run_does_not_count(tmp_path):
    job, other = jobs(tmp_path, 2)
    assert sweep([job], device="cpu") == []
    other.folder.mkdir()
    shutil.copy(job.folder / "done.json", other.folder)
    (failure,) = sweep([job, other], device="cpu")
    assert failure.job is other
    assert f"is the result of another run ({job.spec.id}, here {other.spec.id})" in failure.reason


def _kill_children_of_this_process():
    import multiprocessing

    for process in multiprocessing.active_children():
        process.kill()


def test_control_c_leaves_checkpoints_and_the_same_call_goes_on(tmp_path):
    planned = jobs(tmp_path, 2, steps=100)
    interrupted = threading.Event()

    def interrupt(job, step):
        if step >= 10 and not interrupted.is_set():
            interrupted.set()
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="the same command goes on"):
        sweep(planned, workers=1, device="cpu", monitor=Recorder(interrupt))
    first = planned[0].folder
    assert list(first.glob("checkpoint-*.safetensors"))
    assert not (first / "done.json").exists()
    assert sweep(planned, workers=1, device="cpu") == []
    assert "Going on from step" in (first / "run.log").read_text()
    assert [json.loads((job.folder / "done.json").read_text())["metrics"]["step"] for job in planned] == [
        100,
        100,
    ]


def test_when_the_time_is_up_runs_write_checkpoints_and_the_same_call_goes_on(tmp_path, monkeypatch):
    """The clock jumps to the end as soon as the runs are under way."""
    planned = jobs(tmp_path, 3, steps=100)
    real, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead[0])

    def jump(job, step):
        if step >= 10:
            ahead[0] = 1000.0

    assert sweep(planned, 1, "cpu", Recorder(jump), 2, seconds=900.0) == []
    assert [bool(list(job.folder.glob("checkpoint-*.safetensors"))) for job in planned] == [True, True, False]
    assert not any((job.folder / "done.json").exists() for job in planned)
    assert sweep(planned, 1, "cpu", None, 2) == []
    assert "Going on from step" in planned[0].log.read_text()
    assert all((job.folder / "done.json").exists() for job in planned)


def test_the_jobs_that_wait_are_sorted_again_whenever_a_run_has_ended(tmp_path):
    """The order depends on what has finished: then the last seed comes first."""
    planned, asked = jobs(tmp_path, 4), []

    def order(pending):
        asked.append(len(pending))
        return sorted(pending, key=lambda job: job.spec.seed, reverse=len(pending) < 4)

    monitor = Recorder()
    assert sweep(planned, 1, "cpu", monitor, order=order) == []
    assert [job.spec.seed for job in monitor.ended] == [0, 3, 2, 1]
    assert asked == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_no_time_is_a_mistake(seconds, tmp_path):
    with pytest.raises(UserError, match="expected more than 0"):
        sweep(jobs(tmp_path), seconds=seconds)


def test_runs_that_take_turns_in_one_worker_compute_what_they_compute_alone(tmp_path):
    """More runs than turns: the fourth begins when one of the first three has ended."""
    alone, shared = jobs(tmp_path / "alone", 4), jobs(tmp_path / "shared", 4)
    shared[1] = replace(shared[1], spec=replace(shared[1].spec, training=replace(TINY.training, lr=1e30)))
    monitor = Recorder()
    assert sweep(alone, workers=1, device="cpu") == []
    (failure,) = sweep(shared, workers=1, device="cpu", monitor=monitor, runs_per_worker=3)
    assert monitor.begun_with == (4, 0, 3)
    assert failure.job.label == shared[1].label
    for one, other in zip(alone, shared, strict=True):
        if other.label != failure.job.label:
            metrics = [json.loads((job.folder / "done.json").read_text())["metrics"] for job in (one, other)]
            assert metrics[0] == metrics[1]
            assert f"step 6 loss {metrics[0]['loss']:.4f}" in other.log.read_text()


def test_no_worker_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="workers is 0"):
        sweep(jobs(tmp_path), workers=0)


def test_the_time_left_follows_the_speed_of_each_model(tmp_path, monkeypatch, capsys):
    planned = jobs(tmp_path, 2, steps=100)
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    lines = Lines(planned)
    lines.begun(2, 0, 1)
    lines.started(planned[0])
    for clock[0], step in ((1.0, 10), (2.0, 30)):
        lines.progress(planned[0], step)
    assert lines.line() == "0 of 2 runs done, 1 running, 20.0 steps/s, about 8 s left"  # 70 + 100 steps to go
    lines.finished(planned[0], 5.0)
    assert lines.line() == "1 of 2 runs done, 0 running, about 5 s left"
    assert "[1/2] tiny, lr 1, seed 0: 5 s" in capsys.readouterr().out


def test_the_live_table_shows_running_runs(tmp_path):
    from rich.console import Console

    planned = jobs(tmp_path, 1, steps=100)
    table = Table([replace(planned[0], label="DeltaNet [-1,1]")])
    table.begun(1, 0, 1)
    table.started(table.jobs[0])
    table.progress(table.jobs[0], 10)
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table.render())
    console.file.close()
    text = console.export_text()
    assert "0 of 1 runs done, 1 running" in text
    assert "DeltaNet [-1,1]" in text


@pytest.mark.parametrize(("seconds", "words"), [(40, "40 s"), (600, "10 min"), (7200, "2.0 h")])
def test_durations_are_readable(seconds, words):
    assert duration(seconds) == words
