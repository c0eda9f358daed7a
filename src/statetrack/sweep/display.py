"""What one sees of a sweep: a live table in a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from statetrack.errors import require
from statetrack.sweep.jobs import Failure, Job, Monitor


@dataclass
class _Running:
    job: Job
    since: float
    step: int = 0
    first: int | None = None  # the step of the first message: a resumed run does not begin at 0
    first_at: float = 0.0
    last_at: float = 0.0

    @property
    def speed(self) -> float | None:
        """Steps per second, once two messages have come."""
        if self.first is None or self.step == self.first:
            return None
        return (self.step - self.first) / (self.last_at - self.first_at)


@dataclass
class Tally(Monitor):
    """Counts, speeds, and the time left as far as one can tell."""

    jobs: list[Job]
    running: dict[str, _Running] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)  # steps per second by label without the seed
    total: int = 0
    done: int = 0
    failures: int = 0
    left_to_others: int = 0
    workers: int = 1
    over: set[str] = field(default_factory=set)

    def begun(self, total: int, finished_before: int, workers: int) -> None:
        self.total, self.done, self.workers = total, finished_before, max(1, workers)

    def started(self, job: Job) -> None:
        self.running[str(job.folder)] = _Running(job, time.monotonic())

    def progress(self, job: Job, step: int) -> None:
        entry, now = self.running[str(job.folder)], time.monotonic()
        if entry.first is None:
            entry.first, entry.first_at = step, now
        entry.step, entry.last_at = step, now
        if entry.speed:
            self.speeds[_kind(job)] = entry.speed

    def finished(self, job: Job, seconds: float) -> None:
        self.running.pop(str(job.folder), None)
        self.over.add(str(job.folder))
        self.done += 1
        if seconds > 0:  # Ray tells nothing before a run is over
            self.speeds.setdefault(_kind(job), job.spec.training.steps / seconds)

    def failed(self, failure: Failure) -> None:
        self.running.pop(str(failure.job.folder), None)
        self.over.add(str(failure.job.folder))
        self.failures += 1

    def elsewhere(self, job: Job) -> None:
        self.running.pop(str(job.folder), None)
        self.over.add(str(job.folder))
        self.left_to_others += 1

    def seconds_left(self, waiting: list[Job]) -> float | None:
        """Steps to go over the speeds seen so far; None before there is one."""
        if not self.speeds:
            return None
        mean = len(self.speeds) / sum(1 / speed for speed in self.speeds.values())
        left = 0.0
        for job in waiting:
            entry = self.running.get(str(job.folder))
            left += (job.spec.training.steps - (entry.step if entry else 0)) / self.speeds.get(
                _kind(job), mean
            )
        return left / self.workers

    def line(self) -> str:
        waiting = [job for job in self.jobs if str(job.folder) not in self.over]
        speed = sum(entry.speed or 0 for entry in self.running.values())
        parts = [f"{self.done} of {self.total} runs done", f"{len(self.running)} running"]
        parts += [f"{self.failures} failed"] if self.failures else []
        parts += [f"{self.left_to_others} running elsewhere"] if self.left_to_others else []
        parts += [f"{speed:.1f} steps/s"] if speed else []
        left = self.seconds_left(waiting)
        parts += [f"about {duration(left)} left"] if left is not None and waiting else []
        return ", ".join(parts)


class Lines(Tally):
    """One line per finished run, and a summary of the sweep at most every `every` seconds."""

    every = 20.0
    said = 0.0

    def finished(self, job: Job, seconds: float) -> None:
        super().finished(job, seconds)
        print(f"[{self.done}/{self.total}] {job.label}: {seconds:.0f} s", flush=True)

    def failed(self, failure: Failure) -> None:
        super().failed(failure)
        print(failure, flush=True)

    def elsewhere(self, job: Job) -> None:
        super().elsewhere(job)
        print(f"{job.label}: running elsewhere, in another process", flush=True)

    def tick(self) -> None:
        if time.monotonic() - self.said > self.every:
            self.said = time.monotonic()
            print(self.line(), flush=True)


class Table(Tally):
    """A table that redraws itself: one row per running run."""

    live = None

    def failed(self, failure: Failure) -> None:
        super().failed(failure)
        if self.live is not None:
            self.live.console.print(str(failure), markup=False, highlight=False)

    def tick(self) -> None:
        if self.live is not None:
            self.live.update(self.render())

    def render(self):
        rich = require("rich.table", extra="cli", for_="the live table")
        table = rich.Table(title=self.line(), title_justify="left", box=None)
        for name in ("running", "step", "of", "steps/s", "left"):
            table.add_column(name, justify="left" if name == "running" else "right")
        for entry in self.running.values():
            steps, speed = entry.job.spec.training.steps, entry.speed
            left = duration((steps - entry.step) / speed) if speed else "-"
            name = entry.job.label.replace("[", "\\[")  # rich reads [ as markup
            table.add_row(name, f"{entry.step}", f"{steps}", f"{speed:.1f}" if speed else "-", left)
        return table


@contextlib.contextmanager
def display(jobs: list[Job]) -> Iterator[Monitor]:
    """The monitor that suits the output."""
    if not sys.stdout.isatty():
        yield Lines(jobs)
        return
    live = require("rich.live", extra="cli", for_="the live table")
    table = Table(jobs)
    with live.Live(table.render(), refresh_per_second=4, transient=True) as table.live:
        yield table


def duration(seconds: float) -> str:
    """ "40 s", "12 min", "3.5 h" """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _kind(job: Job) -> str:
    return job.label.split(", lr ")[0]
