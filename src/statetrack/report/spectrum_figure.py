"""Histogram of learned eigenvalues, one panel per layer."""

from collections.abc import Sequence

from statetrack.report import drawing, figures
from statetrack.report.figures import COLOURS
from statetrack.spectrum import Spectrum


def spectrum_figure(spectra: Sequence[Spectrum], title: str, label: str) -> bytes:
    """A PNG with a logarithmic y axis, so that rare eigenvalues near -1 are visible."""
    figure = figures.new_figure(max(5.0, 3.6 * len(spectra)), 3.4)
    axes = figure.subplots(1, len(spectra), squeeze=False, sharey=True)[0]
    edges = [-1.025 + 0.05 * i for i in range(42)]
    for axis, spectrum in zip(axes, spectra, strict=True):
        values = spectrum.real.flatten().clamp(-1.02, 1.02).numpy()
        axis.hist(
            values, bins=edges, weights=[1 / len(values)] * len(values), color=COLOURS[0], edgecolor="white"
        )
        for x in (-1, 0, 1):
            axis.axvline(x, color="#888888", linewidth=0.8, linestyle=":")
        axis.set_title(f"layer {spectrum.layer + 1}", fontsize=10)
        axis.set(xlabel=label, xlim=(-1.08, 1.08), yscale="log")
        drawing.tidy(axis)
    axes[0].set_ylabel("share of the transitions")
    figure.suptitle(title, fontsize=11)
    return figures.save(figure, "png")
