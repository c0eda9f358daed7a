"""Carry out the runs of tables and figures: what matters most first, for as long as is asked.

    python -m statetrack.reproduce all --scale paper --minutes 10 --runs-per-gpu 6 --with-results docs/results

needs torch and numpy only. It writes results and no pages; `statetrack report` draws those from the same
folder, and `statetrack reproduce` does both. The order is in `statetrack.experiments.order`.
"""

from statetrack.threads import sleep_when_idle

if __name__ == "__main__":
    sleep_when_idle()  # before torch is loaded

import argparse
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from statetrack.errors import UserError
from statetrack.exit_codes import exit_codes
from statetrack.experiments.item import SCALES, Item, LabelledRun, Scale
from statetrack.experiments.order import STAGES, Order, Scored
from statetrack.experiments.registry import BY_IMPORTANCE, ITEMS, item
from statetrack.plugins import use_plugins
from statetrack.report.coverage import counts, missing
from statetrack.report.results import ItemResults, Result, merge, read_index, read_kept, write_index
from statetrack.run_folder import read_done
from statetrack.sweep import Failure, Job, sweep
from statetrack.sweep.display import display, duration
from statetrack.sweep.jobs import open_jobs
from statetrack.training.loop import resolve_device
from statetrack.training.store import checkpoints

__all__ = ["Outcome", "Part", "ReproduceOptions", "reproduce"]

EVERYTHING = "all"


@dataclass(frozen=True)
class ReproduceOptions:
    """Reproduce NAME: `statetrack reproduce NAME --scale quick`; --list shows every name; "all" is all.

    What matters most runs first. Runs that are finished are not run again; after Ctrl-C, or when the minutes
    are up, the same command continues, here or wherever the folder is copied to.
    --plugin FILE.py, or a module, is loaded here and by every worker process.
    """

    scale: Scale = "quick"  # smoke: seconds; quick: minutes; paper: the exact protocol
    workers: int = 1  # processes on this machine
    runs_per_gpu: int = 1  # runs that each process interleaves on its GPU
    minutes: float | None = None  # write checkpoints and stop after this time
    out: Path = Path("results/reproduce")  # folder for the runs and the reports
    with_results: Path | None = None  # runs kept in this folder's runs.jsonl files count as finished
    only: str = ""  # only runs whose name contains all of these words, e.g. "parity mamba 'lr 0.001'"
    seeds: int | None = None  # overrides the number of the scale
    device: str = "auto"  # auto, cpu or cuda
    ray: str | None = None  # address of a Ray cluster ("auto", "host:port") to run on instead of here
    gpus_per_run: float | None = None  # on Ray: a fraction shares one GPU among runs
    list: bool = False  # list the items and stop

    @property
    def runs_folder(self) -> Path:
        return self.out / "runs"


@dataclass(frozen=True)
class Part:
    """An item of this call: the runs asked for, the item's folder, and results kept in another one."""

    item: Item
    scale: Scale
    runs: list[LabelledRun]
    folder: Path
    kept: list[Result]

    def results(self) -> ItemResults:
        """What is known now."""
        kept = ItemResults(self.item, self.scale, self.kept)
        return merge([read_index(self.folder), kept])


@dataclass(frozen=True)
class Outcome:
    """What a call of `reproduce` came to: its items, with their results, and the runs that failed."""

    parts: list[Part]
    failures: list[Failure] = field(default_factory=list)

    def exit_if_failed(self) -> None:
        """List the runs that failed, if any, and end the process with code 1."""
        if self.failures:
            total = len({run.id for part in self.parts for run in part.runs})
            print(f"\n{len(self.failures)} of {total} runs failed:", *self.failures, sep="\n")
            raise SystemExit(1)


def reproduce(name: str, options: ReproduceOptions) -> Outcome:
    """Carry out the pending runs of the item `name`, or of "all"; print coverage before and after.

        reproduce("tab-chomsky", ReproduceOptions(scale="paper", minutes=10, runs_per_gpu=6))

    Results go to options.out/ITEM/SCALE/runs.json, which lists the runs, and options.out/runs/<run_id>.
    """
    started = time.monotonic()
    check_options(options)
    parts = _parts(name, options)
    jobs, ordering = _jobs(parts, options)
    for part in parts:
        print(f"{part.item.what}, {part.scale} scale. Results go to {part.folder}.")
    print_coverage(parts)
    pending = ordering.begin(open_jobs(jobs)[0])
    print(ordering.plan(pending), flush=True)
    try:
        failures = _carry_out(jobs, ordering, options, started)
    finally:  # another call on this folder, with other words in `only`, may have listed its own runs since
        for part in parts:
            write_index(part.folder, part.item, part.scale, part.runs, options.runs_folder)
    left = open_jobs(jobs)[0]
    if left and options.minutes is not None:
        begun = sum(bool(checkpoints(job.folder)) for job in left)
        print(
            f"\nAfter {duration(time.monotonic() - started)}: {len(pending) - len(left)} runs finished, "
            f"{begun} more have a checkpoint, {len(left) - begun} are to begin. The same command goes on."
        )
    print_coverage(parts)
    return Outcome(parts, failures)


def check_options(options: ReproduceOptions) -> None:
    """Refuse what cannot be carried out, before anything is written."""
    counted = {name: getattr(options, name) for name in ("workers", "runs_per_gpu", "seeds")}
    for name, value in counted.items():
        if value is not None and value < 1:
            raise UserError(f"reproduce: {name} is {value}, expected at least 1.")
    if options.minutes is not None and not options.minutes > 0:
        raise UserError(f"reproduce: minutes is {options.minutes:g}, expected more than 0.")
    if options.gpus_per_run is not None:
        if not options.gpus_per_run >= 0:
            raise UserError(f"reproduce: gpus_per_run is {options.gpus_per_run}, expected 0 or more.")
        if options.ray is None:
            raise UserError("reproduce: --gpus-per-run is for --ray. On this machine --runs-per-gpu does it.")
    if options.ray is not None and options.minutes is not None:
        raise UserError(
            "reproduce: --minutes is for runs on this machine, not for --ray. Leave it out; Ctrl-C stops."
        )
    if options.with_results is not None and not options.with_results.is_dir():
        raise UserError(f"reproduce: --with-results {options.with_results} is not a folder.")
    if options.ray is None:
        resolve_device(options.device)


def _parts(name: str, options: ReproduceOptions) -> list[Part]:
    """The items with the runs that --only selects, their indexes written."""
    items = list(BY_IMPORTANCE) if name == EVERYTHING else [item(name)]
    everything = {of.name: of.runs(options.scale, options.seeds) for of in items}
    selected = {of: [run for run in runs if _matches(run, options.only)] for of, runs in everything.items()}
    if not any(selected.values()):
        labels = sorted({f"{run.panel}: {run.label}" for runs in everything.values() for run in runs})
        raise UserError(f"reproduce: --only {options.only!r} matches no run. There are: {'; '.join(labels)}.")
    parts = []
    for of in items:
        if selected[of.name]:
            folder = options.out / of.name / options.scale
            runs = write_index(folder, of, options.scale, selected[of.name], options.runs_folder)
            kept = [] if options.with_results is None else read_kept(options.with_results, of, options.scale)
            parts.append(Part(of, options.scale, runs, folder, kept))
    return parts


def _matches(run: LabelledRun, only: str) -> bool:
    """Whether the run's full name contains every word or quoted phrase of `only`."""
    try:
        return all(word in name_of(run).lower() for word in shlex.split(only.lower()))
    except ValueError as error:
        raise UserError(f"reproduce: --only {only!r} cannot be read: {error}.") from error


def name_of(run: LabelledRun) -> str:
    """ "Parity: Mamba [0,1], lr 0.001, seed 2" """
    return f"{run.panel}: {run.label}, lr {run.spec.training.lr:g}, seed {run.spec.seed}"


def _jobs(parts: Sequence[Part], options: ReproduceOptions) -> tuple[list[Job], "_Ordering"]:
    """A job for every run that is not kept in a file, and what sorts them."""
    jobs: dict[Path, tuple[Job, Part, LabelledRun]] = {}
    known: list[tuple[Part, list[Scored]]] = []
    for part in parts:
        finished = part.results().finished
        known.append((part, [Scored(result.run, result.score()) for result in finished]))
        kept = {result.run.spec for result in finished if result.folder is None}
        for run in part.runs:
            folder = options.runs_folder / run.id
            if run.spec not in kept:
                jobs[folder] = Job(name_of(run), run.spec, folder), part, run
    return [job for job, _, _ in jobs.values()], _Ordering(known, jobs)


class _Ordering:
    """Sorts jobs that wait by importance, on the results there are at the time."""

    def __init__(
        self, known: list[tuple[Part, list[Scored]]], jobs: dict[Path, tuple[Job, Part, LabelledRun]]
    ):
        self.jobs = jobs
        self.places = {part.item.name: place for place, (part, _) in enumerate(known)}
        self.orders = {part.item.name: Order(part.item, part.item.runs(part.scale)) for part, _ in known}
        self.finished = {part.item.name: scored for part, scored in known}
        self.unscored: set[Path] = set()

    def begin(self, pending: list[Job]) -> list[Job]:
        """The jobs that are to be done; their results are looked for from now on."""
        self.unscored = {job.folder for job in pending}
        return self(pending)

    def __call__(self, pending: list[Job]) -> list[Job]:
        waiting = {job.folder for job in pending}
        for folder in sorted(self.unscored - waiting):
            _, part, run = self.jobs[folder]
            if (done := read_done(folder, run.id)) is not None:
                self.finished[part.item.name].append(Scored(run, Result(run, folder, done).score()))
                self.unscored.remove(folder)
        return sorted(pending, key=self._key(pending))

    def _key(self, pending: Sequence[Job]) -> Callable[[Job], tuple]:
        begun = {self.jobs[job.folder][2].id for job in pending if checkpoints(job.folder)}
        keys = {name: order.key(self.finished[name], begun) for name, order in self.orders.items()}

        def key(job: Job) -> tuple:
            _, part, run = self.jobs[job.folder]
            stage, fresh, place = keys[part.item.name](run)
            return stage, fresh, self.places[part.item.name], place

        return key

    def plan(self, pending: list[Job]) -> str:
        """How many runs of every stage are to be done, and which is the next."""
        if not pending:
            return "Every run is finished."
        key = self._key(pending)
        stages = [key(job)[0] for job in pending]
        numbers = [f"{stages.count(i)} {name}" for i, name in enumerate(STAGES) if i in stages]
        return f"To be run, in this order: {'; '.join(numbers)}. Next: {pending[0].label}."


def _carry_out(
    jobs: list[Job], ordering: _Ordering, options: ReproduceOptions, started: float
) -> list[Failure]:
    with display(jobs) as monitor:
        if options.ray is None:
            seconds = None
            if options.minutes is not None:  # they count from the start of the call
                seconds = max(1.0, 60 * options.minutes - (time.monotonic() - started))
            workers, at_once = options.workers, options.runs_per_gpu
            return sweep(jobs, workers, options.device, monitor, at_once, seconds=seconds, order=ordering)
        from statetrack.integrations.ray import ray_sweep

        return ray_sweep(ordering(jobs), options.ray, options.gpus_per_run, options.device, monitor)


def print_coverage(parts: Sequence[Part]) -> None:
    """How many cells are covered, and what the paper's cells lack."""
    for part in parts:
        results = part.results()
        print(f"\n{counts(results)}.", *(f"  {line}" for line in missing(results)), sep="\n", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """The command line without extras: no tyro, no pages, no pictures."""
    parser = argparse.ArgumentParser(prog="python -m statetrack.reproduce", description=__doc__)
    parser.add_argument("name", help=f"{', '.join(ITEMS)}, or {EVERYTHING}")
    parser.add_argument("--scale", choices=SCALES, default=ReproduceOptions.scale)
    parser.add_argument("--minutes", type=float, help="write checkpoints and stop after this time")
    parser.add_argument("--workers", type=int, default=1, help="processes on this machine")
    parser.add_argument("--runs-per-gpu", type=int, default=1, help="runs interleaved by each process")
    parser.add_argument("--out", type=Path, default=ReproduceOptions.out)
    parser.add_argument(
        "--with-results", type=Path, help="runs kept in its runs.jsonl files are not repeated"
    )
    parser.add_argument("--only", default="", help="only runs whose name contains all of these words")
    parser.add_argument("--seeds", type=int, help="overrides the number of the scale")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--plugin", action="append", default=[], help="a file or module to load")
    given = vars(parser.parse_args(arguments))
    name = given.pop("name")
    with exit_codes():
        use_plugins(given.pop("plugin"))
        reproduce(name, ReproduceOptions(**given)).exit_if_failed()


if __name__ == "__main__":
    main()
