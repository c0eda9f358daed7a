"""Paired differences of loss between two kinds of model on the same text, with bootstrap intervals."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from statetrack.errors import UserError, unknown_name
from statetrack.lm.layout import Layout
from statetrack.lm.measured import Measured, Perplexities, in_window
from statetrack.lm.tables import aligned

__all__ = ["Difference", "as_table", "bootstrap", "compare", "paired_seeds", "position_windows"]

DRAWN = 2**22  # indices drawn at once, 32 MiB
UNITS, WEIGHTS = ("document", "sequence"), ("tokens", "units")


@dataclass(frozen=True)
class Difference:
    """The loss of `second` minus that of `first` at positions [low, high) of a split, in nats per token.

    Negative: `second` is better. `lower` and `upper` bound the bootstrap interval.
    """

    split: str
    first: str
    second: str
    low: int
    high: int
    mean: float
    lower: float
    upper: float
    by_seed: tuple[float, ...]  # the difference of each pair of seeds
    spread: tuple[float, float]  # standard deviation over seeds of each one's own loss; NaN for one seed
    units: int  # documents or sequences resampled
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"spread": [None if np.isnan(s) else s for s in self.spread]}


def compare(
    perplexities: Perplexities,
    first: str,
    second: str,
    *,
    windows: Sequence[tuple[int, int]] | None = None,
    unit: Literal["document", "sequence"] = "document",
    weight: Literal["tokens", "units"] = "tokens",
    resamples: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
) -> list[Difference]:
    """The paired differences between the models labelled `first` and `second`, by split and position window.

    Seeds are paired by number, since runs of one seed see the data in one order. `unit` is what is resampled;
    with several seeds these are resampled too. `weight`: every token counts the same, so that the difference
    is the logarithm of the ratio of the perplexities; or every unit does.
    """
    if unit not in UNITS:
        raise unknown_name("compare: unit", unit, UNITS)
    pairs = paired_seeds(perplexities, first, second)
    found = []
    for split, layout in perplexities.layouts.items():
        bounds = [*windows] if windows else position_windows(layout, pairs[0][0].context)
        tokens = _table(layout, layout.tokens, unit, bounds)
        losses = np.array([[_table(layout, m.losses[split], unit, bounds) for m in pair] for pair in pairs])
        sums = losses[:, 1] - losses[:, 0]  # (seeds, units, windows)
        mean, lower, upper = bootstrap(
            sums, tokens, weight=weight, resamples=resamples, seed=seed, level=level
        )
        by_seed = np.array([_ratio(one[None], tokens, weight) for one in sums])
        own = np.array([[_ratio(side[None], tokens, weight) for side in pair] for pair in losses])
        spread = own.std(0, ddof=1) if len(pairs) > 1 else np.full(own.shape[1:], np.nan)
        for w, (low, high) in enumerate(bounds):
            found.append(
                Difference(
                    split=split,
                    first=first,
                    second=second,
                    low=low,
                    high=high,
                    mean=float(mean[w]),
                    lower=float(lower[w]),
                    upper=float(upper[w]),
                    by_seed=tuple(by_seed[:, w].tolist()),
                    spread=(float(spread[0, w]), float(spread[1, w])),
                    units=int((tokens[:, w] > 0).sum()),
                    tokens=int(tokens[:, w].sum()),
                )
            )
    return found


def paired_seeds(perplexities: Perplexities, first: str, second: str) -> list[tuple[Measured, Measured]]:
    """Pairs of a model of each label with equal seeds, by seed; none in common is a `UserError`."""
    labels = {model.label for model in perplexities.models}
    for label in (first, second):
        if label not in labels:
            raise unknown_name("compare: label", label, labels)
    of = {label: {m.seed: m for m in perplexities.models if m.label == label} for label in (first, second)}
    seeds = sorted(of[first].keys() & of[second].keys())
    if not seeds:
        raise UserError(
            f"compare: {first} has the seeds {sorted(of[first])} and {second} {sorted(of[second])}, expected "
            "common ones."
        )
    return [(of[first][s], of[second][s]) for s in seeds]


def position_windows(layout: Layout, context: int) -> list[tuple[int, int]]:
    """All positions; those within the training length and those past it, if it is a border between bins."""
    whole = (0, layout.length)
    if context in layout.edges[1:-1]:
        return [whole, (0, context), (context, layout.length)]
    return [whole]


def bootstrap(
    sums: np.ndarray,
    tokens: np.ndarray,
    *,
    weight: Literal["tokens", "units"] = "tokens",
    resamples: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean difference per window, and the percentile interval of its bootstrap distribution.

        mean[w] = sum_{s,u} sums[s, u, w] / (seeds sum_u tokens[u, w])                      weight "tokens"

    Every resample draws units with replacement, and seeds too if there are several (the crossed bootstrap of
    Owen 2007: the same units for all seeds); the same units for all windows. Shapes: sums (seeds, units,
    windows); tokens (units, windows); results (windows,). A window that a unit has no tokens in does not
    count for it.
    """
    if weight not in WEIGHTS:
        raise unknown_name("bootstrap: weight", weight, WEIGHTS)
    if resamples < 1 or not 0 < level < 1:
        raise UserError(
            f"bootstrap: {resamples} resamples at level {level}, expected at least 1 and 0 < level < 1."
        )
    generator = np.random.default_rng(seed)
    values, counts = _weighted(sums, tokens, weight)
    (S, U, W), drawn = sums.shape, []
    columns = np.concatenate([values.transpose(1, 0, 2).reshape(U, S * W), counts], axis=1)
    size = max(1, DRAWN // U)
    for low in range(0, resamples, size):
        n = min(size, resamples - low)
        times = _times_drawn(generator, n, U) @ columns  # (n, S W + W)
        seeds = _times_drawn(generator, n, S) if S > 1 else np.ones((n, 1))
        total = np.einsum("ns,nsw->nw", seeds, times[:, : S * W].reshape(n, S, W))
        with np.errstate(invalid="ignore"):  # a window that no drawn unit has tokens in
            drawn.append(total / (S * times[:, S * W :]))
    tail = (1 - level) / 2
    lower, upper = np.nanquantile(np.concatenate(drawn), [tail, 1 - tail], axis=0)
    return _ratio(sums, tokens, weight), lower, upper


def _times_drawn(generator: np.random.Generator, resamples: int, n: int) -> np.ndarray:
    """How often each of n things is drawn in n draws with replacement, (resamples, n)."""
    index = generator.integers(n, size=(resamples, n)) + n * np.arange(resamples)[:, None]
    return np.bincount(index.ravel(), minlength=resamples * n).reshape(resamples, n).astype(float)


def _weighted(sums: np.ndarray, tokens: np.ndarray, weight: str) -> tuple[np.ndarray, np.ndarray]:
    """Numerators and denominators whose sums over units give the mean."""
    if weight == "tokens":
        return sums, tokens.astype(float)
    return sums / np.maximum(tokens, 1), (tokens > 0).astype(float)


def _ratio(sums: np.ndarray, tokens: np.ndarray, weight: str) -> np.ndarray:
    """The mean over seeds and units, (windows,)."""
    values, counts = _weighted(sums, tokens, weight)
    return values.sum((0, 1)) / (len(sums) * counts.sum(0))


def _table(layout: Layout, values: np.ndarray, unit: str, bounds: Sequence[tuple[int, int]]) -> np.ndarray:
    """Sums of a value per cell over units and windows, (units, windows)."""
    names, number = np.unique(getattr(layout, unit), return_inverse=True)
    table = np.zeros((len(names), len(bounds)))
    for w, (low, high) in enumerate(bounds):
        inside = in_window(layout, low, high)
        np.add.at(table[:, w], number[inside], values[inside])
    return table


def as_table(differences: Sequence[Difference], unit: str = "document") -> str:
    """The differences as aligned text, one line each; with several seeds also by seed, and their spread."""
    columns = ("split", "positions", f"{unit}s", "difference", "95 % interval")
    several = any(len(d.by_seed) > 1 for d in differences)
    lines: list[tuple[str, ...]] = [(*columns, "by seed", "spread of seeds") if several else columns]
    for d in differences:
        interval = f"{d.lower:+.4f} to {d.upper:+.4f}"
        cells = (d.split, f"{d.low}-{d.high}", f"{d.units}", f"{d.mean:+.4f}", interval)
        if several:
            seeds = " ".join(f"{value:+.4f}" for value in d.by_seed)
            cells += (seeds, " ".join(f"{value:.4f}" for value in d.spread))
        lines.append(cells)
    return aligned(lines, left=2)
