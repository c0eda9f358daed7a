"""Initial values of weights that more than one layer uses."""

import math

import torch
from torch import Tensor, nn


def no_weight_decay(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter that the optimiser must not decay, such as A_log."""
    parameter.no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


def inverse_softplus(y: Tensor) -> Tensor:
    """x such that softplus(x) = y."""
    return y + torch.log(-torch.expm1(-y))


def log_uniform_steps(n: int, low: float = 1e-3, high: float = 0.1) -> Tensor:
    """n biases b whose step sizes softplus(b) are log-uniform in [low, high] (Gu and Dao 2023)."""
    steps = torch.exp(torch.empty(n).uniform_(math.log(low), math.log(high)))
    return inverse_softplus(steps)


def signed_steps(A: Tensor, gate: float = 0.6) -> Tensor:
    """Biases b such that the gate 2 exp(-softplus(b) A) - 1 is `gate`, for positive decay rates A.

    The steps of `log_uniform_steps` put gates at 0.8 and above, where the softplus is flat and a gate is far from
    -1. From here both ends are near, and the state still remembers some steps.
    """
    return inverse_softplus(-math.log((1 + gate) / 2) / A)


def opposite_rows(weight: Tensor, factor: float = 4.0) -> None:
    """Scale the rows of a map to one number per head, and make every second row the opposite of the one before.

    Of two such heads, one flips its state on the tokens on which the other keeps it. A layer with few gates
    then has one that starts in the right direction, whatever a task asks for.
    """
    weight *= factor
    weight[1::2] = -weight[: len(weight) - 1 : 2]


def small_init(weight: Tensor, d_model: int) -> None:
    """N(0, 2 / (5 d_model)) (Nguyen and Salazar 2019)."""
    nn.init.normal_(weight, std=math.sqrt(2 / (5 * d_model)))


def wang_init(weight: Tensor, d_model: int, layers: int) -> None:
    """N(0, (2 / layers)^2 / d_model) (Wang and Komatsuzaki 2021), for maps into the residual stream."""
    nn.init.normal_(weight, std=2 / layers / math.sqrt(d_model))
