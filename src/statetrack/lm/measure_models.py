"""Several models on the same sequences, one in memory at a time; none is measured twice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from statetrack.errors import UserError
from statetrack.lm.candidates import (
    Described,
    check_tokenizer,
    context_of,
    describe,
    labels,
    open_candidate,
)
from statetrack.lm.layout import Layout, Rows, bin_edges, layout_of
from statetrack.lm.measured import (
    Measured,
    Perplexities,
    read_perplexities,
    shortened,
    write_perplexities,
)
from statetrack.lm.perplexity import WindowReader, measure
from statetrack.lm.spectrum import SpectrumUse, spectrum_use
from statetrack.tasks.token_shards import TokenShards

__all__ = ["Sequences", "measure_models", "spectra_of_models"]

Progress = Callable[[str, int, int], None]  # of what, how many tokens done, of how many


@dataclass(frozen=True)
class Sequences:
    """Which sequences of the held-out splits are read, and in which bins of positions."""

    length: int = 16_384  # tokens of a sequence
    bins: int = 64  # of positions, of about the same size; training lengths are edges too
    rows: Rows = "concatenated"  # documents one after another; long: only long ones, each from its start
    sequences: int = 0  # at most so many per split, spread over it; 0 for all
    splits: tuple[str, ...] = field(default=())  # all held-out splits when empty

    def layouts(self, shards: TokenShards, contexts: Sequence[int] = ()) -> dict[str, Layout]:
        """The sequences and cells of every split."""
        edges = bin_edges(self.length, self.bins, contexts)
        names = self.splits or tuple(name for name in shards.splits if name != "train")
        if not names:
            raise UserError(f"{shards.folder} has no held-out split. Choose one: --splits train")
        return {name: layout_of(shards.documents(name), edges, self.rows, self.sequences) for name in names}


def measure_models(
    models: Sequence[str],
    shards: TokenShards,
    sequences: Sequences,
    reader: WindowReader,
    path: Path,
    progress: Progress = lambda what, done, of: None,
) -> Perplexities:
    """The losses of the models in these folders, written to `path` after each.

    What that file holds of a model already, for the same sequences and precision, is not measured again.
    """
    for argument in models:  # what is wrong is said before the work
        check_tokenizer(argument, shards.folder)
    layouts = sequences.layouts(shards, [context_of(argument) for argument in models])
    known = _known(path, Perplexities(shards.sha256, sequences.rows, layouts, (), reader.precision))
    found: list[tuple[Described, dict[str, np.ndarray]]] = []
    for argument in models:
        candidate = open_candidate(argument)
        described = describe(candidate)
        losses = known.get(described.weights)
        if losses is None:
            said = _said(progress, described.name)
            losses = measure(candidate.model, shards, layouts, reader, said)
            # as they will be read back, so that a second call prints and draws the same
            losses = {split: np.array(shortened(values)) for split, values in losses.items()}
        found.append((described, losses))
        measured = Perplexities(shards.sha256, sequences.rows, layouts, _measured(found), reader.precision)
        write_perplexities(path, measured)
    return measured


def spectra_of_models(
    models: Sequence[str],
    shards: TokenShards,
    sequences: Sequences,
    reader: WindowReader,
    progress: Progress = lambda what, done, of: None,
) -> dict[str, list[SpectrumUse]]:
    """The use of the spectrum by the models in these folders, by label and seed."""
    found: list[tuple[Described, list[SpectrumUse]]] = []
    layouts = sequences.layouts(shards)
    for argument in models:
        candidate = open_candidate(argument)
        described = describe(candidate)
        use = spectrum_use(candidate.model, shards, layouts, reader, _said(progress, described.name))
        found.append((described, use))
    names = labels([described for described, _ in found])
    several = len({d.seed for d, _ in found}) > 1
    return {
        f"{name}, seed {d.seed}" if several else name: use
        for name, (d, use) in zip(names, found, strict=True)
    }


def _measured(found: Sequence[tuple[Described, dict[str, np.ndarray]]]) -> tuple[Measured, ...]:
    names = labels([described for described, _ in found])
    return tuple(
        Measured(d.id, name, losses, d.seed, d.context, d.parameters, d.weights)
        for name, (d, losses) in zip(names, found, strict=True)
    )


def _known(path: Path, now: Perplexities) -> dict[str, dict[str, np.ndarray]]:
    """Losses in the file at `path` by the SHA-256 of weights, if they are of the same sequences."""
    if not path.exists():
        return {}
    before = read_perplexities(path)
    if not before.same_sequences(now) or before.precision != now.precision:
        raise UserError(
            f"{path} holds losses of other sequences (data, length, rows, bins, splits or precision). "
            "Choose another --out, or delete that file."
        )
    return {model.weights: model.losses for model in before.models}


def _said(progress: Progress, name: str) -> Progress:
    return lambda split, done, of: progress(f"{name}, {split}", done, of)
