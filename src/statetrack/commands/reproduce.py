"""statetrack reproduce: one table or figure of the paper, our results next to the published ones."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from statetrack.commands.flags import parse, take_first, take_plugins
from statetrack.errors import UserError, require
from statetrack.experiments.item import SCALES, Item, LabelledRun, Scale
from statetrack.experiments.registry import ITEMS, item
from statetrack.report.build import write_report
from statetrack.report.results import read_index, write_index
from statetrack.report.text import as_text
from statetrack.sweep import Failure, Job, sweep
from statetrack.sweep.display import display
from statetrack.training.loop import resolve_device


@dataclass(frozen=True)
class ReproduceOptions:
    """Reproduce NAME: `statetrack reproduce NAME --scale quick`; --list shows every name.

    Runs that are finished are not run again; after Ctrl-C the same command continues.
    --plugin FILE.py, or a module, is loaded here and by every worker process.
    """

    scale: Scale = "quick"  # smoke: seconds; quick: minutes; paper: the exact protocol
    workers: int = 1  # processes on this machine
    runs_per_gpu: int = 1  # runs that each process interleaves on its GPU
    out: Path = Path("results/reproduce")
    only: str = ""  # only runs whose name contains all of these words, e.g. "parity mamba 'lr 0.001'"
    seeds: int | None = None  # overrides the number of the scale
    device: str = "auto"  # auto, cpu or cuda
    ray: str | None = None  # address of a Ray cluster ("auto", "host:port") to run on instead of here
    gpus_per_run: float | None = None  # on Ray: a fraction shares one GPU among runs
    list: bool = False  # list the items and stop


def main(arguments: Sequence[str]) -> None:
    name, flags = take_first(take_plugins(arguments))
    options = parse(ReproduceOptions, flags, "statetrack reproduce NAME")
    if options.list:
        print(_listing())
        return
    if name is None:
        raise UserError(f"reproduce: give the name of an item first: {', '.join(ITEMS)}.")
    chosen = item(name)
    _check(options)
    runs = _selected(chosen.runs(options.scale, options.seeds), options.only)
    folder, runs_folder = options.out / chosen.name / options.scale, options.out / "runs"
    runs = write_index(folder, chosen, options.scale, runs, runs_folder)
    print(f"{chosen.what}, {options.scale} scale: {len(runs)} runs. Results go to {folder}.", flush=True)
    kept = {result.run.id for result in read_index(folder).finished if result.folder is None}
    failures = _carry_out([_job(run, runs_folder) for run in runs if run.id not in kept], options)
    results = read_index(folder)
    if results.finished:
        page = write_report(results, folder)
        print(f"\n{as_text(results)}\n\nSee {page}, and figure.png and figure.pdf beside it.")
    if failures:
        print(f"\n{len(failures)} of {len(runs)} runs failed:", *failures, sep="\n")
        raise SystemExit(1)


def _check(options: ReproduceOptions) -> None:
    counts = {name: getattr(options, name) for name in ("workers", "runs_per_gpu", "seeds")}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UserError(f"reproduce: {name} is {value}, expected at least 1.")
    if options.gpus_per_run is not None and options.gpus_per_run < 0:
        raise UserError(f"reproduce: gpus_per_run is {options.gpus_per_run}, expected 0 or more.")
    if options.ray is None:
        resolve_device(options.device)
    for module, what in (("matplotlib", "drawing figures"), ("jinja2", "writing HTML reports")):
        require(module, extra="report", for_=what)  # fail before hours of training, not after


def _selected(runs: list[LabelledRun], only: str) -> list[LabelledRun]:
    """The runs whose full name contains every word or quoted phrase of `only`."""
    try:
        words = shlex.split(only.lower())
    except ValueError as error:
        raise UserError(f"reproduce: --only {only!r} cannot be read: {error}.") from error
    found = [run for run in runs if all(word in _name(run).lower() for word in words)]
    if not found:
        labels = sorted({f"{run.panel}: {run.label}" for run in runs})
        raise UserError(f"reproduce: --only {only!r} matches no run. There are: {'; '.join(labels)}.")
    return found


def _name(run: LabelledRun) -> str:
    return f"{run.panel}: {run.label}, lr {run.spec.training.lr:g}, seed {run.spec.seed}"


def _job(run: LabelledRun, runs_folder: Path) -> Job:
    return Job(_name(run), run.spec, runs_folder / run.id)


def _carry_out(jobs: list[Job], options: ReproduceOptions) -> list[Failure]:
    with display(jobs) as monitor:
        if options.ray is None:
            return sweep(jobs, options.workers, options.device, monitor, options.runs_per_gpu)
        from statetrack.integrations.ray import ray_sweep

        return ray_sweep(jobs, options.ray, options.gpus_per_run, options.device, monitor)


def _listing() -> str:
    """Name, what, paper label and number of runs per scale."""
    rows = [("name", "paper label", *SCALES, "what")]
    rows += [(i.name, i.paper_label, *_counts(i), i.what) for i in ITEMS.values()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(
        [*lines, "", "Numbers are runs per scale. tab-chomsky and fig-chomsky-length share theirs."]
    )


def _counts(of: Item) -> list[str]:
    return [str(len(of.runs(scale))) for scale in SCALES]
