"""Exit codes of commands: errors become one line on stderr, without a traceback for a user's mistakes.

Imports nothing heavy, so that Ctrl-C is handled while torch loads.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

from statetrack.errors import Diverged, Interrupted, UserError

# a file where a folder is expected, or the reverse, one without permission, or a name that cannot be one
PATH_MISTAKES = {
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM),
    *(errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
}


@contextlib.contextmanager
def exit_codes(quiet: bool = False) -> Iterator[None]:
    """Errors as one line on stderr: exit code 2 for a user's mistake, 130 when stopped, 1 for failures.

    `quiet` leaves the line to another process, which fails in the same way.
    """
    try:
        yield
    except UserError as error:
        _leave(quiet, 2, f"error: {error}")
    except (Interrupted, KeyboardInterrupt) as error:
        _leave(quiet, 130, str(error) or "Stopped.")
    except Diverged as error:
        _leave(quiet, 1, f"error: {error}")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader closed the pipe
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno in PATH_MISTAKES:
            _leave(quiet, 2, f"error: {error}. Choose another path.")
        _leave(quiet, 1, f"error: {error}. Files already written are whole.")
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        told = str(error).strip().partition("\n")[0]
        hint = "Choose a smaller model, batch, length or number of sequences."
        _leave(quiet, 1, f"error: out of memory{told and f' ({told})'}. {hint}")


def _is_out_of_memory(error: BaseException) -> bool:
    """PyTorch has a class of its own on a GPU, and a plain RuntimeError on a CPU."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(error)


def _leave(quiet: bool, code: int, message: str) -> None:
    if not quiet:
        print(message, file=sys.stderr)
    raise SystemExit(code)
