"""The loss of a linear read-out by `torch.nn.functional`: the definition. It holds all logits."""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy_reference(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """The sum over counted positions of log(sum_c exp(z_c)) - z_target with z = W x.

    Shapes: x (..., D); weight W (classes, D); targets (...), whole numbers.
    """
    logits = F.linear(x, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten().long(), ignore_index=ignore_index, reduction="sum")
