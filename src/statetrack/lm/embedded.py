"""The corpus that needs no download: the running Python's standard library, as bytes."""

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from statetrack.lm.inputs import Reading, open_inputs
from statetrack.lm.tokenize import TokenizeOptions, tokenize_units
from statetrack.tasks.token_shards import INDEX

HELDOUT = 0.05  # part of the files, more than of a large corpus


def cache_folder() -> Path:
    """Where the shards are kept: one folder per version of Python, below XDG_CACHE_HOME or ~/.cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "statetrack" / f"standard-library-{platform.python_version()}"


def to_stderr(text: str) -> None:
    """Print a message where it does not mix with what a command prints, such as a spec."""
    print(text, file=sys.stderr, flush=True)


def embedded_corpus(
    folder: Path | None = None, heldout: float = HELDOUT, say: Callable[[str], None] = to_stderr
) -> Path:
    """A folder of token shards of the standard library, written at the first call."""
    folder = cache_folder() if folder is None else folder
    if not (folder / INDEX).exists():
        say(f"Tokenising the standard library of Python {platform.python_version()} into {folder}.")
        options = TokenizeOptions(heldout=heldout)
        opened = open_inputs([], Reading(), options.shard_bytes)
        tokenize_units(opened.units, folder, options, skipped=opened.skipped, say=say)
    return folder
