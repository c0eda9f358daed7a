"""Runs of a finite automaton: its state after each letter, for many words at once."""

from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import no_triton, pick_backend

BACKENDS = {
    "reference": "statetrack.ops.automaton_run.reference:run_automaton_reference",
    "triton": "statetrack.ops.automaton_run.triton.backend:run_automaton_triton",
}


def _triton_refuses(letters: Tensor) -> str | None:
    """Why the Triton kernel cannot take these inputs, or None."""
    return no_triton(letters) or ("there are no letters" if letters.numel() == 0 else None)


def run_automaton(table: Tensor, letters: Tensor, start: int, *, backend: str = "auto") -> Tensor:
    """Run a finite automaton on many words: s_t = table[x_t, s_{t-1}], s_0 = start.

    Shapes: table (letters, states), the next state for each letter and state; letters x and the result s
    (words, time). All are integers.
    """
    checks.require_tensors("run_automaton", table=table, letters=letters)
    if table.ndim != 2 or letters.ndim != 2:
        raise UserError(
            f"run_automaton: table has shape {tuple(table.shape)} and letters {tuple(letters.shape)}, "
            "expected (letters, states) and (words, time)."
        )
    run = pick_backend(
        "run_automaton", backend, letters.device, BACKENDS, {"triton": lambda: _triton_refuses(letters)}
    )
    return run(table, letters, start)


__all__ = ["run_automaton"]
