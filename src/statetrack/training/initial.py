"""Weights that a run starts from instead of random ones: those of another run, known by their SHA-256."""

from dataclasses import replace
from hashlib import file_digest
from pathlib import Path

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.files import DamagedFile, load_tensors
from statetrack.layers import Model, ModelConfig
from statetrack.spec import RunSpec

WEIGHTS = "model.safetensors"  # the final ones of a run


def initial_weights(run: str | Path) -> dict[str, str]:
    """The final weights of the finished run in a folder, or a safetensors file, as fields of a spec."""
    if not isinstance(run, str | Path):
        raise UserError(f"initial: {run!r}, expected the folder of a finished run, or its {WEIGHTS}.")
    path = Path(run)
    path = path / WEIGHTS if path.is_dir() else path
    return {"initial": _digest(path), "initial_path": str(path.resolve())}


def starting_from(spec: RunSpec, run: str | Path) -> RunSpec:
    """The spec with the final weights of a run to start from; those that do not fit are a `UserError`."""
    found = initial_weights(run)
    path = Path(found["initial_path"])
    weights = _read(path)
    beside = path.parent / "spec.json"
    if path.name == WEIGHTS and beside.exists():
        theirs, ours = (_ranges(x.model) for x in (RunSpec.load(beside), spec))
        if theirs != ours:
            raise UserError(
                f"initial: {run} has eigenvalues in {', '.join(theirs)}, this run in {', '.join(ours)}: "
                "here its weights are another function. Choose the same --eigenvalues; `statetrack lm "
                "pretrain --extend` takes a language model from [0,1] to [-1,1]."
            )
    with torch.device("meta"):
        _check_fit(Model(spec.model, spec.task.vocab_size, spec.task.n_classes), weights, path)
    return replace(spec, **found)


def load_initial(model: Model, path: Path, sha256: str) -> None:
    """Put the weights into a model of the same shapes. What does not fit is a `UserError` that names it."""
    found = _digest(path)
    if found != sha256:
        raise UserError(
            f"initial: {path} has the SHA-256 {found}, expected {sha256}: the run was set up with "
            "other weights. Put them there again, or make a new spec."
        )
    weights = _read(path)
    _check_fit(model, weights, path)
    model.load_state_dict(weights)


def _check_fit(model: Model, weights: dict[str, Tensor], path: Path) -> None:
    """Refuse weights of other names and shapes than the model's, and a head of their own for a tied one."""
    expected = model.state_dict()
    for name in [*expected, *weights]:
        here, there = (tuple(x[name].shape) if name in x else "nothing" for x in (expected, weights))
        if here != there and not (model.config.tied and name == "head.weight"):
            words = "embedding" in name and here[1:] == there[1:]
            hint = " The vocabulary of the data and of the weights must be equal." if words else ""
            raise UserError(f"initial: {name} is {there} in {path}, expected {here}.{hint}")
    head = weights.get("head.weight")
    if model.config.tied and head is not None and not torch.equal(head, weights["embedding.weight"]):
        raise UserError(
            f"initial: {path} has a head that is not its embedding, and this model is tied. Use --no-tied."
        )


def _ranges(model: ModelConfig) -> list[str]:
    """The eigenvalue range of every mixer that has one, in their order."""
    ranges = [getattr(mixer, "eigenvalues", None) for mixer in model.mixers or (model.mixer,)]
    return [name for name in ranges if name is not None]


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_tensors(path)[0]
    except DamagedFile as error:
        raise UserError(f"initial: {error}") from error


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(
            f"initial: {path} cannot be read: {error.strerror}. Expected the folder of a finished run, or "
            f"its {WEIGHTS}."
        ) from None
