"""statetrack lm perplexity: perplexity by position of one or more models, far past the training length."""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from statetrack.commands.flags import parse, take_leading, take_plugins
from statetrack.errors import UserError
from statetrack.files import write_atomically, write_text
from statetrack.lm.compare import Difference, as_table, compare, position_windows
from statetrack.lm.measure_models import Sequences, measure_models, spectra_of_models
from statetrack.lm.measured import Perplexities
from statetrack.lm.perplexity import WindowReader, frequency_losses
from statetrack.lm.spectrum import spectrum_table
from statetrack.lm.tables import aligned
from statetrack.report import figures, language_models
from statetrack.tasks.token_shards import TokenShards
from statetrack.training.loop import resolve_device

FREQUENCIES = "(token frequencies alone)"  # of the tokens that are predicted
USAGE = "statetrack lm perplexity MODEL [MODEL...] DATA"


@dataclass(frozen=True)
class PerplexityOptions:
    """Perplexity by position, in one figure: `statetrack lm perplexity MODEL [MODEL...] DATA`.

    MODEL is the folder of a run, or LABEL=FOLDER; DATA a folder of token shards, whose held-out splits are
    read. Models of one label are seeds of each other. Memory does not grow with the length.
    """

    sequences: Sequences = field(default_factory=Sequences)  # which sequences are read
    window: int = 2048  # tokens read at a time, with the state carried on
    batch: int = 4  # sequences read side by side
    precision: Literal["float32", "bfloat16"] = "float32"  # of the layers; recurrences keep float32
    device: str = "auto"  # auto, cpu or cuda
    unit: Literal["document", "sequence"] = "document"  # what the paired bootstrap resamples
    spectrum: bool = False  # also measure how much of the negative half of the spectrum is used
    out: Path = Path("results/perplexity")  # folder for perplexity.json and the figures


def main(arguments: Sequence[str]) -> None:
    folders, rest = take_leading(take_plugins(arguments))
    if len(folders) < 2 and not {"-h", "--help"} & {*rest}:
        raise UserError(
            f"lm perplexity: give models and the folder of the data first, before any option: {USAGE}"
        )
    options = parse(PerplexityOptions, rest, USAGE)
    figures.new_figure(1, 1)  # a missing extra is reported before the work
    *models, data = folders
    shards, progress = TokenShards.open(data), Progress()
    reader = WindowReader(options.window, options.batch, options.precision, resolve_device(options.device))
    path = options.out / "perplexity.json"
    measured = measure_models(models, shards, options.sequences, reader, path, progress)
    print(perplexity_table(measured, frequency_losses(shards, measured.layouts)))
    write_figure(options.out / "perplexity", figure_of(measured))
    found = differences_of(measured, options.unit)
    for old in options.out.glob("differences.*"):  # of other models, measured into this folder before
        old.unlink()
    if found:
        print("\n" + differences_text(found, options.unit))
        write_text(
            options.out / "differences.json", json.dumps([d.to_dict() for d in found], indent=1) + "\n"
        )
        write_figure(options.out / "differences", language_models.differences(found))
    if options.spectrum:
        uses = spectra_of_models(models, shards, options.sequences, reader, progress)
        for label, of_model in uses.items():
            print(f"\nEigenvalues of the transitions, {label}:\n\n{spectrum_table(of_model)}")
        content = {label: [use.to_dict() for use in of_model] for label, of_model in uses.items()}
        write_text(options.out / "spectrum.json", json.dumps(content) + "\n")
        write_figure(options.out / "spectrum", language_models.spectrum_use(uses))
    print(f"\nSee {options.out}: perplexity.json, and the figures beside it.")


class Progress:
    """A line on stderr every few seconds."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, what: str, done: int, of: int) -> None:
        if time.monotonic() - self.last > 5:
            self.last = time.monotonic()
            print(f"{what}: {done:,} of {of:,} tokens", file=sys.stderr, flush=True)


def perplexity_table(measured: Perplexities, frequencies: Mapping[str, float]) -> str:
    """Perplexity of every model on every split: at all positions, within the training length, past it.

    Below them that of the tokens' frequencies alone; `frequencies` are its losses by split.
    """
    lines: list[tuple[str, ...]] = [
        ("split", "model", "seed", "sequences", "perplexity", "within training length", "past it")
    ]
    for split, layout in measured.layouts.items():
        for model in measured.models:
            windows = position_windows(layout, model.context)
            values = [f"{math.exp(measured.mean_loss(model, split, low, high)):.3f}" for low, high in windows]
            values += [""] * (3 - len(values))
            lines.append((split, model.label, f"{model.seed}", f"{len(layout.starts)}", *values))
        alone = f"{math.exp(frequencies[split]):.3f}"
        lines.append((split, FREQUENCIES, "", f"{len(layout.starts)}", alone, "", ""))
    first = next(iter(measured.layouts.values()))
    contexts = sorted({model.context for model in measured.models})
    trained = ", ".join(f"{context:,}" for context in contexts)
    head = f"Perplexity on sequences of {first.length:,} tokens ({measured.rows}), trained on {trained}:"
    return f"{head}\n\n{aligned(lines, left=2)}"


def differences_of(measured: Perplexities, unit: Literal["document", "sequence"]) -> list[Difference]:
    """Every label against the first."""
    first, *others = dict.fromkeys(model.label for model in measured.models)
    return [difference for other in others for difference in compare(measured, first, other, unit=unit)]


def differences_text(found: Sequence[Difference], unit: str) -> str:
    """A table for every pair of labels."""
    parts = []
    for first, second in dict.fromkeys((d.first, d.second) for d in found):
        own = [d for d in found if (d.first, d.second) == (first, second)]
        parts.append(f"Loss of {second} minus loss of {first}, nats per token:\n\n{as_table(own, unit)}")
    return "\n\n".join(parts)


def figure_of(measured: Perplexities):
    """Perplexity by position, a panel per split."""
    context = max(model.context for model in measured.models)
    return language_models.loss_by_position(language_models.position_panels(measured), context)


def write_figure(path: Path, figure) -> None:
    """The figure as PNG and SVG."""
    for kind in ("png", "svg"):
        write_atomically(path.with_suffix(f".{kind}"), [figures.save(figure, kind)])
