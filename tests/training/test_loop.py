"""Between two steps: when checkpoints are written, what signals do, and the options' defaults."""

import os
import signal
import threading

import pytest
import torch

from statetrack.errors import UserError
from statetrack.run import run
from statetrack.training import Options, loop
from statetrack.training.loop import resolve_device, stop_signals
from statetrack.training.store import checkpoints

QUIET = {"say": lambda text: None}


class Clock:
    """A clock that the test moves."""

    now = 1000.0

    def monotonic(self):
        return self.now


def saved_steps(spec, folder, monkeypatch, seconds, **options):
    """The steps with a checkpoint, where the clock moves by `seconds` in every step."""
    clock, saved = Clock(), []
    monkeypatch.setattr(loop, "time", clock)

    def tick(step, row):
        found = [int(path.stem.split("-")[1]) for path in checkpoints(folder)]
        saved.extend(s for s in found if s not in saved)
        clock.now += seconds

    run(spec, folder, Options(progress=tick, **options, **QUIET))
    return sorted(saved)


def test_a_checkpoint_is_written_once_more_than_20_seconds_have_passed(
    small_spec, change, tmp_path, monkeypatch
):
    """Steps of 5 seconds: 20 have passed after step 4, and 25 after step 5. Evaluation saves at step 20."""
    spec = change(small_spec, log_every=1)
    assert saved_steps(spec, tmp_path, monkeypatch, 5.0) == [5, 10, 15, 20, 25, 30, 35]


def test_the_seconds_between_checkpoints_can_be_chosen(small_spec, change, tmp_path, monkeypatch):
    """More than 60 have passed after step 13, and again 13 steps after the checkpoint of step 20."""
    spec = change(small_spec, log_every=1)
    assert saved_steps(spec, tmp_path, monkeypatch, 5.0, checkpoint_seconds=60.0) == [13, 20, 33]


def test_signals_are_handled_as_before_once_a_run_is_over():
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    before = handlers()
    with stop_signals():
        assert not {*handlers()} & {*before}
    assert handlers() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_stops_at_once(number):
    with stop_signals() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_a_thread_that_is_not_the_main_one_leaves_signals_alone():
    seen = []

    def work():
        with stop_signals() as stop:
            seen.append((stop.is_set(), signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint_seconds": -0.5}, "checkpoint_seconds is -0.5, expected 0 or more."),
        ({"checkpoint_seconds": float("nan")}, "checkpoint_seconds is nan, expected 0 or more."),
        ({"micro_batches": 0}, "micro_batches is 0, expected at least 1."),
        ({"parallel": "fdsp"}, "Did you mean 'fsdp'"),
        ({"parallel": "zero2"}, "parallel is zero2, which needs several processes"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError) as refused:
        Options(**options)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["mps", "cpux", ""])
def test_devices_other_than_cpu_and_cuda_are_refused(name):
    with pytest.raises(UserError, match=f"device is '{name}', expected auto, cpu or cuda."):
        resolve_device(name)
    assert resolve_device("cpu") == torch.device("cpu")
