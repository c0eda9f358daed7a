"""Plugins: Python files and modules outside this package that register tasks and mixers.

    statetrack train --plugin my_task.py --task mine      a file or a module, in commands
    STATETRACK_PLUGINS=my_task.py,my_package.tasks        the same for every process of a user
    entry points in the group "statetrack.plugins"        of installed packages: a module, or a function

They are loaded the first time a name is looked up that this package does not know. A spec names classes,
never files or modules, so reading a spec imports nothing but the plugins its reader has chosen.
"""

import importlib
import importlib.util
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from statetrack.errors import UserError, unknown_name

GROUP = "statetrack.plugins"
VARIABLE = "STATETRACK_PLUGINS"
HINT = (
    f"Tasks and mixers from outside need their plugin: --plugin FILE.py (or a module), the environment "
    f"variable {VARIABLE}, or an installed package with an entry point in {GROUP!r}."
)

T = TypeVar("T")
_loaded: set[str] = set()


def find(what: str, name: object, table: Mapping[str, T]) -> T:
    """`table[name]`; when there is no such name, once more after loading the plugins."""
    if not isinstance(name, str):
        raise unknown_name(what, name, table)
    if name not in table:
        load_plugins()
    if name not in table:
        raise unknown_name(what, name, table, HINT)
    return table[name]


def use_plugins(names: Iterable[str]) -> None:
    """Load these plugins now; processes started from this one find them in the environment variable."""
    for name in map(_absolute, names):
        if re.search(_SEPARATORS, name):
            raise UserError(
                f"plugin {name!r} holds a comma or {os.pathsep!r}, which separate names in {VARIABLE}. "
                "Rename the file or its folder."
            )
        _load(name)
        known = named_plugins()
        if name not in known:
            os.environ[VARIABLE] = ",".join([*known, name])


def load_plugins() -> None:
    """Load the plugins that the environment variable names and those of installed packages, each once."""
    for name in named_plugins():
        _load(name)
    if GROUP not in _loaded:
        _loaded.add(GROUP)
        _load_entry_points()


_SEPARATORS = f"[,{re.escape(os.pathsep)}]"


def named_plugins() -> list[str]:
    """The plugins that the environment variable names: full paths of files, names of modules."""
    parts = re.split(_SEPARATORS, os.environ.get(VARIABLE, ""))
    return [_absolute(part.strip()) for part in parts if part.strip()]


def _absolute(name: str) -> str:
    """A file by its full path, so that it is one plugin from wherever it is named; a module by its name."""
    return str(Path(name).expanduser().resolve()) if name.endswith(".py") else name


def _load(name: str) -> None:
    if name in _loaded:
        return
    _loaded.add(name)  # before it is there: a plugin may look up names itself
    try:
        if name.endswith(".py"):
            _import_file(Path(name))
        else:
            importlib.import_module(name)
    except Exception as error:  # a plugin can go wrong in any way; the next attempt must say so again
        _loaded.discard(name)
        absent = isinstance(error, ModuleNotFoundError) and error.name and name.startswith(error.name)
        advice = ". Give a file that ends with .py, or a module on the Python path." if absent else ""
        raise UserError(f"plugin {name!r} cannot be loaded: {_what_happened(error)}{advice}") from error


def _import_file(path: Path) -> None:
    module_name = f"statetrack_plugin_{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None  # its name ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # where type hints of its dataclasses are looked up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise


def _load_entry_points() -> None:
    """A package that is installed but broken is passed over with a warning: it was not asked for by name."""
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP):
        try:
            found = entry.load()
            if callable(found):
                found()
        except Exception as error:
            warnings.warn(
                f"statetrack: the plugin {entry.name!r} ({entry.value}) cannot be loaded: "
                f"{_what_happened(error)}",
                stacklevel=2,
            )


def _what_happened(error: Exception) -> str:
    """The error in one line, with the line of code that raised it."""
    if isinstance(error, UserError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return text if last.filename.startswith("<frozen") else f"{text} ({last.filename}, line {last.lineno})"


__all__ = ["load_plugins", "named_plugins", "use_plugins"]
