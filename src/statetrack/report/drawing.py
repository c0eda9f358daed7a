"""Line styles shared by all figures of an item, distinguishable in grey and by colour-blind readers."""

from collections.abc import Sequence

from statetrack.experiments.item import LabelledRun
from statetrack.report.figures import COLOURS, MARKERS, STYLES

DASHES = STYLES | {"": (0, (5, 1, 1, 1))}
# The 97.5 % points of Student's t for 1, 2, ... degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def look(run: LabelledRun, families: Sequence[str]) -> dict:
    """Colour and marker by family, dashes by eigenvalue range, hollow markers for one layer."""
    # with a single family, colours distinguish the ranges
    place = families.index(run.family) if len(families) > 1 else list(DASHES).index(run.eigenvalues)
    colour, again = COLOURS[place % len(COLOURS)], place // len(COLOURS)
    return {
        "color": colour,
        "linestyle": DASHES[run.eigenvalues],
        "marker": MARKERS[(place + 3 * again) % len(MARKERS)],  # another one where a colour comes again
        "markerfacecolor": colour if run.spec.model.layers > 1 else "white",
    }


def name(run: LabelledRun) -> str:
    return run.label + (", ours" if run.ours else "")


def families_of(runs: Sequence[LabelledRun]) -> list[str]:
    return list(dict.fromkeys(run.family for run in runs))


def interval(values: Sequence[float], samples: float, chance: float) -> float:
    """Half-width of the 95 % interval of a mean scaled accuracy: over seeds, or over one seed's sequences."""
    n, mean = len(values), sum(values) / len(values)
    if n == 1:
        accuracy = min(max(chance + (1 - chance) * mean, 0.0), 1.0)
        return 1.96 * (accuracy * (1 - accuracy) / max(samples, 1)) ** 0.5 / (1 - chance)
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return (STUDENT[n - 2] if n - 2 < len(STUDENT) else 1.96) * (variance / n) ** 0.5


def mark_training_length(axis, length: int) -> None:
    axis.axvline(length, color="#555555", linestyle=":", linewidth=1.3, zorder=1)
    axis.annotate(
        f"trained to {length}",
        (length, 0.5),
        (3, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        rotation=90,
        va="center",
        fontsize=7,
        color="#444444",
    )


def mark_level(axis, value: float, name: str = "guessing") -> None:
    """A dotted line at what a model without knowledge gets, named beside the plot, where no curve is."""
    axis.axhline(value, color="#777777", linestyle=(0, (1, 2)), linewidth=1.0, zorder=0)
    name_level(axis, value, name)


def name_level(axis, value: float, name: str) -> None:
    """A name at the height `value`, to the right of the plot."""
    axis.annotate(
        name,
        (1, value),
        (3, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        fontsize=7,
        color="#555555",
        annotation_clip=False,
    )


def tidy(axis) -> None:
    axis.grid(axis="y", color="#e8e8e8", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
