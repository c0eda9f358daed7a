"""How much of the negative half of the spectrum a language model uses, by split, layer and head."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from statetrack.errors import UserError
from statetrack.layers import DeltaNetConfig, MambaConfig, MixerConfig, Model
from statetrack.lm.layout import Layout
from statetrack.lm.perplexity import WindowReader, check_vocabulary
from statetrack.lm.tables import aligned
from statetrack.spectrum import informative
from statetrack.tasks.token_shards import TokenShards

__all__ = ["QUANTILES", "SpectrumUse", "spectrum_table", "spectrum_use"]

BINS = 200  # of the histogram over [-1, 1]: quantiles are exact to 0.01
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True)
class SpectrumUse:
    """The eigenvalues (real parts) of one layer on one split, summed up per unit.

    A unit is a head; in Mamba one of the N states, over all channels; elsewhere the whole layer.
    """

    split: str
    layer: int
    count: int  # eigenvalues per unit
    negative: tuple[float, ...]  # the fraction below 0, per unit
    negative_part: tuple[float, ...]  # the mean of min(eigenvalue, 0), per unit
    quantiles: tuple[tuple[float, ...], ...]  # at QUANTILES, per unit

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return vars(self) | {"layer": self.layer + 1}


class _Tally:
    """Sums over eigenvalues as they pass, on their device: (units,) and a histogram (units, BINS)."""

    def __init__(self, units: int, device: torch.device):
        self.count = 0
        self.below = torch.zeros(units, dtype=torch.int64, device=device)
        self.sum_below = torch.zeros(units, dtype=torch.float64, device=device)
        self.histogram = torch.zeros(units * BINS, dtype=torch.int64, device=device)

    def add(self, values: Tensor) -> None:
        """Take in `values` (units, n)."""
        units, n = values.shape
        self.count += n
        self.below += (values < 0).sum(1)
        self.sum_below += values.clamp(max=0).double().sum(1)
        index = ((values + 1) * (BINS / 2)).long().clamp(0, BINS - 1)
        index += BINS * torch.arange(units, device=values.device)[:, None]
        self.histogram += torch.bincount(index.flatten(), minlength=units * BINS)

    def result(self, split: str, layer: int) -> SpectrumUse:
        shares = self.histogram.view(-1, BINS).double().cumsum(1) / self.count
        wanted = torch.tensor(QUANTILES, dtype=shares.dtype, device=shares.device).expand(len(shares), -1)
        # the middle of the first bin at which the share is reached
        reached = torch.searchsorted(shares, wanted.contiguous() - 1e-12).clamp(max=BINS - 1)
        quantiles = (reached + 0.5) * (2 / BINS) - 1
        return SpectrumUse(
            split,
            layer,
            self.count,
            tuple((self.below / self.count).tolist()),
            tuple((self.sum_below / self.count).tolist()),
            tuple(tuple(round(q, 4) for q in row) for row in quantiles.tolist()),
        )


@torch.no_grad()
def spectrum_use(
    model: Model,
    shards: TokenShards,
    layouts: dict[str, Layout],
    reader: WindowReader,
    progress: Callable[[str, int, int], None] = lambda split, done, of: None,
) -> list[SpectrumUse]:
    """The use of the spectrum by every layer with transitions, on the sequences of every split.

    Only eigenvalues that can differ from 1 count: 1 - beta for DeltaNet. Sequences are read in windows with
    the state carried on, and eigenvalues are summed up as they come: memory does not depend on the length.
    Attention has no transitions and is left out.
    """
    check_vocabulary(model, shards)
    if not any(map(_is_recurrent, model.blocks)):
        raise UserError("spectrum: the model has attention in every layer, so no transitions to look at.")
    model = model.to(reader.device).eval()
    found = []
    for split, layout in layouts.items():
        tallies: dict[int, _Tally] = {}
        with _watching(model, tallies):
            state, done = None, 0
            for _, position, tokens in reader.pieces(shards, split, layout):
                with reader.autocast():
                    _, state = model(tokens[:, :-1], state if position else None, read_out=False)
                done += tokens[:, 1:].numel()
                progress(split, done, len(layout.starts) * layout.length)
        found += [tally.result(split, layer) for layer, tally in sorted(tallies.items())]
    return found


@contextmanager
def _watching(model: Model, tallies: dict[int, _Tally]) -> Iterator[None]:
    """While this is open, every mixer's eigenvalues on its input go to the tally of its layer."""

    def watch(layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(mixer: Any, inputs: tuple[Any, ...]) -> None:
            x, state = inputs
            values = mixer.transition_eigenvalues(x, *(() if state is None else (state,)))
            values = _by_unit(values, _mixer(model, layer))
            tallies.setdefault(layer, _Tally(len(values), values.device)).add(values)

        return before

    handles = [
        block.mixer.register_forward_pre_hook(watch(layer))  # type: ignore[union-attr]
        for layer, block in enumerate(model.blocks)
        if _is_recurrent(block)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mixer(model: Model, layer: int) -> MixerConfig:
    return model.config.mixer_of(layer)


def _is_recurrent(block: Any) -> bool:
    return getattr(block.mixer, "is_recurrent", True)


def _by_unit(eigenvalues: Tensor, mixer: MixerConfig) -> Tensor:
    """Eigenvalues (B, T, ..., n) as real parts (units, number)."""
    values = informative(eigenvalues, mixer)
    values = (values.real if values.is_complex() else values).float()
    if isinstance(mixer, DeltaNetConfig):
        return values.movedim(2, 0).flatten(1)
    if isinstance(mixer, MambaConfig):
        return values.movedim(-1, 0).flatten(1)
    return values.reshape(1, -1)


def spectrum_table(uses: Sequence[SpectrumUse]) -> str:
    """Per split and layer: the fraction below 0, over all units and in the unit with most; how far below."""
    columns = (
        "split",
        "layer",
        "units",
        "below 0",
        "most in a unit",
        "mean of min(a, 0)",
        "lowest 1 % quantile",
    )
    lines: list[tuple[str, ...]] = [columns]
    for use in uses:
        n = len(use.negative)
        lowest = min(row[0] for row in use.quantiles)
        below = (f"{sum(use.negative) / n:.1%}", f"{max(use.negative):.1%}")
        part = f"{sum(use.negative_part) / n:+.4f}"
        lines.append((use.split, f"{use.layer + 1}", f"{n}", *below, part, f"{lowest:+.2f}"))
    return aligned(lines)
