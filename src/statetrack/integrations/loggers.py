"""Rows of metrics to TensorBoard or Weights & Biases while a run goes on (extras `tensorboard`, `wandb`).

The files of the run (metrics.jsonl, throughput.jsonl) are written in any case.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from statetrack.errors import require
from statetrack.spec import RunSpec
from statetrack.training.loop import ProgressCallback

Logger = Literal["tensorboard", "wandb"]

__all__ = ["logging_to"]


def logging_to(
    kind: Logger | None, folder: Path, spec: RunSpec
) -> contextlib.AbstractContextManager[ProgressCallback]:
    """A progress callback that writes every number of a row; None writes nothing.

        with logging_to("tensorboard", folder, spec) as log:
            run(spec, folder, Options(progress=log))

    tensorboard: event files in `folder`/tensorboard, for `tensorboard --logdir results`.
    wandb: a run named by the spec's id in the project that WANDB_PROJECT names, "statetrack" otherwise.
    """
    if kind is None:
        return contextlib.nullcontext(lambda step, row: None)
    return _tensorboard(folder) if kind == "tensorboard" else _wandb(folder, spec)


@contextlib.contextmanager
def _tensorboard(folder: Path) -> Iterator[ProgressCallback]:
    require("tensorboard", extra="tensorboard", for_="--log tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writers: list[SummaryWriter] = []

    def log(step: int, row: dict[str, Any]) -> None:
        if not writers:  # now: what a stopped run wrote from this step on is done again
            writers.append(SummaryWriter(str(folder / "tensorboard"), purge_step=step))
        for name, value in numbers(row):
            writers[0].add_scalar(name, value, step)
        writers[0].flush()

    try:
        yield log
    finally:
        for writer in writers:
            writer.close()


@contextlib.contextmanager
def _wandb(folder: Path, spec: RunSpec) -> Iterator[ProgressCallback]:
    import os

    wandb = require("wandb", extra="wandb", for_="--log wandb")
    folder.mkdir(parents=True, exist_ok=True)
    project = os.environ.get("WANDB_PROJECT", "statetrack")
    entry = wandb.init(project=project, id=spec.id, resume="allow", config=spec.to_dict(), dir=str(folder))
    try:
        yield lambda step, row: entry.log(dict(numbers(row)), step=step)
    finally:
        entry.finish()


def numbers(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row by name, nested ones as "perplexity/2048"; the step is not one of them."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield prefix + name, float(value)
