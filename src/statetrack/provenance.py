"""Which code carried out a run, and on which processor, as far as it can be told."""

import contextlib
import os
import platform
import subprocess
from functools import lru_cache
from pathlib import Path

from statetrack import __version__

ROOT = Path(__file__).resolve().parents[2]  # the repository, where this package is used from one
SECONDS = 2.0  # git may take on a slow file system; a result is not worth waiting longer for this


@lru_cache(maxsize=8)
def commit(root: Path = ROOT) -> str:
    """The commit of the checkout at `root`, with "+changes" if src differs from it.

    The version of the package where it is installed without its repository, or git does not answer.
    """
    if not (root / ".git").exists():
        return f"version {__version__}"
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changes = _git(root, "status", "--porcelain", "--", "src")
    except (OSError, subprocess.SubprocessError):
        return f"version {__version__}"
    return head + ("+changes" if changes else "")


def _git(root: Path, *arguments: str) -> str:
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # look, and leave the index as it is
    answer = subprocess.run(
        ["git", "-C", str(root), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
    )
    return answer.stdout.strip()


def processor() -> str:
    """The name of the processor, if the system reports it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
