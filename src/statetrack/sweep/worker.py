"""A worker process: takes runs from its parent, interleaves them, and reports their progress."""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from statetrack.errors import RunningElsewhere, UserError
from statetrack.run import running
from statetrack.spec import RunSpec
from statetrack.training import Diverged, Interrupted, Options
from statetrack.training.loop import Running, stop_signals

Tell = Callable[[int], None]  # told the step of every line of metrics
TURN = 0.002  # seconds: on a GPU some twenty steps queue up in them, on a CPU hardly one goes by


def work(connection: Connection, device: str, threads: int) -> None:
    """Carry out (spec, folder) pairs until None comes: all that were sent are under way at once.

    They take turns; on a GPU every run has its own stream, so their kernels overlap. Replies are
    (kind, folder, value) with kind "step", or as `RunInTurns.advance` gives it.
    """
    import torch

    # Ctrl-C in the terminal reaches the parent only, which then asks each worker once, by SIGTERM: a run that
    # hears two signals would give up without its checkpoint.
    os.setpgrp()
    torch.set_num_threads(threads)
    under_way: dict[str, RunInTurns] = {}
    with contextlib.suppress(EOFError, ConnectionError), stop_signals() as stop:
        while True:
            while not under_way or connection.poll():
                if (message := connection.recv()) is None:
                    return
                spec, folder = message

                def tell(step: int, folder: str = folder) -> None:
                    # fails when the parent is gone, and then the run has no reader
                    connection.send(("step", folder, step))

                under_way[folder] = RunInTurns(spec, Path(folder), device, stop, tell)
            for folder, run in list(under_way.items()):
                if (outcome := run.advance()) is not None:
                    del under_way[folder]
                    connection.send((outcome[0], folder, outcome[1]))


def carry_out(spec: dict[str, Any], folder: Path, device: str) -> tuple[str, Any]:
    """One run to its end, as `RunInTurns.advance` gives it."""
    with stop_signals() as stop:
        run = RunInTurns(spec, folder, device, stop)
        while (outcome := run.advance()) is None:
            pass
    return outcome


class RunInTurns:
    """A run that goes a few steps at a time. What it prints, C libraries included, goes to its run.log."""

    def __init__(
        self, spec: dict[str, Any], folder: Path, device: str, stop: threading.Event, tell: Tell | None = None
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.log = open(folder / "run.log", "a")  # noqa: SIM115
        self.steps = self._run(spec, folder, Options(device, progress=self._progress), stop)
        self.tell = tell

    def _run(self, spec: dict[str, Any], folder: Path, options: Options, stop: threading.Event) -> Running:
        """`running`; a spec that cannot be read here, for want of a plugin, fails this run alone."""
        return (yield from running(RunSpec.from_dict(spec), folder, options, stop))

    def _progress(self, step: int, row: dict[str, Any]) -> None:
        print(f"step {step} loss {row['loss']:.4f}", flush=True)
        if self.tell is not None:
            self.tell(step)

    def advance(self) -> tuple[str, Any] | None:
        """A turn. None, or how the run ended: ("done", seconds), ("stopped", None), ("failed", reason),
        ("diverged", reason), or ("elsewhere", None) where another process has it.

        More than one step where they are short: turning output to another file takes a dozen system calls.
        """
        with _printing_to(self.log):
            until, outcome = time.monotonic() + TURN, self._step()
            while outcome is None and time.monotonic() < until:
                outcome = self._step()
        if outcome is not None:
            self.log.close()
        return outcome

    def _step(self) -> tuple[str, Any] | None:
        try:
            next(self.steps)
            return None
        except StopIteration as end:
            return "done", end.value["seconds"]
        except Interrupted:
            return "stopped", None
        except RunningElsewhere as error:
            print(error, flush=True)
            return "elsewhere", None
        except (UserError, Diverged) as error:
            print(f"error: {error}", flush=True)
            return "diverged" if isinstance(error, Diverged) else "failed", str(error)
        except ConnectionError:  # the parent is gone
            raise
        except Exception as error:  # whatever breaks one run must not break the sweep
            traceback.print_exc()
            return "failed", f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _printing_to(file: TextIO) -> Iterator[None]:
    """Send what this process prints, C libraries included, to the file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    for number in (1, 2):
        os.dup2(file.fileno(), number)
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = file
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        file.flush()
        for number, old in zip((1, 2), saved, strict=True):
            os.dup2(old, number)
            os.close(old)
