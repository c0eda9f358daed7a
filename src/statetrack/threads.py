"""How OpenMP's threads wait, for every command that trains."""

import os


def sleep_when_idle() -> None:
    """Let threads at a barrier sleep soon, unless the user has said otherwise; for before torch is loaded.

    OpenMP threads spin for milliseconds at a barrier, which makes two runs on the same cores four times
    slower. A lower spin count lets them sleep sooner; it is read when torch is loaded.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
