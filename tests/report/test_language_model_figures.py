"""Figures about language models show the numbers they are given."""

import numpy as np
import pytest

from statetrack.lm.compare import Difference
from statetrack.lm.layout import bin_edges, layout_of
from statetrack.lm.measured import Measured, Perplexities
from statetrack.lm.spectrum import SpectrumUse
from statetrack.report import figures, language_models
from statetrack.report.language_models import PositionCurve, TrainingCurve

BOTH = ("DeltaNet [0,1]", "DeltaNet [-1,1]")


def difference(split, mean, low=0, high=64):
    return Difference(
        split, *BOTH, low, high, mean, mean - 0.1, mean + 0.2, (mean, mean), (0.1, 0.1), 20, 1000
    )


def test_training_curves_show_median_and_range_of_the_seeds():
    curves = [TrainingCurve([1, 2, 3], loss) for loss in ([5, 3, 2], [6, 4, 1], [9, 9, 9])]
    figure = language_models.training_curves({BOTH[0]: curves, BOTH[1]: curves[:1]})
    (axis,) = figure.axes
    assert axis.lines[0].get_ydata().tolist() == [6, 4, 2]
    assert axis.lines[1].get_ydata().tolist() == [5, 3, 2]
    assert len(axis.collections) == 1, "a band for several seeds only"
    assert {t.get_text() for t in figure.legends[0].get_texts()} == {f"{BOTH[0]}, 3 seeds", BOTH[1]}


def test_perplexity_is_the_exponential_of_the_mean_loss_at_the_middle_of_its_bin():
    panels = {"heldout-code": {BOTH[0]: PositionCurve([0, 10, 30], [[1.0, 2.0], [3.0, 4.0]], [0.1, 0.1])}}
    figure = language_models.loss_by_position(panels, context=10)
    line = figure.axes[0].lines[0]
    assert line.get_xdata().tolist() == [5, 20]
    assert line.get_ydata().tolist() == pytest.approx(np.exp([2, 3]).tolist())
    assert figure.axes[0].get_title() == "code"
    assert list(figure.axes[0].lines[1].get_xdata()) == [10, 10]
    band = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (pytest.approx(np.e), pytest.approx(np.exp(4)))


def test_the_band_of_one_seed_is_its_interval_over_sequences():
    panels = {"heldout": {"Mamba": PositionCurve([0, 10], [[2.0]], [0.1])}}
    band = language_models.loss_by_position(panels).axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (pytest.approx(np.exp(1.804)), pytest.approx(np.exp(2.196)))


def test_panels_are_made_of_measured_losses():
    layout = layout_of(np.array([0, 9]), bin_edges(4, 2))
    models = tuple(
        Measured(f"{label}{seed}", label, {"heldout": np.full(4, 2.0 + seed)}, seed)
        for label in BOTH
        for seed in (0, 1)
    )
    panels = language_models.position_panels(Perplexities("", "long", {"heldout": layout}, models))
    assert panels["heldout"][BOTH[1]].means == [[1.0, 1.0], [1.5, 1.5]]
    assert panels["heldout"][BOTH[1]].edges == [0, 2, 4]


def test_ranges_of_one_family_differ_in_colour_and_dashes():
    lines = (
        language_models.training_curves({name: [TrainingCurve([1, 2], [3, 2])] for name in BOTH})
        .axes[0]
        .lines
    )
    assert lines[0].get_color() != lines[1].get_color()
    assert lines[0].get_linestyle() != lines[1].get_linestyle()


def test_families_differ_in_colour_and_their_ranges_in_dashes():
    names = (*BOTH, "Mamba [0,1]", "Mamba [-1,1]")
    lines = language_models.training_curves({n: [TrainingCurve([1, 2], [3, 2])] for n in names}).axes[0].lines
    colours = [line.get_color() for line in lines]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert lines[0].get_linestyle() == lines[2].get_linestyle() != lines[3].get_linestyle()


def test_intervals_reach_from_their_lower_to_their_upper_end():
    rows = [
        difference("heldout-code", -0.3),
        difference("heldout-code", 0.1, 32),
        difference("heldout-math", 0),
    ]
    (axis,) = language_models.differences(rows).axes
    thick = [line for line in axis.lines if line.get_linewidth() == 1.8]
    assert [list(line.get_xdata()) for line in thick] == [[row.lower, row.upper] for row in rows]
    assert [t.get_text() for t in axis.get_yticklabels()] == ["code", "", "math"]
    assert "left of 0: DeltaNet [-1,1] is better" in axis.get_xlabel()


def test_the_use_of_the_spectrum_is_the_mean_over_heads():
    uses = [SpectrumUse("heldout", i, 9, (0.2, 0.4 + i / 10), (0.0, 0.0), ((0.0,) * 5,) * 2) for i in (0, 1)]
    axis = language_models.spectrum_use({"DeltaNet [-1,1]": uses}).axes[0]
    line = next(line for line in axis.lines if line.get_label() == "held-out text")
    assert list(line.get_xdata()) == [1, 2]
    assert list(line.get_ydata()) == pytest.approx([0.3, 0.35])


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_equal_results_give_equal_files(kind):
    one, other = (figures.save(language_models.differences([difference("a", 0.1)]), kind) for _ in range(2))
    assert one == other
