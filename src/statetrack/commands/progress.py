"""Progress of runs and of reading files: bars in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TextIO

from statetrack.errors import require

BAR = 16  # columns: what is written beside it has to fit a terminal of 80
Report = Callable[[int, dict[str, Any]], None]


@contextmanager
def progress_bars(runs: list[tuple[str, int]], to: TextIO | None = None) -> Iterator[Callable[[int], Report]]:
    """Yields a function that gives run i its progress callback; `runs` lists label and number of steps."""
    stream = sys.stdout if to is None else to
    if not stream.isatty():
        yield lambda i: _lines(*runs[i], stream)
        return
    rich = require("rich.progress", extra="cli", for_="live progress")
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(BAR // 2),  # labels are long
        rich.MofNCompleteColumn(),
        rich.TextColumn("loss {task.fields[loss]}"),
        rich.TimeElapsedColumn(),
    )
    with rich.Progress(*columns, console=rich.Console(file=stream)) as display:
        bars = [display.add_task(label, total=steps, loss="-", start=False) for label, steps in runs]

        def bar(i: int) -> Report:
            display.start_task(bars[i])
            return lambda step, row: display.update(bars[i], completed=step, loss=f"{row['loss']:.3f}")

        yield bar


@contextmanager
def steps_bar(steps: int, to: TextIO | None = None) -> Iterator[Report]:
    """Yields a progress callback that moves a bar with loss, steps per second and time left.

    Lines printed meanwhile stand above the bar. Only in a terminal; elsewhere nothing is shown.
    """
    stream = sys.stdout if to is None else to
    if not stream.isatty():
        yield lambda step, row: None
        return
    rich = require("rich.progress", extra="cli", for_="live progress")
    columns = (
        rich.BarColumn(BAR),
        rich.MofNCompleteColumn(),
        rich.TextColumn("loss {task.fields[loss]}"),
        rich.TextColumn("{task.fields[speed]}"),
    )
    start: tuple[int, float] | None = None  # of this process: an interrupted run does not start at 0
    with rich.Progress(*columns, console=rich.Console(file=stream)) as display:
        bar = display.add_task("", total=steps, loss="-", speed="")

        def report(step: int, row: dict[str, Any]) -> None:
            nonlocal start
            now = step, time.monotonic()
            start = now if start is None else start
            speed = _speed(start, now, steps)
            display.update(bar, completed=step, loss=f"{row['loss']:.3f}", speed=speed)

        yield report


def _speed(start: tuple[int, float], now: tuple[int, float], steps: int) -> str:
    """Steps per second between two times, and the time left at that rate."""
    rate = (now[0] - start[0]) / max(now[1] - start[1], 1e-9)
    if rate <= 0:
        return ""
    return f"{rate:.3g} steps/s, {timedelta(seconds=round((steps - now[0]) / rate))} left"


def _lines(label: str, steps: int, to: TextIO) -> Report:
    """A line every few seconds, and one at the end."""
    last, ended = time.monotonic(), False

    def report(step: int, row: dict[str, Any]) -> None:
        nonlocal last, ended
        if not ended and (step == steps or time.monotonic() - last > 5):
            last, ended = time.monotonic(), step == steps
            print(f"{label:<42} step {step:>5}/{steps}  loss {row['loss']:.4f}", file=to, flush=True)

    return report


@contextmanager
def bytes_bar(
    label: str, total: int | None, to: TextIO | None = None
) -> Iterator[Callable[[int, str], None]]:
    """Yields a function that takes the bytes read so far and a remark; `total` is None if not known."""
    stream = sys.stdout if to is None else to
    if not stream.isatty():
        yield _byte_lines(label, total, stream)
        return
    rich = require("rich.progress", extra="cli", for_="live progress")
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(BAR),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[remark]}"),
    )
    with rich.Progress(*columns, console=rich.Console(file=stream)) as display:
        bar = display.add_task(label, total=total, remark="")
        yield lambda done, remark: display.update(bar, completed=done, remark=remark)


def _byte_lines(label: str, total: int | None, to: TextIO) -> Callable[[int, str], None]:
    """A line every few seconds."""
    last = time.monotonic()

    def report(done: int, remark: str) -> None:
        nonlocal last
        if time.monotonic() - last > 5:
            last = time.monotonic()
            of = "" if total is None else f" of {total / 1e6:.0f}"
            print(f"{label}  {done / 1e6:.0f}{of} MB  {remark}", file=to, flush=True)

    return report
