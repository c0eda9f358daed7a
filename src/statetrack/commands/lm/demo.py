"""statetrack lm demo: a small DeltaNet in both ranges on the standard library, in a few minutes on a CPU."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from statetrack.commands.flags import parse
from statetrack.commands.lm.perplexity import (
    Progress,
    differences_of,
    differences_text,
    figure_of,
    perplexity_table,
    write_figure,
)
from statetrack.commands.progress import progress_bars
from statetrack.lm.candidates import family
from statetrack.lm.demo import HELDOUT, DemoSize, specs, summary
from statetrack.lm.embedded import embedded_corpus
from statetrack.lm.measure_models import Sequences, measure_models
from statetrack.lm.perplexity import WindowReader, frequency_losses
from statetrack.report import figures, language_models
from statetrack.report.language_models import TrainingCurve
from statetrack.run import run
from statetrack.spec import RunSpec
from statetrack.tasks.token_shards import TokenShards
from statetrack.training import Options
from statetrack.training.loop import resolve_device
from statetrack.training.metrics_file import read_metrics

MULTIPLE = 8  # of the training length: how far perplexity is measured


@dataclass(frozen=True)
class DemoOptions:
    """Train a small DeltaNet in both eigenvalue ranges on text; print and plot perplexity by position.

    A second call finds what is done and continues from there.
    """

    size: DemoSize = field(default_factory=DemoSize)  # model and training
    data: Path | None = None  # token shards; the standard library of this Python, as bytes, when None
    out: Path = Path("results/lm-demo")  # folder for the runs and the figure
    sequences: int = 128  # held-out sequences, at most; 0 for all
    device: str = "auto"  # auto, cpu or cuda


def main(arguments: Sequence[str]) -> None:
    options = parse(DemoOptions, arguments, "statetrack lm demo")
    figures.new_figure(1, 1)  # a missing extra is reported before the training
    started, out = time.monotonic(), options.out
    data = options.data or embedded_corpus(out / "data", HELDOUT)
    shards = TokenShards.open(data)
    heldout = sum(shards.tokens(split) for split in shards.heldout)
    print(
        f"Text: {shards.tokens('train'):,} tokens to train on, {heldout:,} held out, in {data}.", flush=True
    )
    folders = train(specs(data, options.size), out / "runs", options.device)
    write_figure(out / "loss", language_models.training_curves(curves_of(folders)))
    measured = measure_models(
        [str(folder) for folder in folders],
        shards,
        Sequences(MULTIPLE * options.size.context, 4 * MULTIPLE, sequences=options.sequences),
        WindowReader(window=options.size.context, batch=8, device=resolve_device(options.device)),
        out / "perplexity.json",
        Progress(),
    )
    write_figure(out / "perplexity", figure_of(measured))
    found, frequencies = differences_of(measured, "document"), frequency_losses(shards, measured.layouts)
    print(f"\n{perplexity_table(measured, frequencies)}\n\n{differences_text(found, 'document')}")
    print(f"\n{summary(measured, found)}")
    print(f"\n{time.monotonic() - started:.0f} s. See {out / 'loss.png'} and {out / 'perplexity.png'}.")


def train(planned: Sequence[RunSpec], folder: Path, device: str) -> list[Path]:
    """Carry out the runs that are not finished; the folders of all."""
    bars = [(label_of(spec), spec.training.steps) for spec in planned]
    with progress_bars(bars) as bar:
        for i, spec in enumerate(planned):
            report = bar(i)
            done = run(spec, folder / spec.id, Options(device, progress=report, say=_quiet))
            report(spec.training.steps, done["metrics"])  # a run that was finished reports no progress
    return [folder / spec.id for spec in planned]


def curves_of(folders: Sequence[Path]) -> dict[str, list[TrainingCurve]]:
    """The losses that the runs have logged, by label."""
    curves = {}
    for folder in folders:
        rows = read_metrics(folder / "metrics.jsonl")
        curve = TrainingCurve([row["step"] for row in rows], [row["loss"] for row in rows])
        curves[label_of(RunSpec.load(folder / "spec.json"))] = [curve]
    return curves


def label_of(spec: RunSpec) -> str:
    return family(spec.model)


def _quiet(text: str) -> None:
    """Print messages of a run to stderr, so that they do not disturb the progress bars."""
    if not text.endswith("finished already."):
        print(text, file=sys.stderr)
