"""Errors: the exceptions of the library, and messages that several modules share."""

import difflib
import importlib
import re
from collections.abc import Iterable
from types import ModuleType


class UserError(ValueError):
    """A wrong input. The command line prints its message and exits with code 2, without a traceback."""


class RunningElsewhere(UserError):
    """The folder of a run is locked by another process, which carries it out."""


class Interrupted(Exception):
    """The user asked a run to stop; a checkpoint has been written."""


class Diverged(Exception):
    """The loss of a run became infinite or NaN."""


_SIZE = re.compile(r"-\d+(\.\d+)?[mb]$")  # deltanet-60m, deltanet-1.3b: too many to list


def unknown_name(what: str, name: object, known: Iterable[str], advice: str = "") -> UserError:
    """The error for a name that does not exist, with the nearest one that does, and what else to try."""
    known = sorted(known)
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    names = [name for name in known if not _SIZE.search(name)]
    if len(names) < len(known):
        names.append(f"and sizes such as {next(filter(_SIZE.search, known))}")
    return UserError(f"{what} {name!r} is not known.{hint} Known: {', '.join(names)}. {advice}".rstrip())


def require(module: str, *, extra: str, for_: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise  # the module is installed but fails to import: show that error
        raise UserError(
            f"{for_} needs {module.split('.')[0]}, which is not installed: {_how_to_install(extra)}"
        ) from error


def _how_to_install(extra: str) -> str:
    """The command that installs the packages of an extra: the package itself is in no index."""
    packages = _packages_of(extra)
    if not packages:
        return f"in the folder of the sources, pip install -c constraints.txt '.[{extra}]'"
    return "pip install " + " ".join(f"'{package}'" for package in packages)


def _packages_of(extra: str) -> list[str]:
    """What the extra asks for, as the installed package lists it; nothing where it is not installed."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        listed = requires("statetrack") or []
    except PackageNotFoundError:
        return []
    packages = []
    for package, _, condition in (line.partition(";") for line in listed):
        if f'extra == "{extra}"' not in condition.replace("'", '"'):
            continue
        package = package.strip()
        if package.startswith("statetrack["):  # an extra made of others
            for name in package.removeprefix("statetrack[").rstrip("]").split(","):
                packages += _packages_of(name)
        else:
            packages.append(package)
    return packages
