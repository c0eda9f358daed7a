"""Checks of the sizes and arguments that users give to layers."""

from typing import Any

from statetrack.errors import UserError
from statetrack.layers.mixer import Packing


def divide(where: str, total: int, parts: int, what: str) -> int:
    """total / parts, or an error that says which sizes do not fit."""
    if parts < 1 or total % parts:
        raise UserError(f"{where}: {what} = {parts} does not divide {total}. Choose a divisor of {total}.")
    return total // parts


def check_sizes(where: str, minimum: int = 1, **sizes: int | None) -> None:
    """Refuse widths and counts below `minimum`; None means the default and passes."""
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < minimum):
            raise UserError(f"{where}: {name} is {size!r}, expected a whole number of at least {minimum}.")


def check_no_state(where: str, state: Any, packing: Packing | None) -> None:
    """Refuse an initial state together with packed sequences, each of which starts from an empty state."""
    if state is not None and packing is not None:
        raise UserError(
            f"{where}: packed sequences start from an empty state, so no state can come with a packing. "
            "Call it without the packing to continue from a state."
        )
