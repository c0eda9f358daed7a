"""Train and evaluate the language models of docs/results/language-models in pieces of limited time.

    python tools/lm_experiment.py --pieces DIR --state DIR --out DIR --seconds 560 --runs 0 1 2 3
    python tools/lm_experiment.py --list --state DIR

`--pieces` holds files of `tools/corpus/build.py pack`; they are unpacked into STATE/shards, in as many calls
as they come. Runs are carried out one after the other in STATE/runs and go on where the last call stopped.
What is small goes to OUT: runs.jsonl (specs, metrics and learning curves), perplexity.json (losses of every
document and bin of positions), spectrum.json and log.txt. Needs torch and numpy only.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from statetrack.errors import Diverged, Interrupted, UserError
from statetrack.experiments.item import LabelledRun
from statetrack.experiments.language_models import (
    CONTEXT,
    EVALUATION,
    LENGTH,
    SPECTRUM_PIECES,
    TRAINING,
    runs,
)
from statetrack.files import write_json, write_text
from statetrack.lm.measure_models import Sequences, measure_models, spectra_of_models
from statetrack.lm.perplexity import WindowReader
from statetrack.run import run
from statetrack.run_folder import read_done
from statetrack.tasks.token_shards import TokenShards
from statetrack.training import Options
from statetrack.training.metrics_file import read_metrics

# for a test of the whole on a CPU: --tiny
TINY = {
    "models": {"DeltaNet": "deltanet", "Mamba": "mamba"},
    "seeds": 2,
    "context": 32,
    "training": replace(TRAINING, steps=240, batch=4, log_every=4, precision="float32"),
    "evaluation": replace(EVALUATION, eval_samples=2, eval_every=120),
}


class OutOfTime(Exception):
    """The deadline has come while models were being evaluated; the next call does it."""


class Clock:
    """Time since the start, and what is left of it."""

    def __init__(self, seconds: float, saving: float):
        self.started, self.seconds, self.saving = time.monotonic(), seconds, saving

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def check(self, *_: object) -> None:
        """Raise once the time is over; as the `progress` of an evaluation."""
        if self.left < self.saving / 3:
            raise OutOfTime

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Send this process SIGTERM, on which a run saves and stops, in time for it."""
        before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        signal.setitimer(signal.ITIMER_REAL, max(0.1, self.left - self.saving))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


class Log:
    """Lines with the time since the start, printed and kept."""

    def __init__(self, path: Path, clock: Clock):
        self.path, self.clock = path, clock
        path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, text: str) -> None:
        line = f"{time.monotonic() - self.clock.started:6.1f} s  {text}"
        print(line, flush=True)
        with open(self.path, "a") as file:
            file.write(line + "\n")


def unpack(pieces: Path, shards: Path, say: Log) -> None:
    """Add what the pieces hold to the folder of shards; a piece that is there already is not read again."""
    shards.mkdir(parents=True, exist_ok=True)
    for piece in sorted(pieces.rglob("*.tar.xz")):
        mark = shards.parent / "unpacked" / piece.name
        if not mark.exists():
            with tarfile.open(piece) as tar:
                tar.extractall(shards, filter="data")
            mark.parent.mkdir(exist_ok=True)
            mark.touch()
            say(f"unpacked {piece.name}")


def carry_out(chosen: list[LabelledRun], folder: Path, clock: Clock, say: Log) -> None:
    """Train the runs one after the other until all are finished or the time is over."""
    for labelled in chosen:
        spec, name = labelled.spec, f"{labelled.label}, seed {labelled.spec.seed}"
        if read_done(folder / spec.id) is not None:
            continue
        if clock.left < 2 * clock.saving:
            return
        say(f"{name}: {spec.id}")
        options = Options(checkpoint_seconds=300, say=say, progress=_progress(spec, clock, say))
        try:
            with clock.stopping():
                done = run(spec, folder / spec.id, options)
            say(f"{name}: finished, {done['seconds']:.0f} s of training and evaluation")
        except Interrupted as stopped:
            say(f"{name}: {stopped}")
            return
        except Diverged as error:  # a result, not a fault: the rule of the plan has a line for it
            say(f"{name}: {error}")
            write_json(folder / spec.id / "diverged.json", {"message": str(error)})


def _progress(spec: Any, clock: Clock, say: Log):
    last = {"step": 0, "at": time.monotonic()}

    def progress(step: int, row: dict[str, Any]) -> None:
        if step % (5 * spec.training.log_every) and step != spec.training.steps:
            return
        now, tokens = time.monotonic(), spec.training.batch * spec.task.context
        rate = (step - last["step"]) * tokens / max(now - last["at"], 1e-9)
        last.update(step=step, at=now)
        heldout = f", held-out {row['heldout_loss']:.4f}" if "heldout_loss" in row else ""
        memory = f", {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if torch.cuda.is_available() else ""
        say(f"  step {step}: loss {row['loss']:.4f}{heldout}, {rate:,.0f} tokens/s{memory}")

    return progress


def evaluate(
    chosen: list[LabelledRun], folder: Path, shards: TokenShards, length: int, clock: Clock, say: Log
) -> None:
    """Losses by position and the use of the spectrum of every finished run, each measured once."""
    finished = [r for r in chosen if read_done(folder / r.spec.id) is not None]
    if not finished:
        return
    on_gpu = torch.cuda.is_available()
    reader = WindowReader(
        window=min(CONTEXT, length),
        batch=16,
        precision="bfloat16" if on_gpu else "float32",  # as in training
        device=torch.device("cuda" if on_gpu else "cpu"),
    )
    arguments = [f"{r.label}={folder / r.spec.id}" for r in finished]
    sequences = Sequences(length=length, bins=32)
    measure_models(arguments, shards, sequences, reader, folder.parent / "perplexity.json", clock.check)
    say(f"losses by position: {len(finished)} models")
    for r, argument in zip(finished, arguments, strict=True):
        path = folder / r.spec.id / "spectrum.json"
        if path.exists():
            continue
        few = Sequences(length=reader.window, bins=1, sequences=SPECTRUM_PIECES)
        small = replace(reader, batch=4)  # Mamba has 16,384 eigenvalues a token and layer
        (uses,) = spectra_of_models([argument], shards, few, small, clock.check).values()
        write_json(path, {"label": r.label, "seed": r.spec.seed, "uses": [vars(use) for use in uses]})
        say(f"use of the spectrum: {r.label}, seed {r.spec.seed}")


def collect(chosen: list[LabelledRun], state: Path, out: Path) -> None:
    """Copy what is small to `out`: at most four files."""
    out.mkdir(parents=True, exist_ok=True)
    lines, spectra = [], []
    for r in chosen:
        folder = state / "runs" / r.spec.id
        if not (folder / "spec.json").exists():
            continue
        diverged = folder / "diverged.json"
        entry = r.to_dict() | {
            "done": read_done(folder),
            "diverged": json.loads(diverged.read_text())["message"] if diverged.exists() else None,
            "rows": read_metrics(folder / "metrics.jsonl"),
        }
        lines.append(json.dumps(entry))
        if (folder / "spectrum.json").exists():
            spectra.append(json.loads((folder / "spectrum.json").read_text()))
    write_text(out / "runs.jsonl", "".join(line + "\n" for line in lines))
    write_json(out / "spectrum.json", spectra)
    for name in ("perplexity.json", "log.txt"):
        if (state / name).exists():
            shutil.copy(state / name, out / name)


def main() -> int:
    """Do as much as the time allows; the exit code is 0 where everything asked for is there, else 3."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pieces", type=Path, help="folder with .tar.xz files to unpack first")
    parser.add_argument("--state", type=Path, required=True, help="shards, runs and checkpoints stay here")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "lm-experiment")))
    parser.add_argument("--seconds", type=float, default=560, help="stop after this time")
    parser.add_argument("--saving", type=float, default=15, help="seconds of them for the last checkpoint")
    parser.add_argument("--runs", type=int, nargs="*", help="numbers as --list shows them; all by default")
    parser.add_argument("--list", action="store_true", help="show the runs, start none")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to test this script")
    given = parser.parse_args()
    clock = Clock(given.seconds, given.saving)
    say = Log(given.state / "log.txt", clock)
    if given.pieces is not None:
        unpack(given.pieces, given.state / "shards", say)
    try:
        shards = TokenShards.open(given.state / "shards")
    except UserError as error:
        say(f"The data are not complete yet: {error}")
        return 3
    every = runs(str(given.state / "shards"), **(TINY if given.tiny else {}))
    if given.list:
        for number, r in enumerate(every):
            print(f"{number}  {r.label}, seed {r.spec.seed}, {r.spec.id}")
        return 0
    chosen = [every[number] for number in (range(len(every)) if given.runs is None else given.runs)]
    length = 8 * TINY["context"] if given.tiny else LENGTH
    folder = given.state / "runs"
    try:
        # what earlier calls have finished comes first: it is the result
        evaluate(every, folder, shards, length, clock, say)
        carry_out(chosen, folder, clock, say)
        evaluate(every, folder, shards, length, clock, say)
    except OutOfTime:
        say("out of time while evaluating: call again")
    finally:
        collect(every, given.state, given.out)
    missing = [r for r in chosen if not (folder / r.spec.id / "spectrum.json").exists()]
    say(f"{len(chosen) - len(missing)} of {len(chosen)} runs are finished and evaluated")
    return 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
