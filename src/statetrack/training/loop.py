"""The training loop: one spec in, one results folder out.

`loop` holds a run's parts together (see `protocols.py`) and knows nothing of what they do; `parts_of` chooses
the parts that a spec and the options ask for.
"""

import contextlib
import functools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Generator as Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from statetrack.errors import Interrupted, UserError, require, unknown_name
from statetrack.field_comments import explain_fields
from statetrack.ops.backends import auto_backend
from statetrack.spec import RunSpec
from statetrack.tasks import StoredTask
from statetrack.training import sharded_files
from statetrack.training.evaluation import evaluate
from statetrack.training.graph_step import GraphStep
from statetrack.training.guard import Guard
from statetrack.training.metrics_file import MetricsFile, read_metrics
from statetrack.training.protocols import Parts, Step
from statetrack.training.ranks import PARALLEL, Parallel, Ranks
from statetrack.training.selection import Selection
from statetrack.training.sharded_step import ShardedStep, shard
from statetrack.training.source import source_of
from statetrack.training.state import TrainingState, new_state
from statetrack.training.store import FileStore, ShardedStore
from statetrack.training.throughput import Meter, append_throughput

ProgressCallback = Callable[[int, dict[str, Any]], None]
Checkpoints = Literal["whole", "sharded"]
CHECKPOINTS = ("whole", "sharded")
# What carries out a run step by step: it yields after each, so that several can take turns on one GPU.
Running = Coroutine[None, None, dict[str, Any]]


@explain_fields
@dataclass
class Options:
    """How a run is carried out. Nothing here changes its metrics, but for rounding.

    statetrack.run.run(spec, "results/mine", Options(device="cpu", checkpoint_seconds=60))
    """

    device: str = "auto"  # auto, cpu or cuda
    checkpoint_seconds: float = 20.0  # largest time between two checkpoints
    cuda_graphs: bool = True  # on a GPU, launch a step at once instead of kernel by kernel
    progress: ProgressCallback = lambda step, row: None  # after every log line, with its row; on rank 0
    say: Callable[[str], None] = print  # how lines are printed; on rank 0
    ranks: Ranks = field(default_factory=Ranks)  # the processes that share the run, and which of them this is
    parallel: Parallel | None = None  # how several processes share the work; "ddp" when None
    micro_batches: int = 1  # pieces of a rank's batch, one after the other to save memory
    checkpoints: Checkpoints | None = None  # "sharded" (a file per rank) for fsdp and zero2 when None
    activation_checkpointing: bool = False  # compute blocks again in the backward pass, to save memory
    spike: float = 0.0  # end the run when the loss is this much above its median of late; 0: at NaN only

    def __post_init__(self) -> None:
        if not self.checkpoint_seconds >= 0:
            raise UserError(f"checkpoint_seconds is {self.checkpoint_seconds}, expected 0 or more.")
        if self.micro_batches < 1:
            raise UserError(f"micro_batches is {self.micro_batches}, expected at least 1.")
        if not self.spike >= 0:
            raise UserError(f"spike is {self.spike}, expected 0 (off) or more.")
        if self.checkpoints not in (None, *CHECKPOINTS):
            raise unknown_name("checkpoints", self.checkpoints, CHECKPOINTS)
        if self.parallel not in (None, *PARALLEL):
            raise unknown_name("parallel", self.parallel, PARALLEL)
        if self.ranks.distributed:
            self.parallel = self.parallel or "ddp"
        elif self.parallel is not None:
            raise UserError(
                f"parallel is {self.parallel}, which needs several processes: start them with "
                f"torchrun --nproc-per-node 2 -m statetrack.run SPEC --parallel {self.parallel} "
                "(a language model: -m statetrack.cli lm pretrain instead)."
            )
        if not self.ranks.is_first:
            self.say = lambda text: None


def resolve_device(name: str) -> torch.device:
    """ "auto" is the GPU where there is one."""
    if not isinstance(name, str):
        raise UserError(f"device is {name!r}, expected auto, cpu or cuda.")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"device is {name!r}, expected auto, cpu or cuda.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device is {name!r}, but this machine has no usable CUDA GPU. Use --device cpu.")
    return device


def check_options(spec: RunSpec, options: Options) -> torch.device:
    """The device of this rank; refuses options that the spec or the machine does not allow."""
    auto_backend()  # a wrong name in the environment
    if isinstance(spec.task, StoredTask):
        source_of(spec, torch.device("cpu"))  # refuses lengths that none of its sequences has
    device = options.ranks.device(resolve_device(options.device))
    ranks, micros = options.ranks.size, options.micro_batches
    for name in ("batch", "short_batch"):
        if (size := getattr(spec.training, name)) % (ranks * micros):
            raise UserError(
                f"training: {name} is {size}, which {ranks} processes x {micros} micro-batches do not "
                f"divide. Choose a multiple of {ranks * micros}, or other numbers of them."
            )
    if spec.training.isometry and options.activation_checkpointing:
        raise UserError(
            f"training: isometry is {spec.training.isometry}, which is not computed for activations that are "
            "computed again. Leave one of the two out."
        )
    alone = {"initial_states": "empty", "select": "last", "isometry": 0.0, "consistency": 0.0}
    for name, default in alone.items():
        value = getattr(spec.training, name)
        if value != default and (ranks > 1 or micros > 1):
            raise UserError(
                f"training: {name} is {value!r}, which is for one process without micro-batches. Start the "
                f"run in one process, or use {default!r}."
            )
    return device


def store_of(spec: RunSpec, folder: Path, options: Options) -> FileStore:
    """Checkpoints in parts where the weights are in parts, else whole ones; or what the options ask for."""
    kind = options.checkpoints
    if kind is None and options.parallel in ("fsdp", "zero2"):
        kind = "sharded" if sharded_files.is_available() else "whole"
        if kind == "whole":
            options.say(
                "Checkpoints are gathered by process 0: for one file per process install safetensors."
            )
    if kind == "sharded":
        require("safetensors", extra="lm", for_="--checkpoints sharded")
    store = ShardedStore if kind == "sharded" else FileStore
    return store(folder, spec.id, options.say, options.ranks, {"spec": json.dumps(spec.to_dict())})


def parts_of(spec: RunSpec, folder: Path, options: Options) -> Parts:
    """The parts of a spec's run: a CUDA graph or its eager twin for one process, else the sharded step."""
    device, ranks = check_options(spec, options), options.ranks
    source = source_of(spec, device)

    def step(state: TrainingState) -> Step:
        if options.parallel is None and options.micro_batches == 1:
            return GraphStep(spec, state, source, options.say, options.cuda_graphs)
        return ShardedStep(spec, state, source, ranks, options.parallel, options.micro_batches)

    def fresh(to_fill: bool = False) -> TrainingState:
        state = new_state(spec, device, functools.partial(shard, parallel=options.parallel), to_fill)
        state.model.checkpoint_activations = options.activation_checkpointing
        return state

    return Parts(
        new_state=fresh,
        step=step,
        store=store_of(spec, folder, options),
        evaluate=lambda state: evaluate(state.model, spec, device, ranks),
        steps=spec.training.steps,
        log_every=spec.training.log_every,
        eval_every=spec.evaluation.eval_every,
        select=Selection(spec) if spec.training.select == "horizon" else None,
        meter=Meter(spec, device, ranks) if spec.task.labels == "next" else None,
    )


def train(spec: RunSpec, folder: Path, options: Options, stop: threading.Event) -> Running:
    """Train to the last step, from the newest checkpoint in `folder` if any; return the last metrics.

    Yields after every step. When `stop` is set, on one rank, a checkpoint is written and Interrupted raised.
    """
    with options.ranks.together():
        parts = parts_of(spec, folder, options)
    return (yield from loop(parts, folder / "metrics.jsonl", options, stop))


def loop(parts: Parts, path: Path, options: Options, stop: threading.Event) -> Running:
    """`train`, of parts that are there already; rows of metrics go to `path`."""
    ranks = options.ranks
    rows = ranks.on_first(lambda: read_metrics(path))
    empty = functools.partial(parts.new_state, to_fill=True)
    state = parts.store.load_latest(empty, [row["step"] for row in rows])
    if state is not None:
        options.say(f"Going on from step {state.step} of {parts.steps}.")
    state = state or parts.new_state()
    log = _Log(parts, path, options, [row for row in rows if row["step"] <= state.step])
    step = parts.step(state)
    if parts.meter is not None:
        parts.meter.start(state.step)
    while state.step < parts.steps:
        with step.on_stream():
            step()
            log.after(step, stop)
        yield
    parts.store.finish(state)
    return log.rows[-1]


class _Log:
    """What happens between two steps: rows of metrics, checkpoints, the end of a run that is stopped."""

    def __init__(self, parts: Parts, path: Path, options: Options, rows: list[dict[str, Any]]):
        self.parts, self.options, self.ranks, self.rows = parts, options, options.ranks, rows
        self.file = MetricsFile(path)  # rank 0 alone writes to it
        self.ranks.on_first(lambda: self.file.begin(rows))
        self.meter, self.throughput = parts.meter, path.with_name("throughput.jsonl")
        self.guard = Guard(options.spike, parts.store.newest, self.ranks)
        self.saved_at = time.monotonic()

    def after(self, step: Step, stop: threading.Event) -> None:
        """Log, evaluate, save and stop where it is time to."""
        state, steps, every = step.state, self.parts.steps, self.parts.eval_every
        last = state.step == steps
        evaluates = last or bool(every and state.step % every == 0)
        selected = {} if self.parts.select is None else self.parts.select(state)
        if evaluates or state.step % self.parts.log_every == 0:
            row = self._take_row(step) | selected
            speed = {} if self.meter is None else self.meter.read(state.step)
            if evaluates:
                self.guard.check_weights(state)
                with self._paused():
                    row |= self.parts.evaluate(state)
            self.rows.append(row)
            self.ranks.on_first(lambda: self._write(row, speed))
        late = self.ranks.is_first and time.monotonic() - self.saved_at > self.options.checkpoint_seconds
        asked, late = self.ranks.agree(stop.is_set() and not last, late)
        if evaluates or asked or late:
            with self._paused():
                self._save(state)
        if asked:
            raise Interrupted(
                f"Stopped at step {state.step} of {steps}; the same command goes on from there."
            )

    def _save(self, state: TrainingState) -> None:
        """Write a checkpoint, of a state that the guard lets pass."""
        since = self._steps_since_row(state)
        if since:  # otherwise the loss was looked at for the row
            self.guard.check_loss(state.loss_sum.item() / since, state.step, self.rows)
        self.guard.check_weights(state)
        try:
            self.ranks.on_first(lambda: self.file.flush())
            self.parts.store.save(state, len(self.rows))
        except OSError as error:
            newest = self.parts.store.newest()
            kept = f"; the last good checkpoint is {newest}" if newest else ""
            raise OSError(
                error.errno, f"{error.strerror or error}, in the checkpoint of step {state.step}{kept}"
            ) from error
        self.saved_at = time.monotonic()

    def _steps_since_row(self, state: TrainingState) -> int:
        return state.step - (self.rows[-1]["step"] if self.rows else 0)

    def _take_row(self, step: Step) -> dict[str, Any]:
        """The mean loss since the last row, the same on every rank."""
        state = step.state
        loss = state.loss_sum.item() / self._steps_since_row(state)
        state.loss_sum.zero_()
        self.guard.check_loss(loss, state.step, self.rows)
        row = {"step": state.step, "loss": loss, "lr": step.last_rate()}
        if self.meter is not None and (norm := step.last_norm()) is not None:
            row["grad_norm"] = norm
        return row

    def _write(self, row: dict[str, Any], speed: dict[str, Any]) -> None:
        self.file.append(row)
        if speed:
            append_throughput(self.throughput, row["step"], speed)
        self.options.progress(row["step"], row | speed)

    def _paused(self) -> contextlib.AbstractContextManager[None]:
        """What happens in here does not count as training time."""
        return contextlib.nullcontext() if self.meter is None else self.meter.paused()


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event: no step is cut in half. A second Ctrl-C stops at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handler(signum, frame):
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)
