"""How much norm the transitions lose, for the training option `isometry`.

A layer that tracks a group keeps the distances between its states, so its transitions must be isometries
(docs/length.md). A mixer that can tell reports the eigenvalues e that it learns, 1 - beta and its gates, and

    mean over tokens and heads of 1 - e^2

is 0 just where all of them are 1 or -1. Only mixers of the delta rule report: there a write is part of the
reflection and the state stays bounded. A channel of linear attention that never forgets sums up all it reads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from statetrack.layers.hard_gates import gate_values
from statetrack.ops.delta_rule.reference import beta_values


@contextmanager
def collected_norm_loss(model: nn.Module, on: bool = True) -> Iterator[list[Tensor]]:
    """Within this block the mixers of `model` that can report add to the list; none does if `on` is False."""
    reports: list[Tensor] = []
    mixers: list[Any] = [m for m in model.modules() if getattr(m, "reports_norm_loss", False)] if on else []
    for mixer in mixers:
        mixer.norm_losses = reports
    try:
        yield reports
    finally:
        for mixer in mixers:
            mixer.norm_losses = None


def report_norm_loss(mixer: Any, beta_logits: Tensor, gates: dict[str, Tensor]) -> None:
    """Add 1 - e^2 of the betas and of the gates of a delta rule to the mixer's list, if anybody asks."""
    if mixer.norm_losses is None:
        return
    learned = [1 - beta_values(beta_logits, mixer.beta_max, mixer.hard_beta)]
    if "g" in gates or "a" in gates:
        learned.append(gate_values(gates))
    mixer.norm_losses.extend(1 - e.square() for e in learned)


def mean_norm_loss(reports: list[Tensor], real: Tensor | None = None) -> Tensor:
    """The sum of the means of the reports, (B, T n, ...) each with n in a row for each token.

    Over the tokens that are `real`, (B, T), where that is given.
    """
    if real is None:
        return torch.stack([lost.mean() for lost in reports]).sum()
    by_token = torch.stack([lost.reshape(*real.shape, -1).mean(2) for lost in reports]).sum(0)
    return torch.where(real, by_token, 0).sum() / real.sum()
