"""Cross-entropy by `torch.nn.functional.cross_entropy`, or with its gradient summed in another order."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy_reference(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    centred: bool = False,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """The mean, or the sum, over counted positions of L - (1 - e) logits_target - e mean_c logits_c + z L^2.

        L = log(sum_c exp(logits_c))        z = `z_loss`        e = `smoothing`

    Shapes: logits (..., classes); targets (...), whole numbers.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    targets = targets.flatten().long()
    if not (centred or z_loss or smoothing):
        return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)
    counts = targets != ignore_index
    targets = torch.where(counts, targets, 0)
    losses = _centred(logits, targets) if centred else F.cross_entropy(logits, targets, reduction="none")
    if smoothing:
        above_mean = logits.gather(-1, targets[:, None])[:, 0] - logits.mean(-1)
        losses = losses + smoothing * above_mean
    if z_loss:
        losses = losses + z_loss * logits.logsumexp(-1).square()
    total = torch.where(counts, losses, 0.0).sum()
    return total / counts.sum() if reduction == "mean" else total


def _centred(logits: Tensor, targets: Tensor) -> Tensor:
    """log(1 + sum over c other than the target of exp(logits_c - logits_target)), (N,).

    The gradient of the target's logit is then minus the sum of the others, and not p - 1, which is 0 in
    float32 as soon as p rounds to 1.
    """
    differences = logits - logits.gather(-1, targets[:, None])
    own = torch.zeros_like(differences, dtype=torch.bool).scatter_(-1, targets[:, None], True)
    return differences.masked_fill(own, 0.0).logsumexp(-1)
