"""A walk through a table: the state of an automaton after each of its letters, for many words at once."""

from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops.backends import no_triton, pick_backend


def _reference():
    from statetrack.ops.walk.reference import walk_reference

    return walk_reference


def _triton():
    from statetrack.ops.walk.triton_backend import walk_triton

    return walk_triton


BACKENDS = {"reference": _reference, "triton": _triton}


def _triton_refuses(letters: Tensor) -> str | None:
    """Why the Triton kernel cannot take these inputs, or None."""
    return no_triton(letters) or ("there are no letters" if letters.numel() == 0 else None)


def walk(table: Tensor, letters: Tensor, start: int, *, backend: str = "auto") -> Tensor:
    """The states (B, T) after each of the letters (B, T), from the state `start`. See `walk_reference`."""
    if table.ndim != 2 or letters.ndim != 2:
        raise UserError(
            f"walk: table has shape {tuple(table.shape)} and letters {tuple(letters.shape)}, expected "
            "(letters, states) and (words, time)."
        )
    run = pick_backend(
        "walk", backend, letters.device, BACKENDS, {"triton": lambda: _triton_refuses(letters)}
    )
    return run(table, letters, start)


__all__ = ["walk"]
