"""Figures. They read results, never models."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

from statetrack.errors import require

# Okabe and Ito's colours: told apart by every kind of colour vision. Line styles serve grey print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = {"[0,1]": (0, (4, 2)), "[-1,1]": "-"}


@dataclass(frozen=True)
class Curve:
    """Accuracy against length."""

    label: str
    eigenvalues: str
    lengths: Sequence[int]
    accuracy: Sequence[float]


@dataclass(frozen=True)
class Panel:
    title: str
    curves: Sequence[Curve]
    train_length: int
    chance: float


def accuracy_against_length(panels: Sequence[Panel], title: str) -> bytes:
    """A PNG with one panel per task: training length dotted, chance as a thin grey line."""
    require("matplotlib", extra="report", for_="drawing figures")
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    figure = Figure(figsize=(4.6 * len(panels), 3.6), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw(axis, panel)
    axes[0].set_ylabel("accuracy at that position")
    figure.suptitle(title, fontsize=12)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw(axis, panel: Panel) -> None:
    models = list(dict.fromkeys(curve.label.rsplit(" ", 1)[0] for curve in panel.curves))
    for curve in panel.curves:
        axis.plot(
            curve.lengths,
            curve.accuracy,
            color=COLOURS[models.index(curve.label.rsplit(" ", 1)[0]) % len(COLOURS)],
            linestyle=STYLES[curve.eigenvalues],
            linewidth=2,
            label=curve.label,
        )
    axis.axvline(panel.train_length, color="#666666", linestyle=":", linewidth=1.2)
    axis.annotate(
        "trained up to here",
        (panel.train_length, 0.015),
        (4, 0),
        textcoords="offset points",
        fontsize=7.5,
        color="#444444",
    )
    axis.axhline(panel.chance, color="#bbbbbb", linewidth=0.8, zorder=0)
    axis.set(title=panel.title, xlabel="sequence length (tokens)", ylim=(-0.03, 1.06))
    axis.set_xscale("log", base=2)
    ticks = [panel.train_length * m for m in (0.25, 0.5, 1, 2, 4, 8) if panel.train_length * m >= 4]
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    axis.grid(axis="y", color="#eeeeee", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, loc="center right", bbox_to_anchor=(1.0, 0.72), framealpha=0.9)
