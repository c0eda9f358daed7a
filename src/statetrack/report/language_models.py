"""Figures about language models: training, loss by position, paired differences, use of the spectrum.

Plain data in, a matplotlib figure out; `figures.save` makes it a PNG, SVG or PDF. Labels of models end with
their range, "DeltaNet [-1,1]": colours are chosen by range, or by family if there are several.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from statetrack.lm.compare import Difference, paired_seeds
from statetrack.lm.measured import Perplexities
from statetrack.lm.spectrum import SpectrumUse
from statetrack.report import drawing, figures
from statetrack.report.figures import COLOURS, MARKERS, STYLES

Z = 1.96  # half a 95 % interval, in standard errors


@dataclass(frozen=True)
class TrainingCurve:
    """The loss of one run, in nats, against its steps or tokens."""

    x: Sequence[float]
    loss: Sequence[float]


@dataclass(frozen=True)
class PositionCurve:
    """The loss of the seeds of one kind of model by position, in nats."""

    edges: Sequence[int]  # (bins + 1,)
    means: Sequence[Sequence[float]]  # (seeds, bins)
    errors: Sequence[float]  # (bins,), standard errors over sequences, of the first seed
    # mean and standard error over sequences of the loss minus that of the first label, (bins,) each
    difference: tuple[Sequence[float], Sequence[float]] | None = None


def position_panels(perplexities: Perplexities) -> dict[str, dict[str, PositionCurve]]:
    """Split, then label of the models: what `loss_by_position` draws."""
    panels: dict[str, dict[str, PositionCurve]] = {}
    first, *_ = labels = list(dict.fromkeys(model.label for model in perplexities.models))
    for split, layout in perplexities.layouts.items():
        for label in labels:
            found = [perplexities.by_position(m, split) for m in perplexities.models if m.label == label]
            difference = None
            if label != first:
                paired = perplexities.paired_by_position(paired_seeds(perplexities, first, label), split)
                difference = (paired.mean.tolist(), paired.standard_error.tolist())
            means, errors = [one.mean.tolist() for one in found], found[0].standard_error.tolist()
            curve = PositionCurve(layout.edges.tolist(), means, errors, difference)
            panels.setdefault(split, {})[label] = curve
    return panels


def domain(split: str) -> str:
    """The title of a held-out split: "heldout-code" is code."""
    return split.removeprefix("heldout-").removeprefix("heldout") or "held-out text"


def training_curves(
    runs: Mapping[str, Sequence[TrainingCurve]], x: str = "training step", y: str = "training loss (nats)"
):
    """One line per label: the median over seeds; the band goes from the lowest to the highest seed."""
    figure = figures.new_figure(6.0, 3.6)
    axis, lowest, handles = figure.subplots(), np.inf, {}
    for label, curves in runs.items():
        common = sorted(set.intersection(*(set(curve.x) for curve in curves)))
        values = np.array([[dict(zip(c.x, c.loss, strict=True))[at] for at in common] for c in curves])
        style = _look(label, list(runs))
        median = np.median(values, axis=0)
        (handles[_with_seeds(label, curves)],) = axis.plot(common, median, linewidth=1.6, **style)
        if len(curves) > 1:
            _band(axis, common, values.min(0), values.max(0), style)
        lowest = min(lowest, values.min())
    # the first steps would take most of the height
    highest = max(np.median([curve.loss[len(curve.loss) // 10] for curve in c]) for c in runs.values())
    axis.set(xlabel=x, ylabel=y, ylim=(lowest - 0.05 * (highest - lowest), highest))
    axis.set_xlim(left=0)
    axis.locator_params(axis="x", integer=True)
    drawing.tidy(axis)
    _legend_below(figure, handles, 3)
    return figure


def loss_by_position(
    panels: Mapping[str, Mapping[str, PositionCurve]], context: int = 0, title: str = "", columns: int = 4
):
    """Perplexity against position, as Figure fig:deltanet_length_extrapolation: a panel per split.

    A dashed line marks the training length. The line of a label is the mean over its seeds, its band goes
    from the lowest to the highest seed. Below it, where given: the paired difference to the first label, and
    its 95 % interval over sequences. A single model's band is the interval of its mean over sequences.
    """
    columns, paired = min(columns, len(panels)), _any_difference(panels)
    rows, heights = -(-len(panels) // columns), [2.0, 1.0] if paired else [1.0]
    figure = figures.new_figure(max(5.0, 3.3 * columns), (4.2 if paired else 2.9) * rows + 0.7)
    grid = figure.subplots(
        rows * len(heights), columns, squeeze=False, gridspec_kw={"height_ratios": heights * rows}
    )
    labels, handles = list(dict.fromkeys(label for panel in panels.values() for label in panel)), {}
    cells = [divmod(i, columns) for i in range(rows * columns)]
    for (row, column), (split, curves) in zip(cells, panels.items(), strict=False):
        axes = [grid[row * len(heights) + k][column] for k in range(len(heights))]
        for label, curve in curves.items():
            style = _look(label, labels)
            handles[_with_seeds(label, curve.means)] = _position_line(axes[0], curve, style, len(labels) == 1)
            if curve.difference is not None:
                _difference_line(axes[1], curve, style)
        for axis in axes:
            _position_axis(axis, list(curves.values()), context)
        _limit_perplexity(axes[0], list(curves.values()))
        axes[0].set_title(domain(split), fontsize=10)
        axes[-1].set_xlabel("position (tokens)")
        if column == 0:
            axes[0].set_ylabel("perplexity")
            if paired:
                axes[1].set_ylabel(f"loss minus that\nof {labels[0]} (nats)", fontsize=8)
    for row, column in cells[len(panels) :]:
        for k in range(len(heights)):
            grid[row * len(heights) + k][column].axis("off")
    if title:
        figure.suptitle(title, fontsize=11)
    if context:
        handles["training length"] = figures.dashed_line("#555555", 1.0)
    _legend_below(figure, handles, 4)
    return figure


def _any_difference(panels: Mapping[str, Mapping[str, PositionCurve]]) -> bool:
    return any(curve.difference is not None for panel in panels.values() for curve in panel.values())


def _middles(curve: PositionCurve) -> np.ndarray:
    return (np.array(curve.edges[1:]) + np.array(curve.edges[:-1])) / 2


def _position_line(axis, curve: PositionCurve, style: dict, alone: bool):
    means = np.array(curve.means)
    if len(means) > 1:
        _band(axis, _middles(curve), np.exp(means.min(0)), np.exp(means.max(0)), style)
    elif alone:
        low, high = (means[0] + sign * Z * np.array(curve.errors) for sign in (-1, 1))
        _band(axis, _middles(curve), np.exp(low), np.exp(high), style)
    return axis.plot(_middles(curve), np.exp(means.mean(0)), linewidth=1.6, **style)[0]


def _difference_line(axis, curve: PositionCurve, style: dict) -> None:
    assert curve.difference is not None
    mean, error = (np.array(values) for values in curve.difference)
    axis.axhline(0, color="#444444", linewidth=0.9, zorder=1)
    _band(axis, _middles(curve), mean - Z * error, mean + Z * error, style)
    axis.plot(_middles(curve), mean, linewidth=1.4, **style)


def _band(axis, x, low, high, style: dict) -> None:
    axis.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _position_axis(axis, curves: Sequence[PositionCurve], context: int) -> None:
    """Ticks at the training length and its doubles, and a line at the first."""
    length = max(curve.edges[-1] for curve in curves)
    if context and length >= 2 * context:
        ticks = [context << i for i in range(length.bit_length()) if context << i <= length]
        axis.set_xticks(ticks, [f"{t:,}" if t == context or 4 * t > length else "" for t in ticks])
    if context:
        axis.axvline(context, color="#555555", linestyle="--", linewidth=1.0, zorder=1)
    axis.set_xlim(left=0)
    drawing.tidy(axis)


def _limit_perplexity(axis, curves: Sequence[PositionCurve]) -> None:
    """Limits that show the differences: the first bin, which has little text to go by, may be cut off."""
    later = np.exp([values for curve in curves for mean in curve.means for values in mean[1:] or mean])
    room = 0.12 * (later.max() - later.min()) or 0.05 * later.max()
    axis.set_ylim(later.min() - room, later.max() + 2 * room)


def _legend_below(figure, handles: Mapping, columns: int) -> None:
    figure.legend(
        handles.values(),
        handles,
        loc="outside lower center",
        ncols=min(columns, len(handles)),
        fontsize=8,
        handlelength=3.0,
    )


def differences(rows: Sequence[Difference], title: str = ""):
    """Differences with their intervals, a line each, split by split; dots are the seeds. Left is better."""
    splits = list(dict.fromkeys(row.split for row in rows))
    windows = list(dict.fromkeys((row.low, row.high) for row in rows))
    figure = figures.new_figure(6.4, 0.28 * len(rows) + 0.18 * len(splits) + 1.5)
    axis, y, ticks = figure.subplots(), 0.0, []
    handles = {}
    for split in splits:
        for row in (row for row in rows if row.split == split):
            place = windows.index((row.low, row.high))
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
            axis.plot([row.lower, row.upper], [y, y], color=colour, linewidth=1.8, zorder=2)
            if len(row.by_seed) > 1:
                axis.plot(row.by_seed, [y] * len(row.by_seed), ".", color="#222222", markersize=3.5, zorder=4)
            name = f"positions {row.low:,} to {row.high:,}"
            handles[name] = axis.plot(
                [row.mean], [y], marker, color=colour, markersize=6, linestyle="none", zorder=3
            )[0]
            ticks.append((y, domain(split) if row is _first_of(rows, split) else ""))
            y -= 1
        y -= 0.6
    axis.axvline(0, color="#444444", linewidth=0.9, zorder=1)
    axis.set_ylim(y + 1.0, 0.6)
    axis.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    axis.tick_params(axis="y", length=0)
    first, second = (rows[0].first, rows[0].second) if rows else ("", "")
    axis.set_xlabel(f"loss of {second} minus loss of {first} (nats per token)\nleft of 0: {second} is better")
    axis.grid(axis="x", color="#e8e8e8", zorder=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(labelsize=8)
    if title:
        axis.set_title(title, fontsize=10)
    _legend_below(figure, handles, 3)
    return figure


def _first_of(rows: Sequence[Difference], split: str) -> Difference:
    return next(row for row in rows if row.split == split)


def spectrum_use(models: Mapping[str, Sequence[SpectrumUse]], title: str = ""):
    """The share of eigenvalues below 0 by layer: a panel per model, a line per split, a dot per head."""
    figure = figures.new_figure(max(5.0, 3.9 * len(models)), 3.5)
    axes = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    splits = list(dict.fromkeys(use.split for uses in models.values() for use in uses))
    top = max(0.05, *(max(use.negative) for uses in models.values() for use in uses))
    for axis, (label, uses) in zip(axes, models.items(), strict=True):
        for place, split in enumerate(splits):
            own = [use for use in uses if use.split == split]
            layers = [use.layer + 1 for use in own]
            shift = 0.12 * (place - (len(splits) - 1) / 2)
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
            for use in own:
                at = [use.layer + 1 + shift] * len(use.negative)
                axis.plot(at, use.negative, marker, color=colour, alpha=0.3, markersize=2.8)
            means = [float(np.mean(use.negative)) for use in own]
            axis.plot(layers, means, color=colour, marker=marker, markersize=5, label=domain(split))
        axis.set_title(label, fontsize=10)
        axis.set(xlabel="layer", ylim=(-0.03 * top, 1.1 * top))
        axis.xaxis.get_major_locator().set_params(integer=True)
        drawing.tidy(axis)
    axes[0].set_ylabel("share of eigenvalues below 0")
    if title:
        figure.suptitle(title, fontsize=11)
    handles, names = axes[0].get_legend_handles_labels()
    _legend_below(figure, dict(zip(names, handles, strict=True)), 5)
    return figure


def _look(label: str, labels: Sequence[str]) -> dict:
    """Dashes by range; colours by range for a single family, else by family."""
    parts = [name.rsplit(" ", 1) if name.endswith("]") else [name, ""] for name in labels]
    families = list(dict.fromkeys(family for family, _ in parts))
    family, eigenvalues = parts[list(labels).index(label)]
    alone = len(families) == 1 and len(labels) <= len(STYLES)
    place = list(STYLES).index(eigenvalues) if alone and eigenvalues in STYLES else families.index(family)
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": STYLES.get(eigenvalues, "-")}


def _with_seeds(label: str, seeds: Sequence) -> str:
    return label if len(seeds) == 1 else f"{label}, {len(seeds)} seeds"
