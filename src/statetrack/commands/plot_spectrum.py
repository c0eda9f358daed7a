"""statetrack plot-spectrum: the eigenvalues of a trained model's transitions, as text and histogram."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from statetrack.commands.flags import parse, take_first, take_plugins
from statetrack.errors import UserError
from statetrack.files import write_atomically
from statetrack.layers import DeltaNetConfig
from statetrack.report.spectrum_figure import spectrum_figure
from statetrack.run import load_run
from statetrack.spec import RunSpec
from statetrack.spectrum import Spectrum, learned_spectra

MAX_TOKENS = 16  # larger vocabularies get no table by token


@dataclass(frozen=True)
class SpectrumOptions:
    """Histogram of the eigenvalues of a run's learned transitions: `statetrack plot-spectrum RUN`.

    --plugin FILE.py, or a module, registers the task and mixer of a run that has its own.
    """

    samples: int = 64  # sequences of the task, at the training length
    out: Path | None = None  # PNG file; RUN/spectrum.png when None


def main(arguments: Sequence[str]) -> None:
    run, flags = take_first(take_plugins(arguments))
    options = parse(SpectrumOptions, flags, "statetrack plot-spectrum RUN")
    if run is None:
        raise UserError("plot-spectrum: give the folder of a finished run first.")
    if options.samples < 1:
        raise UserError(f"plot-spectrum: samples is {options.samples}, expected at least 1.")
    spec, model = load_run(run)
    spectra = learned_spectra(model, spec, options.samples)
    print(as_text(spectra))
    title = f"{type(spec.task).__name__}, {type(spec.model.mixer).__name__.removesuffix('Config')}"
    eigenvalues = getattr(spec.model.mixer, "eigenvalues", "")
    out = options.out or Path(run) / "spectrum.png"
    figure = spectrum_figure(spectra, f"Learned transitions: {title} {eigenvalues}".rstrip(), _axis(spec))
    write_atomically(out, [figure])
    print(f"\nSee {out}")


def _axis(spec: RunSpec) -> str:
    mixer = spec.model.mixer
    if isinstance(mixer, DeltaNetConfig):
        return "eigenvalue 1 - beta" if mixer.householders == 1 else "eigenvalue, real part"
    return "eigenvalue of the transition"


def as_text(spectra: Sequence[Spectrum]) -> str:
    """Fractions by range for every layer, and means by token if the vocabulary is small."""
    lines = []
    for spectrum in spectra:
        real = spectrum.real
        extremes = f"from {real.min():.3f} to {real.max():.3f}"
        lines.append(f"layer {spectrum.layer + 1}: {real.numel()} eigenvalues {extremes}")
        lines += [f"  {name:<14}{share:>8.1%}" for name, share in spectrum.shares().items()]
        if spectrum.share_complex():
            lines.append(f"  complex       {spectrum.share_complex():>8.1%}")
        by_token = spectrum.lowest_by_token()
        if len(by_token) <= MAX_TOKENS:
            means = ", ".join(f"{token}: {value:+.2f}" for token, value in by_token.items())
            lines.append(f"  mean of the lowest eigenvalue by token  {means}")
    return "\n".join(lines)
