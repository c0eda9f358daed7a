"""Weights that a run starts from instead of random ones: those of another run, known by their SHA-256."""

from hashlib import file_digest
from pathlib import Path

from statetrack.errors import UserError
from statetrack.files import DamagedFile, load_tensors
from statetrack.layers import Model

WEIGHTS = "model.safetensors"  # the final ones of a run


def initial_weights(run: str | Path) -> dict[str, str]:
    """The final weights of the finished run in a folder, or a safetensors file, as fields of a spec."""
    path = Path(run)
    path = path / WEIGHTS if path.is_dir() else path
    return {"initial": _digest(path), "initial_path": str(path)}


def load_initial(model: Model, path: Path, sha256: str) -> None:
    """Put the weights into a model of the same shapes. What does not fit is a `UserError` that names it."""
    found = _digest(path)
    if found != sha256:
        raise UserError(
            f"initial: {path} has the SHA-256 {found}, expected {sha256}: the run was set up with "
            "other weights. Put them there again, or make a new spec."
        )
    try:
        weights = load_tensors(path)[0]
    except DamagedFile as error:
        raise UserError(f"initial: {error}") from error
    expected = model.state_dict()
    for name in [*expected, *weights]:
        here, there = (tuple(x[name].shape) if name in x else "nothing" for x in (expected, weights))
        if here != there and not (model.config.tied and name == "head.weight"):
            hint = (
                " The vocabulary of the data and of the weights must be equal." if "embedding" in name else ""
            )
            raise UserError(f"initial: {name} is {there} in {path}, expected {here}.{hint}")
    model.load_state_dict(weights)


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(
            f"initial: {path} cannot be read: {error.strerror}. Expected the folder of a finished run, or "
            f"its {WEIGHTS}."
        ) from None
