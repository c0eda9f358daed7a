"""Random bracketed expressions with their values, for many at once and without a look at what was drawn."""

from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import no_triton, pick_backend

BACKENDS = {
    "reference": "statetrack.ops.bracket_expressions.reference:bracket_expressions_reference",
    "triton": "statetrack.ops.bracket_expressions.triton.backend:bracket_expressions_triton",
}


def bracket_expressions(
    sizes: Tensor, digits: Tensor, operators: Tensor, splits: Tensor, modulus: int, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Tokens (B, T) and values (B,) of expressions of `sizes` (B,) tokens, expanded by given random numbers.

    Grammar, tokens and shapes: `bracket_expressions_reference`. The same operations whatever is drawn, so a
    CUDA graph can hold them.
    """
    checks.require_tensors(
        "bracket_expressions", sizes=sizes, digits=digits, operators=operators, splits=splits
    )
    if (
        digits.ndim != 2
        or not digits.shape == operators.shape == splits.shape
        or sizes.shape != digits.shape[:1]
    ):
        raise UserError(
            f"bracket_expressions: sizes {tuple(sizes.shape)}, digits {tuple(digits.shape)}, operators "
            f"{tuple(operators.shape)} and splits {tuple(splits.shape)}, expected (B,) and three of (B, T)."
        )
    refusals = {"triton": lambda: no_triton(digits)}
    run = pick_backend("bracket_expressions", backend, digits.device, BACKENDS, refusals)
    return run(sizes, digits, operators, splits, modulus)


__all__ = ["bracket_expressions"]
