"""A worker process: takes runs from its parent one by one, and tells it how they go."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from statetrack.errors import UserError
from statetrack.run import run
from statetrack.spec import RunSpec
from statetrack.training import Diverged, Interrupted, Options


def work(connection: Connection, device: str, threads: int) -> None:
    """Carry out (spec, folder) pairs until None comes. Replies: (kind, value) as in `carry_out`."""
    import torch

    # Ctrl-C in the terminal reaches the parent only, which then asks each worker once, by SIGTERM: a run that
    # hears two signals would give up without its checkpoint.
    os.setpgrp()
    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while (message := connection.recv()) is not None:
            spec, folder = message
            connection.send(carry_out(spec, Path(folder), device, connection))


def carry_out(
    spec: dict[str, Any], folder: Path, device: str, connection: Connection | None = None
) -> tuple[str, Any]:
    """("done", seconds), ("stopped", None) or ("failed", reason); ("step", step) is sent on the way."""

    def tell(step: int, row: dict[str, Any]) -> None:
        print(f"step {step} loss {row['loss']:.4f}", flush=True)
        if connection is not None:
            connection.send(("step", step))  # fails when the parent is gone, and then the run has no reader

    with log_to(folder / "run.log"):
        try:
            done = run(RunSpec.from_dict(spec), folder, Options(device, progress=tell))
            return "done", done["seconds"]
        except Interrupted:
            return "stopped", None
        except (UserError, Diverged) as error:
            print(f"error: {error}", flush=True)
            return "failed", str(error)
        except BrokenPipeError:
            raise
        except Exception as error:  # whatever breaks one run must not break the sweep
            traceback.print_exc()
            return "failed", f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Send what this process prints, C libraries included, to the end of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    with open(path, "a") as file:
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
