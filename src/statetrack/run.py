"""One JSON spec in, one results folder out: `python -m statetrack.run spec.json`. Needs torch and numpy only.

    results/<run_id>/spec.json            what was run
                     metrics.jsonl        one row per log line: step, loss, lr, accuracy by length
                     model.safetensors    the final weights
                     done.json            written last: final metrics, machine, time, commit

A run whose folder holds done.json is finished and is not repeated.
Several processes: `torchrun --nproc-per-node 2 -m statetrack.run spec.json --parallel ddp`.
"""

from statetrack.threads import sleep_when_idle

if __name__ == "__main__":
    sleep_when_idle()  # before torch is loaded

import argparse
import contextlib
import dataclasses
import fcntl
import json
import math
import platform
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from statetrack.errors import RunningElsewhere, UserError
from statetrack.exit_codes import PATH_MISTAKES, exit_codes
from statetrack.files import PARTIAL, write_atomically, write_json
from statetrack.layers import Model
from statetrack.plugins import use_plugins
from statetrack.provenance import commit, processor
from statetrack.spec import RunSpec
from statetrack.tasks import Corpus
from statetrack.training import Options, build_model, train
from statetrack.training.loop import CHECKPOINTS, Running, check_options, resolve_device, stop_signals
from statetrack.training.printed_rows import print_row
from statetrack.training.ranks import (
    PARALLEL,
    Ranks,
    is_first_process,
    leaving_at_once,
    start_processes,
    under_torchrun,
)
from statetrack.training.store import checkpoints, remove

__all__ = ["load_run", "run"]

RESULTS = Path("results")
TOKENIZER = "tokenizer.json"
DIVERGED = "diverged.json"  # of a run in a sweep whose loss became infinite: it is not repeated


def run(spec: RunSpec, folder: Path | None = None, options: Options | None = None) -> dict[str, Any]:
    """Carry out a run, or read its finished result; returns the content of done.json.

        done = run(RunSpec(task("parity-dense"), model_config("deltanet")))
        done["metrics"]["accuracy"]     by length

    The folder is results/<run_id> unless given. A run that was interrupted continues from its last
    checkpoint. A folder that holds another spec is refused.
    """
    with stop_signals() as stop:
        steps = running(spec, folder, options or Options(), stop)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value


def running(spec: RunSpec, folder: Path | None, options: Options, stop: threading.Event) -> Running:
    """`run` in steps: yields after each of them, returns the content of done.json."""
    ranks = options.ranks
    with ranks.together():
        spec = spec.resolved()
        check_options(spec, options)  # wrong ones leave no folder
    folder = Path(folder) if folder is not None else RESULTS / spec.id
    with contextlib.ExitStack() as held:
        done = ranks.on_first(lambda: _begin(spec, folder, held))
        if done is not None:
            options.say(f"{folder} is finished already.")
            return done
        code = commit()  # now: the files may change while the run goes on with what it has loaded
        started, before = time.monotonic(), _seconds_so_far(folder)
        try:
            metrics = yield from train(spec, folder, options, stop)
        finally:
            seconds = before + time.monotonic() - started
            if ranks.is_first:
                with contextlib.suppress(OSError):  # a full disk must not hide what went wrong
                    write_json(folder / "timing.json", {"seconds": seconds})
        done = {
            "id": spec.id,
            "metrics": metrics,
            "seconds": seconds,
            "machine": machine(options),
            "commit": code,
        }
        return ranks.on_first(lambda: _finish(folder, done))


def _begin(spec: RunSpec, folder: Path, held: contextlib.ExitStack) -> dict[str, Any] | None:
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


def _finish(folder: Path, done: dict[str, Any]) -> dict[str, Any]:
    write_json(folder / "done.json", done)
    (folder / DIVERGED).unlink(missing_ok=True)
    for checkpoint in checkpoints(folder):
        remove(checkpoint)
    (folder / "timing.json").unlink(missing_ok=True)
    return done


def load_run(folder: str | Path) -> tuple[RunSpec, Model]:
    """The spec and the trained model of the finished run in `folder`: the way from a run to its model.

        spec, model = load_run("results/3f9c0d5a7b21")          the folder that `statetrack train` names
        logits, state = model(inputs)                           inputs (B, T), logits (B, T, classes)
        logits, state = model(inputs[:, :1], state)             one more token
        batch = spec.task.sample(8, (64, 64), torch.Generator().manual_seed(0))

    The model is on the CPU. An unfinished run is a `UserError`; `statetrack.open_model` opens the newest
    checkpoint of a language model.
    """
    from statetrack.files import DamagedFile, load_tensors

    folder = Path(folder)
    spec = RunSpec.load(folder / "spec.json")
    if not (folder / "model.safetensors").exists():
        raise UserError(f"{folder} holds no model.safetensors: the run has not finished.")
    model = build_model(spec)
    try:
        model.load_state_dict(load_tensors(folder / "model.safetensors")[0])
    except (DamagedFile, RuntimeError) as error:
        raise UserError(f"{folder}: the weights cannot be read: {error}") from error
    return spec, model


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


def machine(options: Options) -> dict[str, str]:
    """What the run was carried out on."""
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    several = {"processes": f"{options.ranks.size}, {options.parallel}"} if options.ranks.size > 1 else {}
    return {
        "device": torch.cuda.get_device_name() if on_gpu else _cpu(torch.get_num_threads()),
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    } | several


def _cpu(threads: int) -> str:
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


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


def _seconds_so_far(folder: Path) -> float:
    try:
        seconds = float(json.loads((folder / "timing.json").read_text())["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m statetrack.run", description="Carry out one run spec.")
    parser.add_argument("spec", help="a JSON file; `statetrack train ... --print-spec` writes one")
    parser.add_argument("--out", type=Path, help="results folder (default: results/<run_id>)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--checkpoint-seconds", type=float, default=Options.checkpoint_seconds)
    parser.add_argument("--no-cuda-graphs", action="store_true", help="launch GPU steps kernel by kernel")
    parser.add_argument(
        "--plugin", action="append", default=[], help="a file or module that registers tasks or mixers"
    )
    parser.add_argument(
        "--parallel", choices=PARALLEL, help="how torchrun's processes share the work (default: ddp)"
    )
    parser.add_argument("--micro-batches", type=int, default=1, help="pieces of a process's batch (memory)")
    parser.add_argument(
        "--checkpoints",
        choices=CHECKPOINTS,
        help="one file, or one per process (default with fsdp and zero2)",
    )
    parser.add_argument(
        "--spike", type=float, default=Options.spike, help="largest jump of the loss (0: any)"
    )
    parser.add_argument(
        "--activation-checkpointing", action="store_true", help="compute blocks again to save memory"
    )
    given = parser.parse_args(arguments)
    quiet = not is_first_process()
    with leaving_at_once(), exit_codes(quiet=quiet), processes(given.device) as ranks:
        with ranks.together():
            use_plugins(given.plugin)
            spec = RunSpec.load(given.spec)
            options = Options(
                given.device,
                given.checkpoint_seconds,
                not given.no_cuda_graphs,
                progress=print_row,
                ranks=ranks,
                parallel=given.parallel,
                micro_batches=given.micro_batches,
                checkpoints=given.checkpoints,
                activation_checkpointing=given.activation_checkpointing,
                spike=given.spike,
            )
        done = run(spec, given.out, options)
        if ranks.is_first:
            print(json.dumps(done["metrics"]))


def processes(device: str) -> contextlib.AbstractContextManager[Ranks]:
    """This process alone, or those of torchrun."""
    return start_processes(resolve_device(device)) if under_torchrun() else contextlib.nullcontext(Ranks())


if __name__ == "__main__":
    main()
