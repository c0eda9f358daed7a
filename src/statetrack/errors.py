"""Errors: the exceptions of the library, and messages that several modules share."""

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class UserError(ValueError):
    """A wrong input. The command line prints its message and exits with code 2, without a traceback."""


class Interrupted(Exception):
    """The user asked a run to stop; a checkpoint has been written."""


class Diverged(Exception):
    """The loss of a run became infinite or NaN."""


def unknown_name(what: str, name: object, known: Iterable[str], advice: str = "") -> UserError:
    """The error for a name that does not exist, with the nearest one that does, and what else to try."""
    known = sorted(known)
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return UserError(f"{what} {name!r} is not known.{hint} Known: {', '.join(known)}. {advice}".rstrip())


def require(module: str, *, extra: str, for_: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise  # the module is installed but fails to import: show that error
        raise UserError(
            f"statetrack[{extra}] is not installed, and {for_} needs it: pip install 'statetrack[{extra}]'"
        ) from error
