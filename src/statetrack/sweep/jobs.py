"""A sweep's vocabulary: what is to be run, and who is told how it goes."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from statetrack.files import write_json
from statetrack.run_folder import DIVERGED, read_done
from statetrack.spec import RunSpec


@dataclass(frozen=True)
class Job:
    """One run of a sweep. Its log lies beside its results."""

    label: str
    spec: RunSpec
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "run.log"


@dataclass(frozen=True)
class Failure:
    """A run that did not finish: what it was, why, and where to read more."""

    job: Job
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.job.label} failed: {self.reason}\n"
            f"  spec {self.job.folder / 'spec.json'}\n  log  {self.job.log}"
        )


class Monitor:
    """Told of every step of a sweep; this one keeps silent."""

    def begun(self, total: int, finished_before: int, workers: int) -> None:
        pass

    def started(self, job: Job) -> None:
        pass

    def progress(self, job: Job, step: int) -> None:
        pass

    def finished(self, job: Job, seconds: float) -> None:
        pass

    def failed(self, failure: Failure) -> None:
        pass

    def elsewhere(self, job: Job) -> None:
        """The run is carried out by another process: neither finished nor failed."""

    def tick(self) -> None:
        """Called a few times a second, so that clocks can move."""


def open_jobs(jobs: Iterable[Job]) -> tuple[list[Job], list[Failure], int]:
    """The jobs still to be done, each folder once; those that diverged before; how many are finished.

    A run that diverged is not repeated: from the same checkpoint it would diverge again.
    """
    unique = list({job.folder: job for job in jobs}.values())
    unfinished = [job for job in unique if read_done(job.folder, job.spec.id) is None]
    diverged = [Failure(job, reason) for job in unfinished if (reason := _read_diverged(job))]
    pending = [job for job in unfinished if not (job.folder / DIVERGED).exists()]
    return pending, diverged, len(unique) - len(unfinished)


def write_diverged(folder: Path, reason: str) -> None:
    """Note that the run in this folder diverged, for later sweeps."""
    write_json(folder / DIVERGED, {"reason": reason})


def _read_diverged(job: Job) -> str | None:
    """Why a job is not repeated, or None."""
    path = job.folder / DIVERGED
    if not path.exists():
        return None
    try:
        reason = str(json.loads(path.read_text())["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        reason = "the loss became infinite or NaN"
    return f"{reason} It is not repeated; delete {path} to try again."
