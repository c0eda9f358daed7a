"""Checks of the sizes and arguments that users give to layers."""

import math

from statetrack.errors import UserError


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


def check_eps(where: str, **values: float) -> None:
    """Refuse an eps of a norm that is not a number above 0."""
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise UserError(f"{where}: {name} is {value}, expected a number above 0.")
