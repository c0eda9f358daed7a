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


def log_uniform_steps(n: int, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4) -> Tensor:
    """n biases b whose step sizes softplus(b) are log-uniform in [low, high] and at least `floor` (Gu and Dao
    2023).
    """
    steps = torch.exp(torch.empty(n).uniform_(math.log(low), math.log(high)))
    return inverse_softplus(steps.clamp(min=floor))


def small_init(weight: Tensor, d_model: int) -> None:
    """N(0, 2 / (5 d_model)) (Nguyen and Salazar 2019)."""
    nn.init.normal_(weight, std=math.sqrt(2 / (5 * d_model)))


def wang_init(weight: Tensor, d_model: int, layers: int) -> None:
    """N(0, (2 / layers)^2 / d_model) (Wang and Komatsuzaki 2021), for maps into the residual stream."""
    nn.init.normal_(weight, std=2 / layers / math.sqrt(d_model))
