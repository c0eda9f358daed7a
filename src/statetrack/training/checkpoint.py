"""Checkpoints: everything a run needs to go on as if it had never stopped, in one safetensors file."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor, nn

from statetrack.errors import UserError
from statetrack.files import DamagedFile, load_tensors, save_tensors

KEEP = 2  # the newest, and the one before it in case the newest is damaged


@dataclass
class TrainingState:
    """What changes while training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    generator: Generator  # of the training data
    loss_sum: Tensor  # over the steps since the last line of metrics
    step: int = 0


def save_checkpoint(folder: Path, state: TrainingState, run: str, rows: int) -> Path:
    """Write checkpoint-<step>.safetensors, then drop all but the newest two.

    `run` is the id of the run, `rows` how many rows of metrics there are so far.
    """
    tensors = {f"model.{name}": p for name, p in state.model.state_dict().items()}
    for i, moments in state.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{name}": value for name, value in moments.items()}
    tensors |= {"generator": state.generator.get_state(), "loss_sum": state.loss_sum}
    path = folder / f"checkpoint-{state.step:09d}.safetensors"
    metadata = {"step": str(state.step), "device": state.loss_sum.device.type, "format": "2"}
    metadata |= {"run": run, "rows": str(rows)}
    save_tensors(path, tensors, metadata)
    # later ones could not be used, or this run would have gone on from them
    later = [p for p in checkpoints(folder) if _step_of(p) > state.step]
    for old in (*later, *checkpoints(folder)[len(later) + KEEP :]):
        old.unlink(missing_ok=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    found = [p for p in folder.glob("checkpoint-*.safetensors") if re.fullmatch(r"checkpoint-\d+", p.stem)]
    return sorted((p for p in found if p.is_file()), reverse=True)


def load_latest(
    folder: Path,
    new_state: Callable[[], TrainingState],
    run: str,
    rows: list[int],
    say: Callable[[str], None],
) -> TrainingState | None:
    """A new state brought to the newest checkpoint that is whole and of this run; None if there is none.

    Others are told and passed over. `rows` are the steps of the rows of metrics in the folder; a checkpoint
    counts on those before it.
    """
    for path in checkpoints(folder):
        state = new_state()  # one that could not be restored may be half another
        try:
            tensors, metadata = load_tensors(path)
            _check_device(path, metadata.get("device"), state)
            _check_place(path, metadata, run, rows)
            _restore(state, tensors, int(metadata["step"]))
        except (DamagedFile, KeyError, ValueError, RuntimeError) as error:
            if isinstance(error, UserError):
                raise
            missing = f"it has no {error}" if isinstance(error, KeyError) else error
            say(f"{path.name} cannot be used and is passed over: {missing}")
            continue
        return state
    return None


def _step_of(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _check_device(path: Path, device: str | None, state: TrainingState) -> None:
    """A CPU and a GPU draw different numbers from one seed, so a run must go on where it began."""
    here = state.loss_sum.device.type
    if device not in (None, here):
        raise UserError(
            f"{path} was written by a run on {device}, this one is on {here}, where training data differ. "
            f"Use --device {device}, or another --out."
        )


def _check_place(path: Path, metadata: dict[str, str], run: str, rows: list[int]) -> None:
    """A checkpoint must be what its name says, of this run, and find the metrics it left."""
    step, before = int(metadata["step"]), int(metadata["rows"])
    if step != _step_of(path):
        raise ValueError(f"it is of step {step}")
    if metadata["run"] != run:
        raise ValueError(f"it is of another run, {metadata['run']}")
    there = sum(row <= step for row in rows)
    if there != before:
        raise ValueError(f"metrics.jsonl has {there} of the {before} rows before it")


def _restore(state: TrainingState, tensors: dict[str, Tensor], step: int) -> None:
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    expected = state.model.state_dict()
    if {k: v.shape for k, v in weights.items()} != {k: v.shape for k, v in expected.items()}:
        raise ValueError("its weights are those of another model")
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".")
            moments.setdefault(int(index), {})[name] = value
    state.model.load_state_dict(weights)
    groups = state.optimizer.state_dict()["param_groups"]
    state.optimizer.load_state_dict({"state": moments, "param_groups": groups})
    state.generator.set_state(tensors["generator"])
    state.loss_sum.copy_(tensors["loss_sum"])
    state.step = step
