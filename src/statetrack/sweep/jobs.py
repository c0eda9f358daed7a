"""A sweep's vocabulary: what is to be run, and who is told how it goes."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from statetrack.run import read_done
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

    def tick(self) -> None:
        """Called a few times a second, so that clocks can move."""


def open_jobs(jobs: Iterable[Job]) -> tuple[list[Job], int]:
    """The jobs still to be done, each folder once, and how many are finished already."""
    unique = list({job.folder: job for job in jobs}.values())
    pending = [job for job in unique if read_done(job.folder) is None]
    return pending, len(unique) - len(pending)
