"""A finished run in [0,1] as the start of one in [-1,1]; see `statetrack.layers.ranges` for what changes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from statetrack.errors import UserError
from statetrack.files import save_tensors
from statetrack.layers.presets import with_mixer_options
from statetrack.layers.ranges import extended_range
from statetrack.run import RESULTS, load_run
from statetrack.spec import RunSpec
from statetrack.tasks import Corpus
from statetrack.tasks.token_shards import TRAIN
from statetrack.training.initial import initial_weights

TOKENS = 8192  # of the training data, on which the function is kept

__all__ = ["extended_spec"]


def extended_spec(
    spec: RunSpec, run: Path, keep: Literal["weights", "function"] = "weights", results: Path = RESULTS
) -> RunSpec:
    """`spec`, that of the finished run in the folder `run` or one on other data, with the range [-1,1] and
    that run's weights to start from.

    With "function", weights that compute nearly the same are written below `results`/extended and taken.
    """
    mixers = spec.model.mixers or (spec.model.mixer,)
    ranges = {getattr(mixer, "eigenvalues", None) for mixer in mixers}
    if "[0,1]" not in ranges:
        raise UserError(
            f"--extend: {run} has the range {ranges.pop() or 'of no recurrence'}, expected [0,1]."
        )
    model = with_mixer_options("--extend", spec.model, {"eigenvalues": "[-1,1]"})
    weights = initial_weights(run)
    if keep == "function":
        weights = initial_weights(_refitted(spec, run, weights["initial"], results / "extended"))
    return replace(spec, model=model, **weights)


def _refitted(spec: RunSpec, run: Path, source: str, folder: Path) -> Path:
    """The file with the weights; made once for a run and its data, since they are named by content."""
    assert isinstance(spec.task, Corpus)
    path = folder / f"{source[:12]}-{spec.task.sha256[:12]}.safetensors"
    if not path.exists():
        shards, context = spec.task.shards, spec.task.context
        rows = max(1, min(TOKENS, shards.tokens(TRAIN)) // context)
        length = min(context, shards.tokens(TRAIN))
        tokens = shards.read(TRAIN, 0, rows * length).astype(np.int64).reshape(rows, length)
        _, model = load_run(run)
        extended = extended_range(model, "function", torch.from_numpy(tokens))
        save_tensors(path, extended.state_dict(), {"extended": json.dumps({"from": source})})
    return path
