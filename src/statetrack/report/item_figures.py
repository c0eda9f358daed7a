"""The figures of an item: curves over length, a grid of them, dots for a table, and learning curves."""

import math
from collections.abc import Callable, Sequence
from textwrap import wrap

import numpy as np

from statetrack.report import drawing, figures
from statetrack.report.coverage import partial
from statetrack.report.records import LOSS_FLOOR
from statetrack.report.results import ItemResults, Result
from statetrack.report.summary import Row, summarise
from statetrack.report.text import scale_words

MAX_POINTS = 400  # of a learning curve


def item_figure(results: ItemResults, kinds: Sequence[str] = ("svg", "png", "pdf")) -> dict[str, bytes]:
    """The figure of the item: as PNG and PDF with a title, as SVG without one, for pages, which have it."""
    rows = [row for row in summarise(results) if row.chosen]
    draw: dict[str, Callable] = {"curves": _curves, "grid": _grid, "dots": _dots}
    figure = draw[results.item.figure](results, rows)
    saved = {"svg": figures.save(figure, "svg")} if "svg" in kinds else {}
    columns = int(12 * figure.get_figwidth())  # characters that fit at this size
    lines = (results.item.what, scale_words(results.scale), partial(results))
    title = "\n".join(line for text in lines for line in wrap(text, columns))
    figure.suptitle(title, fontsize=11)
    return saved | {kind: figures.save(figure, kind) for kind in kinds if kind != "svg"}


def _curves(results: ItemResults, rows: list[Row]):
    """One panel per task, one legend for all: seeds thin, their mean thick."""
    panels = list(dict.fromkeys(row.run.panel for row in rows))
    families = drawing.families_of([row.run for row in rows])
    figure = figures.new_figure(max(5.5, 3.6 * len(panels)), 3.7)
    axes = figure.subplots(1, max(1, len(panels)), squeeze=False, sharey=True)[0]
    handles = {}
    for axis, panel in zip(axes, panels):
        for row in (row for row in rows if row.run.panel == panel):
            handles[drawing.name(row.run)] = _curve(axis, row, drawing.look(row.run, families))
        _finish(axis, panel, [row for row in rows if row.run.panel == panel], lower_limit(rows))
    axes[0].set_ylabel(_unit(results))
    _legend(figure, handles, panels)
    return figure


def _legend(figure, handles: dict, panels: list[str]) -> None:
    """One legend under all panels, with handles long enough for the dashes; the figure grows by its rows."""
    if handles:
        fitting = int(13 * figure.get_figwidth()) // (9 + max(map(len, handles)))  # by their characters
        columns = max(1, min(4, 1 + len(panels), len(handles), fitting))
        figure.set_figheight(figure.get_figheight() + 0.22 * -(-len(handles) // columns))
        place = "outside lower center"
        figure.legend(handles.values(), handles, loc=place, ncols=columns, fontsize=8, handlelength=3.4)


def _curve(axis, row: Row, style: dict, band: bool = False):
    """Seeds as thin lines and the mean as a thick one; with `band` a 95 % interval of the mean."""
    lengths = row.chosen[0].curve()[0]
    seeds = [result.curve()[1] for result in row.chosen]
    mean = [sum(values) / len(values) for values in zip(*seeds, strict=True)]
    thin = {key: value for key, value in style.items() if key in ("color", "linestyle")}
    if len(seeds) > 1 and not band:
        for values in seeds:
            axis.plot(lengths, values, linewidth=0.7, alpha=0.55, **thin)
    if band:
        samples = row.run.spec.evaluation.eval_samples / len(lengths)
        half = [
            drawing.interval(values, samples, row.run.spec.task.chance) for values in zip(*seeds, strict=True)
        ]
        low, high = ([m + sign * h for m, h in zip(mean, half, strict=True)] for sign in (-1, 1))
        axis.fill_between(lengths, low, high, color=style["color"], alpha=0.16, linewidth=0)
    every = max(1, len(lengths) // 7)
    return axis.plot(lengths, mean, linewidth=1.9, markersize=5, markevery=every, **style)[0]


def lower_limit(rows: Sequence[Row]) -> float:
    """The lower limit of an accuracy axis: below every mean, so that no curve or dot is cut off."""
    means = [np.mean([result.curve()[1] for result in row.chosen], axis=0).min() for row in rows]
    return min([-0.12, *(float(mean) - 0.06 for mean in means)])


def _finish(axis, title: str, rows: Sequence[Row], bottom: float) -> None:
    """Title, axes, the training length, and the accuracy of guessing."""
    lengths = rows[0].run.spec.training.train_lengths
    assert lengths is not None
    drawing.mark_training_length(axis, lengths[1])
    axis.axhline(0, color="#bbbbbb", linewidth=0.8, zorder=0)
    drawing.name_level(axis, 0, "guessing")
    majority = rows[0].majority
    if majority and majority > 0.07:  # near 0 it coincides with guessing
        drawing.mark_level(axis, majority, "majority")
    axis.set_title(title, fontsize=10)
    axis.set(xlabel="sequence length (tokens)", ylim=(bottom, 1.06))
    axis.set_xlim(left=0)
    drawing.tidy(axis)


def _grid(results: ItemResults, rows: list[Row]):
    """Tasks in columns, families of models in rows, a 95 % interval around every mean."""
    groups = {
        "Transformer": 0,
        "mLSTM": 1,
        "sLSTM": 1,
        "Mamba": 2,
        "DeltaNet": 3,
    }  # as in the paper; then ours
    panels = list(dict.fromkeys(row.run.panel for row in rows))
    numbers = sorted({groups.get(row.run.family, 4) for row in rows})
    families = drawing.families_of([row.run for row in rows])
    figure = figures.new_figure(max(6.5, 3.3 * len(panels) + 1.8), 2.3 * max(1, len(numbers)) + 0.6)
    axes = figure.subplots(max(1, len(numbers)), max(1, len(panels)), squeeze=False, sharex=True, sharey=True)
    for line, number in enumerate(numbers):
        handles = {}
        for column, panel in enumerate(panels):
            shown = [r for r in rows if r.run.panel == panel and groups.get(r.run.family, 4) == number]
            axis = axes[line][column]
            if not shown:
                axis.axis("off")
                axis.set_title(panel if line == 0 else "", fontsize=10)
                continue
            for row in shown:
                style = drawing.look(row.run, families)
                handles[drawing.name(row.run)] = _curve(axis, row, style, band=True)
            _finish(axis, panel if line == 0 else "", shown, lower_limit(rows))
            axis.set_xlabel("sequence length (tokens)" if line == len(numbers) - 1 else "")
        axes[line][0].set_ylabel("scaled accuracy")
        axes[line][-1].legend(
            handles.values(),
            handles,
            fontsize=7,
            loc="center left",
            bbox_to_anchor=(1.13, 0.5),  # beside the names of the levels
            handlelength=3.4,
        )
    return figure


def _dots(results: ItemResults, rows: list[Row]):
    """One panel per task: seeds as small dots, our best filled, the paper's best hollow."""
    panels = list(dict.fromkeys(row.run.panel for row in rows))
    labels = list(dict.fromkeys(drawing.name(row.run) for row in rows))[::-1]
    figure = figures.new_figure(max(6.5, 2.9 * len(panels) + 2.0), 0.3 * len(labels) + 1.9)
    axes = figure.subplots(1, max(1, len(panels)), squeeze=False, sharey=True)[0]
    left = min([-0.12, *(min(row.scores) - 0.06 for row in rows)])
    for axis, panel in zip(axes, panels):
        for row in (row for row in rows if row.run.panel == panel):
            y = labels.index(drawing.name(row.run))
            axis.scatter(row.scores, [y] * len(row.scores), s=14, color="#7a7a7a", zorder=2)
            axis.scatter([row.best], [y], s=46, color="#0072B2", zorder=3)
            paper = row.published
            published = paper and (paper.median if paper.best is None else paper.best)
            if published is not None:
                axis.scatter(
                    [published], [y], s=70, marker="D", facecolors="none", edgecolors="#D55E00", zorder=4
                )
        axis.set_title(panel, fontsize=9)
        axis.set(xlabel="scaled accuracy", xlim=(left, 1.08))
        axis.axvline(0, color="#bbbbbb", linewidth=0.8, zorder=0)
        drawing.tidy(axis)
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].set_ylim(-0.6, len(labels) - 0.4)
    ours = axes[0].scatter([], [], s=46, color="#0072B2")
    seeds = axes[0].scatter([], [], s=14, color="#7a7a7a")
    theirs = axes[0].scatter([], [], s=70, marker="D", facecolors="none", edgecolors="#D55E00")
    names = ["ours, best seed", "ours, every seed", "paper, best (median where it prints no best)"]
    figure.legend(
        [ours, seeds, theirs],
        names,
        loc="outside lower center",
        ncols=1 if len(panels) == 1 else 3,
        fontsize=8,
    )
    return figure


def learning_curves(results: ItemResults) -> bytes:
    """An SVG of training loss against step, a panel per task.

    The line of a model is the median over its seeds, its band goes from the lowest to the highest seed. A
    dotted line marks guessing: -ln(chance), the loss of giving every possible answer the same probability.
    A run whose metrics.jsonl is lost has no line.
    """
    rows = [row for row in summarise(results) if row.chosen]
    panels = list(dict.fromkeys(row.run.panel for row in rows))
    families = drawing.families_of([row.run for row in rows])
    figure = figures.new_figure(max(5.5, 3.6 * len(panels)), 3.2)
    axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    handles = {}
    for axis, panel in zip(axes, panels):
        shown = [row for row in rows if row.run.panel == panel]
        for row in shown:
            look = drawing.look(row.run, families)
            seeds = [seed for seed in row.chosen if seed.rows()]
            if not seeds:
                continue
            steps, low, middle, high = loss_band(seeds)
            style = {"color": look["color"], "linestyle": look["linestyle"]}
            if len(seeds) > 1:
                axis.fill_between(steps, low, high, color=look["color"], alpha=0.16, linewidth=0)
            (handles[drawing.name(row.run)],) = axis.plot(steps, middle, linewidth=1.3, **style)
        drawing.mark_level(axis, -math.log(shown[0].run.spec.task.chance))
        axis.set_title(panel, fontsize=10)
        axis.set(xlabel="training step", yscale="log")
        axis.locator_params(axis="x", nbins=4, integer=True)  # numbers of steps are long
        figures.plain_logarithmic_ticks(axis)
        drawing.tidy(axis)
    axes[0].set_ylabel("training loss (nats)")
    _legend(figure, handles, panels)
    return figures.save(figure, "svg")


def loss_band(seeds: Sequence[Result]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, and the lowest, median and highest loss of the seeds there.

    Kept runs have fewer rows, at steps of their own; between two of them the logarithm is interpolated.
    """
    curves = [[(row["step"], max(row["loss"], LOSS_FLOOR)) for row in seed.rows()] for seed in seeds]
    steps = np.array(sorted({step for curve in curves for step, _ in curve}))
    steps = steps[:: max(1, len(steps) // MAX_POINTS)]
    logs = [np.interp(steps, [s for s, _ in curve], np.log([x for _, x in curve])) for curve in curves]
    low, middle, high = np.exp(np.quantile(logs, [0, 0.5, 1], axis=0))
    return steps, low, middle, high


def _unit(results: ItemResults) -> str:
    return "sequence accuracy" if results.item.measure == "reach" else "scaled accuracy"
