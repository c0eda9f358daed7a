"""Exact reflections as weights: the smallest change of the projections that gives them on every token."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.errors import UserError
from statetrack.layers.deltanet import DeltaNet
from statetrack.snapping.geometry import Representation
from statetrack.snapping.learned import Learned

SATURATED = 100.0  # logit of beta: sigmoid is 1 in float32, and at -100 too small to change a state
KEY_NORM = 128.0  # of keys before their normalisation, whose eps of 1e-6 would otherwise shorten them
LOWEST_VALUE = -0.27  # silu is nowhere below -0.2785
LARGEST_ERROR = 1e-3  # of a written transition; it is near 1e-6 where the embeddings are independent


@dataclass(frozen=True)
class ExactHead:
    """One head with exact transitions: S_t = T (Z + R_t ... R_1 D) + what the start token wrote beside T."""

    head: int
    representation: Representation
    keys: list[np.ndarray]  # per token, (r, K): unit vectors of its reflections in the order applied
    isometry: np.ndarray  # T (K, r)
    centre: np.ndarray  # Z (r, V), the fixed point


def fit_values(keys: list[np.ndarray], isometry: np.ndarray, centre: np.ndarray):
    """The fixed point and the signs of keys for which all values v = (T Z)^T k are in the range of silu.

    k and -k are the same reflection, so each key takes the sign with the less negative values. Where that is
    not enough, the column of Z is shortened: every Z is the fixed point of exact reflections.
    """
    S = isometry @ centre
    signed = [k * np.where((k @ S).min(1) >= (-k @ S).min(1), 1.0, -1.0)[:, None] for k in keys]
    lowest = np.concatenate([k @ S for k in signed]).min(axis=0, initial=0.0)
    return signed, centre * np.minimum(1.0, LOWEST_VALUE / np.minimum(lowest, LOWEST_VALUE))


@torch.no_grad()
def write(mixer: DeltaNet, learned: Learned, exact: list[ExactHead]) -> None:
    """Set keys, betas and values of all tokens; heads that are not in `exact` get beta 0 everywhere."""
    X, m = learned.inputs, len(learned.tokens)
    if m + 1 > X.shape[1] or torch.linalg.matrix_rank(X) < m + 1:
        raise UserError(
            f"snap: the embeddings of the {m + 1} tokens are linearly dependent at width {X.shape[1]}, so "
            "their keys cannot be set one by one. Train with a larger --d-model."
        )
    n, H = mixer.config.householders, mixer.heads
    keys = (X @ mixer.to_k.weight.T.double()).view(m + 1, n, H, mixer.K)
    values = (X @ mixer.to_v.weight.T.double()).view(m + 1, n, H, mixer.V)
    logits = (X @ mixer.to_beta.weight.T.double()).view(m + 1, n, H)
    logits[:, :, [h for h in range(H) if h not in {e.head for e in exact}]] = -SATURATED
    for e in exact:
        S = torch.from_numpy(e.isometry @ e.centre)
        logits[:m, :, e.head] = -SATURATED
        for x, vectors in enumerate(e.keys):
            r, k = len(vectors), torch.from_numpy(vectors)
            keys[x, :r, e.head] = KEY_NORM * k
            values[x, :r, e.head] = inverse_silu(k @ S)
            logits[x, :r, e.head] = SATURATED
    for linear, target in ((mixer.to_k, keys), (mixer.to_v, values), (mixer.to_beta, logits)):
        _set_outputs(linear, X, target.flatten(1))


def _set_outputs(linear: nn.Linear, X: Tensor, target: Tensor) -> None:
    """The nearest weights with W x = target for every row x of X."""
    W = linear.weight.double()
    linear.weight.copy_(W + (torch.linalg.pinv(X) @ (target - X @ W.T)).T)


def check_written(error: float, learned: Learned) -> None:
    """Refuse transitions that differ from exact ones by more than rounding."""
    if error > LARGEST_ERROR:
        raise UserError(
            f"snap: the transitions can be written only to {error:.1g} in float32, because the embeddings of "
            f"the {len(learned.tokens) + 1} tokens nearly depend on each other at width "
            f"{learned.inputs.shape[1]}. Train with a larger --d-model."
        )


def inverse_silu(v: Tensor) -> Tensor:
    """The larger z with silu(z) = v, for v >= -0.2784, by bisection in float64."""
    low, high = torch.full_like(v, -1.2784645427610738), v.clamp(min=0) + 0.3
    for _ in range(80):
        middle = (low + high) / 2
        above = F.silu(middle) > v
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return torch.where(v == 0, 0.0, (low + high) / 2)
