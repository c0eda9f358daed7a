"""The eigenvalues of a trained model's transitions A(x_t), over inputs of its own task."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from statetrack.layers import DeltaNetConfig, MixerConfig, Model
from statetrack.spec import RunSpec

# Bins of the summary, by the real part.
RANGES = (
    ("below -0.9", -torch.inf, -0.9),
    ("-0.9 to -0.1", -0.9, -0.1),
    ("-0.1 to 0.1", -0.1, 0.1),
    ("0.1 to 0.9", 0.1, 0.9),
    ("above 0.9", 0.9, torch.inf),
)


@dataclass(frozen=True)
class Spectrum:
    """One layer: eigenvalues (B, T, n), n over heads or channels, and the tokens (B, T) they belong to."""

    layer: int
    eigenvalues: Tensor
    tokens: Tensor

    @property
    def real(self) -> Tensor:
        return self.eigenvalues.real if self.eigenvalues.is_complex() else self.eigenvalues

    def shares(self) -> dict[str, float]:
        """The fraction of the eigenvalues in each range."""
        real = self.real
        return {name: ((real >= low) & (real < high)).float().mean().item() for name, low, high in RANGES}

    def share_complex(self) -> float:
        """The fraction with an imaginary part above 0.05: rotations."""
        if not self.eigenvalues.is_complex():
            return 0.0
        return (self.eigenvalues.imag.abs() > 0.05).float().mean().item()

    def lowest_by_token(self) -> dict[int, float]:
        """For every token, the mean over positions of its lowest eigenvalue: -1 where some head flips."""
        lowest = self.real.min(-1).values
        return {int(t): lowest[self.tokens == t].mean().item() for t in self.tokens.unique()}


@torch.no_grad()
def learned_spectra(model: Model, spec: RunSpec, samples: int = 64, seed: int = 0) -> list[Spectrum]:
    """The spectra of all layers but attention on `samples` sequences of the training length.

    Of a Householder transition only the eigenvalues that can differ from 1 are kept: 1 - beta for DeltaNet,
    as many as there are factors for DeltaProduct.
    """
    assert spec.training.train_lengths is not None
    length = spec.training.train_lengths[1]
    batch = spec.task.sample(samples, (length, length), Generator().manual_seed(seed))
    found = model.eval().transition_eigenvalues(batch.inputs)
    return [
        Spectrum(i, informative(values, spec.model.mixer_of(i)).flatten(2), batch.inputs)
        for i, values in enumerate(found)
        if values is not None
    ]


def informative(eigenvalues: Tensor, mixer: MixerConfig) -> Tensor:
    """Those of the eigenvalues (..., n) of a mixer's transitions that can differ from 1, (..., m)."""
    if not isinstance(mixer, DeltaNetConfig):
        return eigenvalues
    n = min(mixer.householders, eigenvalues.shape[-1])
    if n == 1:
        return eigenvalues[..., :1]  # the layer lists 1 - beta first
    farthest = (eigenvalues - 1).abs().argsort(dim=-1, descending=True)[..., :n]
    return eigenvalues.gather(-1, farthest)
