"""The loss of a linear read-out for chunks of rows, in PyTorch alone; the equations are in by_chunks.py."""

import torch
from torch import Tensor

from statetrack.ops.linear_cross_entropy.by_chunks import register, run_op

MAX_LOGITS = 2**24  # at a time; in float32 64 MB, of which there are two


def linear_cross_entropy_chunked(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Same arguments and result as `linear_cross_entropy_reference`."""
    return run_op("chunked", x, weight, targets, ignore_index)


def _losses(z: Tensor, targets: Tensor, ignore_index: int, gradient: bool) -> Tensor:
    """The loss of every row of logits z; with `gradient`, z becomes softmax(z) - one_hot(target)."""
    counts = (targets != ignore_index)[:, None]
    target = targets[:, None].where(counts, 0)
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    wide = wide - wide.amax(1, keepdim=True)  # large logits keep their differences
    log_sum = wide.logsumexp(1, keepdim=True)
    losses = (log_sum - wide.gather(1, target)).where(counts, 0.0)
    if gradient:
        dz = wide.sub_(log_sum).exp_()
        dz.scatter_add_(1, target, torch.full_like(log_sum, -1.0))
        z.copy_(dz.mul_(counts))
    return losses.squeeze(1)


register("chunked", _losses, lambda: MAX_LOGITS)
