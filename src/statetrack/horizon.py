"""How long a trained group tracker stays right: measured, and predicted from shorter sequences.

A tracker must map every input with the same product to nearly the same hidden state. Errors of the learned
transitions accumulate, so the hidden states of one group element spread as sequences grow, while the means
of different elements stay a fixed distance apart. Let c_y be the mean hidden state of element y within the
training length. For a hidden state h of element y the closeness to the nearest wrong element is

    u(h) = max_z <h - c_y, c_z - c_y> / ||c_z - c_y||^2,

0 at its own centre and 1/2 on the decision boundary to z. The tracker is wrong on one sequence in ten once
the 90 % quantile of u reaches 1/2. At shorter lengths that quantile is modelled as a constant (the precision
of the state) plus a power of the length (the accumulation of errors). The fit to lengths of at most four
times the training length gives the prediction.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from statetrack.errors import UserError
from statetrack.layers import Model
from statetrack.spec import RunSpec
from statetrack.tasks import WordProblem

BREAK = 0.9  # accuracy at a position below which the tracker counts as broken
BORDER = 0.5  # the closeness on the decision boundary
FARTHEST = 1e6  # tokens: where the horizon of a model whose closeness does not grow is put


@dataclass(frozen=True)
class Growth:
    """q(t) = floor + scale * t^exponent."""

    floor: float
    scale: float
    exponent: float

    def reaches(self, value: float) -> float:
        """The length at which q is `value`; infinity if it never gets there."""
        if self.floor >= value:
            return 1.0
        if self.scale <= 0:
            return math.inf
        return ((value - self.floor) / self.scale) ** (1 / self.exponent)


@dataclass(frozen=True)
class Diagnosis:
    """At every position closeness (90 % quantile), spread and accuracy; the fit, and both break lengths."""

    train_length: int
    separation: float  # median distance from a centre to its nearest neighbour
    positions: list[int]
    closeness: list[float]
    spread: list[float]  # root mean square distance from the own centre
    accuracy: list[float]
    majority: list[float]  # accuracy of always giving the most frequent answer there
    fitted_to: int  # positions up to this one were used for the prediction
    growth: Growth | None  # None if accuracy is too low within the training length
    predicted: float  # infinity for "never"
    measured: int | None  # None for "not within the longest position"


def diagnose(model: Model, spec: RunSpec, longest: int, sequences: int = 256, seed: int = 0) -> Diagnosis:
    """Run the model on fresh sequences of `longest` tokens and diagnose its hidden states."""
    if not isinstance(spec.task, WordProblem):
        raise UserError(
            f"diagnose: the run's task is {type(spec.task).__name__}, expected a group word problem."
        )
    assert spec.training.train_lengths is not None
    train_length = spec.training.train_lengths[1]
    if longest < 2 * train_length:
        raise UserError(
            f"diagnose: longest is {longest}, expected at least "
            f"{2 * train_length}, twice the training length."
        )
    batch = spec.task.sample(sequences, (longest, longest), Generator().manual_seed(seed))
    hidden, right = hidden_states(model, batch.inputs, batch.targets)
    # position 0 is the start token
    return diagnose_states(hidden[:, 1:], batch.targets[:, 1:], right[:, 1:], train_length)


@torch.no_grad()
def hidden_states(model: Model, inputs: Tensor, targets: Tensor, piece: int = 128) -> tuple[Tensor, Tensor]:
    """The inputs of the head (B, T, d_model), and whether its answers are right (B, T); run in segments."""
    seen: list[Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda module, args: seen.append(args[0].float()))
    model.eval()
    right, state = [], None
    try:
        for tokens, labels in zip(inputs.split(piece, 1), targets.split(piece, 1), strict=True):
            logits, state = model(tokens, state)
            right.append(logits.argmax(-1) == labels)
    finally:
        hook.remove()
    return torch.cat(seen, 1), torch.cat(right, 1)


@torch.no_grad()
def horizon_in_training(model: Model, spec: RunSpec, sequences: int, seed: int = 0) -> tuple[float, float]:
    """The predicted horizon from sequences of the training length alone, and the closeness at their end.

    Nothing longer is looked at: the growth of the closeness is fitted to positions from an eighth of the
    training length on. The first number is at most `FARTHEST`, the second tells apart models that reach it.
    """
    assert isinstance(spec.task, WordProblem)
    assert spec.training.train_lengths is not None
    length, device = spec.training.train_lengths[1], model.head.weight.device
    batch = spec.task.sample(sequences, (length, length), Generator().manual_seed(seed))
    inputs, labels = (x.to(device) for x in batch)
    hidden, _ = model(inputs, read_out=False)
    right = model.head(hidden).argmax(-1) == labels
    found = diagnose_states(hidden[:, 1:].float(), labels[:, 1:], right[:, 1:], length, max(4, length // 8))
    return min(found.predicted, FARTHEST), found.closeness[-1]


def diagnose_states(
    hidden: Tensor, labels: Tensor, right: Tensor, train_length: int, first: int | None = None
) -> Diagnosis:
    """The diagnosis of hidden states (B, T, d) with labels (B, T); position i there is length i + 1.

    Positions are looked at from `first` on, half the training length when None.
    """
    classes = int(labels.max()) + 1
    centres, seen = _centres(hidden[:, :train_length], labels[:, :train_length], classes)
    distances = torch.cdist(centres, centres)
    nearest = distances.fill_diagonal_(torch.inf).min(1).values
    positions = _positions(first or max(4, train_length // 2), hidden.shape[1])
    closeness, spread, accuracy, majority = [], [], [], []
    for t in positions:
        # pooled over neighbouring positions, for less noisy quantiles
        window = slice(max(0, t - 4), t)
        h, y = hidden[:, window].flatten(0, 1), seen[labels[:, window].flatten()]
        h, y = h[y >= 0], y[y >= 0]
        closeness.append(_closeness(h, y, centres).quantile(BREAK).item() if len(y) else math.nan)
        spread.append((h - centres[y]).square().sum(-1).mean().sqrt().item() if len(y) else math.nan)
        accuracy.append(right[:, window].float().mean().item())
        majority.append(labels[:, window].flatten().bincount().max().item() / labels[:, window].numel())
    broken = [t for t, a in zip(positions, accuracy, strict=True) if a < BREAK]
    measured = broken[0] if broken else None
    fitted_to, growth = _fit(positions, closeness, accuracy, train_length)
    predicted = float(positions[0]) if growth is None else growth.reaches(BORDER)
    separation = nearest.median().item()
    return Diagnosis(
        train_length,
        separation,
        positions,
        closeness,
        spread,
        accuracy,
        majority,
        fitted_to,
        growth,
        predicted,
        measured,
    )


def _centres(hidden: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mean hidden state of every label that occurs, and the row of each label in it (-1 for none)."""
    flat, h = labels.flatten(), hidden.flatten(0, 1)
    found, rows = flat.unique(return_inverse=True)
    sums = h.new_zeros(len(found), h.shape[1]).index_add_(0, rows, h)
    index = torch.full((classes,), -1, device=h.device)
    index[found] = torch.arange(len(found), device=h.device)
    return sums / rows.bincount()[:, None], index


def _closeness(h: Tensor, y: Tensor, centres: Tensor) -> Tensor:
    """u(h) of the module's docstring, (N,)."""
    own, away = centres[y], h - centres[y]
    # <away, c_z - c_y> and ||c_z - c_y||^2 for all z at once, (N, classes)
    along = away @ centres.T - (away * own).sum(-1, keepdim=True)
    apart = torch.cdist(centres, centres).square()[y]
    apart = apart.masked_fill(apart == 0, torch.inf)
    return (along / apart).max(-1).values


def _positions(first: int, longest: int) -> list[int]:
    """About eight per doubling, starting at `first`."""
    steps = int(8 * math.log2(longest / first)) + 1
    return sorted({min(longest, round(first * 2 ** (i / 8))) for i in range(steps + 1)})


def _fit(
    positions: Sequence[int], closeness: Sequence[float], accuracy: Sequence[float], train_length: int
) -> tuple[int, Growth | None]:
    """`fit_growth` on positions up to 4 training lengths where the tracker is still accurate."""
    usable = []
    for t, q, a in zip(positions, closeness, accuracy, strict=True):
        if t > 4 * train_length or a < BREAK:
            break
        usable.append((t, max(q, 1e-6)))
    if len(usable) < 4:
        return positions[0], None
    return usable[-1][0], fit_growth(*np.array(usable).T)


def fit_growth(t: np.ndarray, q: np.ndarray) -> Growth:
    """The floor, scale and exponent with the smallest relative errors; neither floor nor scale is negative.

    The scale is 0 unless growth at least halves the squared error of a constant; less counts as noise.
    """
    constant = float((1 / q).sum() / (1 / q**2).sum())
    best, error = Growth(constant, 0.0, 1.0), float(((constant / q - 1) ** 2).sum()) / 2
    for exponent in np.arange(0.25, 2.01, 0.05):
        for floor in (np.ones_like(t), np.zeros_like(t)):
            design = np.stack([floor, t**exponent], 1) / q[:, None]
            solution = np.linalg.lstsq(design, np.ones_like(q), rcond=None)[0]
            residual = float(((design @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and residual < error:
                best, error = Growth(float(solution[0]), float(solution[1]), float(exponent)), residual
    return best
