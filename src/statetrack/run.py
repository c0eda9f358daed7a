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
import json
import platform
import threading
import time
from pathlib import Path
from typing import Any

import torch

from statetrack.errors import UserError
from statetrack.exit_codes import exit_codes
from statetrack.files import write_json
from statetrack.layers import Model
from statetrack.plugins import use_plugins
from statetrack.provenance import commit, processor
from statetrack.run_folder import begin, finish, seconds_so_far
from statetrack.spec import RunSpec
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

__all__ = ["load_run", "run"]

RESULTS = Path("results")


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
        done = ranks.on_first(lambda: begin(spec, folder, held))
        if done is not None:
            options.say(f"{folder} is finished already.")
            return done
        code = commit()  # now: the files may change while the run goes on with what it has loaded
        started, before = time.monotonic(), seconds_so_far(folder)
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
        return ranks.on_first(lambda: finish(folder, done))


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
