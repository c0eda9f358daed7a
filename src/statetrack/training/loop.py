"""The training loop: one spec in, one results folder out."""

import contextlib
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Generator as Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator

from statetrack.errors import Diverged, Interrupted, UserError
from statetrack.files import save_tensors, write_text
from statetrack.layers import Model
from statetrack.spec import RunSpec
from statetrack.training.checkpoint import TrainingState, checkpoints, load_latest, save_checkpoint
from statetrack.training.evaluation import evaluate
from statetrack.training.optimizer import learning_rate, make_optimizer
from statetrack.training.step import TrainingStep

ProgressCallback = Callable[[int, dict[str, Any]], None]
# What carries out a run step by step: it yields after each, so that several can take turns on one GPU.
Running = Coroutine[None, None, dict[str, Any]]


@dataclass
class Options:
    """How a run is carried out. Nothing here changes its metrics, but for rounding."""

    device: str = "auto"
    checkpoint_seconds: float = 20.0
    cuda_graphs: bool = True  # on a GPU, launch a step at once instead of kernel by kernel
    progress: ProgressCallback = lambda step, row: None  # after every log line, with its row
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        if not self.checkpoint_seconds >= 0:
            raise UserError(f"checkpoint_seconds is {self.checkpoint_seconds}, expected 0 or more.")


def resolve_device(name: str) -> torch.device:
    """ "auto" is the GPU where there is one."""
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


def build_model(spec: RunSpec) -> Model:
    """The spec's model with its initial weights, which depend on the seed and on nothing else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return Model(spec.model, spec.task.vocab_size, spec.task.n_classes)


def new_state(spec: RunSpec, device: torch.device) -> TrainingState:
    """The state before the first step."""
    model = build_model(spec).to(device)
    return TrainingState(
        model,
        make_optimizer(model, spec.training),
        # a stream of its own, so that data do not depend on how many numbers the initial weights took
        Generator(device).manual_seed(spec.seed * 2_654_435_761 % 2**63 + 1),
        torch.zeros((), device=device, dtype=torch.float64),
    )


def train(spec: RunSpec, folder: Path, options: Options, stop: threading.Event) -> Running:
    """Train to the last step, from the newest checkpoint in `folder` if any; return the last metrics.

    Yields after every step. When `stop` is set, a checkpoint is written and Interrupted raised.
    """
    device, path = resolve_device(options.device), folder / "metrics.jsonl"
    fresh = functools.partial(new_state, spec, device)
    rows = read_metrics(path)
    state = load_latest(folder, fresh, spec.id, [row["step"] for row in rows], options.say)
    if state is not None:
        options.say(f"Going on from step {state.step} of {spec.training.steps}.")
    elif checkpoints(folder):
        options.say("No checkpoint can be used: starting from step 0.")
    state = state or fresh()
    metrics = MetricsFile(path, [row for row in rows if row["step"] <= state.step])
    step = TrainingStep(spec, state, options.say, options.cuda_graphs)
    saved_at = time.monotonic()
    while state.step < spec.training.steps:
        with step.on_stream():
            step()
            saved_at = _after_step(spec, folder, options, state, metrics, stop, saved_at)
        yield
    save_tensors(folder / "model.safetensors", state.model.state_dict(), {"spec": json.dumps(spec.to_dict())})
    return metrics.rows[-1]


def _after_step(spec: RunSpec, folder: Path, options: Options, state: TrainingState, metrics, stop, saved_at):
    """Log, evaluate, save and stop where it is time to; returns when the last checkpoint was written."""
    steps, every = spec.training.steps, spec.evaluation.eval_every
    last = state.step == steps
    evaluates = last or (every and state.step % every == 0)
    if evaluates or state.step % spec.training.log_every == 0:
        row = _take_row(spec, state, metrics)
        if evaluates:
            row |= evaluate(state.model, spec, state.loss_sum.device)  # type: ignore[arg-type]
        metrics.append(row)
        options.progress(state.step, row)
    asked = stop.is_set() and not last
    if evaluates or asked or time.monotonic() - saved_at > options.checkpoint_seconds:
        metrics.flush()
        save_checkpoint(folder, state, spec.id, len(metrics.rows))
        saved_at = time.monotonic()
    if asked:
        raise Interrupted(f"Stopped at step {state.step} of {steps}; the same command goes on from there.")
    return saved_at


def _take_row(spec: RunSpec, state: TrainingState, metrics: "MetricsFile") -> dict[str, Any]:
    """The mean loss since the last row. Rows hold no times, so a resumed run writes the same bytes."""
    since = state.step - (metrics.rows[-1]["step"] if metrics.rows else 0)
    loss = state.loss_sum.item() / since
    state.loss_sum.zero_()
    if loss != loss or loss in (float("inf"), float("-inf")):
        raise Diverged(f"The loss is {loss} at step {state.step}. Try a smaller --lr.")
    return {"step": state.step, "loss": loss, "lr": learning_rate(state.step - 1, spec.training)}


class MetricsFile:
    """metrics.jsonl: one row per line. It begins with `rows`, and loses all others."""

    def __init__(self, path: Path, rows: list[dict[str, Any]]):
        self.path, self.rows = path, rows
        write_text(path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def append(self, row: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)

    def flush(self) -> None:
        """Have the rows on the disk: a checkpoint counts on them."""
        with open(self.path, "a") as file:
            os.fsync(file.fileno())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole rows of metrics.jsonl; a line cut off by a kill ends the reading."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                break
            rows.append(row)
    return rows


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
