"""The folder of a run: who may write to it, which run it is of, and its result.

    with contextlib.ExitStack() as held:
        done = begin(spec, folder, held)        the result, where there is one; else the folder is claimed
        ...                                     metrics, checkpoints, weights
        finish(folder, done)                    done.json, written last

`statetrack.run` carries out a run between the two; sweeps and reports read results.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from statetrack.errors import RunningElsewhere, UserError
from statetrack.exit_codes import PATH_MISTAKES
from statetrack.files import PARTIAL, write_atomically, write_json
from statetrack.spec import RunSpec
from statetrack.tasks import Corpus
from statetrack.training.store import checkpoints, remove

TOKENIZER = "tokenizer.json"
DIVERGED = "diverged.json"  # of a run in a sweep whose loss became infinite: it is not repeated


def begin(spec: RunSpec, folder: Path, held: contextlib.ExitStack) -> dict[str, Any] | None:
    """Claim the folder until `held` is left, and write the spec; or the result, where there is one.

    A result is read without a lock, so that it can be read where nothing can be written.
    """
    if (done := _result(spec, folder)) is not None:
        return done
    held.enter_context(claim(folder))
    if (done := _result(spec, folder)) is not None:  # by the process that held the lock
        return done
    for leftover in folder.glob(f".*{PARTIAL}"):  # of a process killed while it wrote
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
    _copy_tokenizer(spec, folder)
    write_json(folder / "spec.json", spec.to_dict())
    return None


def _result(spec: RunSpec, folder: Path) -> dict[str, Any] | None:
    """The result of the run in the folder, None before there is one; those of other runs are refused."""
    _check_spec(folder, spec)
    done = read_done(folder)
    if done is not None and not _is_of(done, folder, spec.id):
        raise UserError(
            f"{folder / 'done.json'} is the result of another run ({done['id']}, here {spec.id}). Choose "
            "another --out, or delete that file to carry out this run."
        )
    if done is None and (folder / "done.json").exists() and not (folder / "spec.json").exists():
        raise UserError(
            f"{folder / 'done.json'} is not of a run of this library. Choose another --out, or delete that "
            "file."
        )
    return done


def _copy_tokenizer(spec: RunSpec, folder: Path) -> None:
    """The tokenizer of a corpus goes with the model, which is of no use without it."""
    if not isinstance(spec.task, Corpus) or not (source := Path(spec.task.path) / TOKENIZER).exists():
        return
    content = source.read_bytes()
    if (folder / TOKENIZER).exists() and (folder / TOKENIZER).read_bytes() != content:
        raise UserError(
            f"{folder / TOKENIZER} differs from {source}: the run was started with another tokenizer. "
            "Choose another --out, or the data of that tokenizer."
        )
    write_atomically(folder / TOKENIZER, [content])


def finish(folder: Path, done: dict[str, Any]) -> dict[str, Any]:
    write_json(folder / "done.json", done)
    (folder / DIVERGED).unlink(missing_ok=True)
    for checkpoint in checkpoints(folder):
        remove(checkpoint)
    (folder / "timing.json").unlink(missing_ok=True)
    return done


def read_done(folder: Path, run_id: str | None = None) -> dict[str, Any] | None:
    """The result of a finished run, or None; a file that is anything else counts as none.

    With `run_id`, so does the result of another run. `commit` is None where the run is older than that entry.
    """
    try:
        done = json.loads((folder / "done.json").read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    parts = {"id": str, "metrics": dict, "seconds": (int, float), "machine": dict}
    parts |= {"commit": (str, type(None))}
    whole = isinstance(done, dict) and all(isinstance(done.get(name), kind) for name, kind in parts.items())
    if not whole or (run_id is not None and not _is_of(done, folder, run_id)):
        return None
    return {"commit": None} | done


def _is_of(done: dict[str, Any], folder: Path, run_id: str) -> bool:
    """Whether a result is of this run. Folders of old versions are named by ids that these gave."""
    return done["id"] in (run_id, folder.name)


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Lock the folder for this process; the operating system releases the lock when the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in PATH_MISTAKES:
            raise
        raise UserError(f"{folder} cannot be made: {error.strerror}. Choose another --out.") from error
    with open(folder / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunningElsewhere(
                f"{folder} is being written by another process: the run is running elsewhere. Wait for it, "
                "or choose another --out."
            ) from None
        yield


def _check_spec(folder: Path, spec: RunSpec) -> None:
    path = folder / "spec.json"
    if not path.exists():
        return
    there = RunSpec.load(path)
    if there != spec:
        changed = ", ".join(_differences(there, spec))
        raise UserError(
            f"{folder} was written by a different spec ({changed}). "
            "Choose another --out, or delete that folder."
        )


def _differences(there: Any, here: Any) -> Iterator[str]:
    """The fields in which two configs of one class differ; where a file is does not count."""
    for field in (field for field in dataclasses.fields(there) if field.compare):
        a, b = getattr(there, field.name), getattr(here, field.name)
        if dataclasses.is_dataclass(a) and type(a) is type(b):
            yield from _differences(a, b)
        elif a != b:
            a, b = (type(x).__name__ if dataclasses.is_dataclass(x) else x for x in (a, b))
            yield f"{field.name} {a}, here {b}"


def seconds_so_far(folder: Path) -> float:
    try:
        seconds = float(json.loads((folder / "timing.json").read_text())["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0
