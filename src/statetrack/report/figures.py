"""Figures, drawn from results; no model is loaded."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from statetrack.errors import require

# The colour-blind-safe palette of Okabe and Ito; line styles distinguish curves in grey print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = {"[0,1]": (0, (4, 2)), "[-1,1]": "-", "unit-circle": (0, (1, 1))}


@dataclass(frozen=True)
class Curve:
    """Accuracy against length."""

    model: str
    eigenvalues: str
    lengths: Sequence[int]
    accuracy: Sequence[float]


@dataclass(frozen=True)
class Panel:
    title: str
    curves: Sequence[Curve]
    train_length: int
    chance: float


def new_figure(width: float, height: float, dpi: int = 130):
    """An empty matplotlib figure, sizes in inches."""
    require("matplotlib", extra="report", for_="drawing figures")
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def dashed_line(colour: str, width: float):
    """A handle for legends."""
    require("matplotlib", extra="report", for_="drawing figures")
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linestyle="--", linewidth=width)


def save(figure, kind: str) -> bytes:
    """The figure as "png", "svg" or "pdf"; no dates inside, so that equal results give equal files."""
    buffer = io.BytesIO()
    metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    matplotlib = require("matplotlib", extra="report", for_="drawing figures")
    with matplotlib.rc_context({"svg.hashsalt": "statetrack"}):  # else an SVG has random names inside
        figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()


def plain_logarithmic_ticks(axis) -> None:
    """Where the axis spans at most two powers of ten: 0.1, 0.5, 1 instead of powers."""
    from matplotlib import ticker

    low, high = axis.get_ylim()
    decades = math.log10(high / low)
    if decades > 2:
        return
    between = (1.0, 2.0, 5.0) if decades > 0.5 else tuple(range(1, 10))
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=between))
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())


def accuracy_against_length(panels: Sequence[Panel], title: str) -> bytes:
    """A PNG with one panel per task: the training length and guessing are dotted lines."""
    figure = new_figure(4.6 * len(panels), 4.0, dpi=150)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    models = list(dict.fromkeys(curve.model for panel in panels for curve in panel.curves))
    for axis, panel in zip(axes, panels, strict=True):
        _draw(axis, panel, models)
    axes[0].set_ylabel("accuracy at that position")
    figure.suptitle(title, fontsize=12)
    return save(figure, "png")


def panel_pictures(panels: Sequence[Panel]) -> list[bytes]:
    """The same panels as one SVG each, for a page that places them side by side or below each other."""
    models = list(dict.fromkeys(curve.model for panel in panels for curve in panel.curves))
    pictures = []
    for panel in panels:
        figure = new_figure(4.2, 3.8)
        axis = figure.subplots()
        _draw(axis, panel, models)
        axis.set_ylabel("accuracy at that position")
        pictures.append(save(figure, "svg"))
    return pictures


def _draw(axis, panel: Panel, models: Sequence[str]) -> None:
    """Colour and marker by model, the same in every panel; dashes by range. Markers of models are offset."""
    for curve in panel.curves:
        place = models.index(curve.model)
        axis.plot(
            curve.lengths,
            curve.accuracy,
            color=COLOURS[place % len(COLOURS)],
            linestyle=STYLES[curve.eigenvalues],
            linewidth=2,
            marker=MARKERS[place % len(MARKERS)],
            markersize=6,
            markevery=(place, 2),
            label=f"{curve.model} {curve.eigenvalues}",
        )
    axis.axvline(panel.train_length, color="#666666", linestyle=":", linewidth=1.2)
    axis.annotate(
        f"trained on {panel.train_length}",
        (panel.train_length, 0.28),
        (4, 0),
        textcoords="offset points",
        fontsize=7.5,
        color="#444444",
    )
    axis.axhline(panel.chance, color="#777777", linestyle=(0, (1, 2)), linewidth=1.0, zorder=0)
    axis.annotate(  # beside the plot, where no curve is
        "guessing",
        (1, panel.chance),
        (3, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        fontsize=7.5,
        color="#555555",
        annotation_clip=False,
    )
    axis.set(title=panel.title, xlabel="sequence length (tokens)", ylim=(-0.03, 1.06))
    axis.set_xscale("log", base=2)
    ticks = [panel.train_length * m for m in (0.25, 0.5, 1, 2, 4, 8) if panel.train_length * m >= 4]
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    axis.grid(axis="y", color="#eeeeee", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(
        fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, frameon=False, handlelength=3.6
    )
