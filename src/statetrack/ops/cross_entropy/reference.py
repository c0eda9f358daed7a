"""Cross-entropy by `torch.nn.functional.cross_entropy`: the definition."""

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy_reference(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """The mean over counted positions of log(sum_c exp(logits_c)) - logits_target.

    Shapes: logits (..., classes); targets (...), whole numbers.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten().long(), ignore_index=ignore_index)
