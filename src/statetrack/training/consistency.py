"""The training option `consistency`: right answers that are the same are to have the same logits.

The cross-entropy stops asking once every answer within the training length is right by a wide margin. What
errors of the transitions remain still shows in the logits: two words with the same product leave a tracker in
states that differ a little, and so do their logits. Their scatter vanishes only where transitions are exact,
and near there its gradient is proportional to the errors, so that training goes on towards it.

States that are carried on from the batch before scatter by errors of the past, which no gradient of this
batch mends: with them the option does harm. So the short sequences of a curriculum, which may be carried on,
go without.
"""

import torch
from torch import Tensor

from statetrack.tasks import IGNORE


def logit_scatter(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean squared distance of right answers' logits from the mean of their class in the batch, float32.

        mean over n of |z_n - m_{y_n}|^2,    z_n the logits less their own mean,  m_y the mean of z_n, y_n = y

    Shapes: logits (..., C), targets (...). Wrong answers and targets to be ignored do not count; 0 where no
    answer is right. What softmax does not see, a number added to all logits, does not count either.
    """
    z = logits.reshape(-1, logits.shape[-1]).float()
    z = z - z.mean(-1, keepdim=True)
    y = targets.reshape(-1)
    right = (z.argmax(-1) == y) & (y != IGNORE)
    # sums by a product with zeros and ones have a fixed order on every device
    classes = torch.arange(z.shape[-1], device=z.device)
    members = ((y[:, None] == classes) & right[:, None]).to(z.dtype)
    # around its own mean a scatter has no gradient with respect to the mean
    means = (members.mT @ z.detach()) / members.sum(0).clamp(min=1)[:, None]
    distances = (z - members @ means).square().sum(-1)
    return torch.where(right, distances, 0.0).sum() / right.sum().clamp(min=1)
