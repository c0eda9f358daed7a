"""Which dtype a layer computes in."""

import torch
from torch import Tensor

from statetrack.layers.fusion import fuses


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32 if it is in half precision: the gates of a recurrence must not be rounded to bfloat16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype a fused kernel writes for the linear map that reads it next: autocast's where it is on.

    Without fusion it is that of x, and autocast inserts a cast.
    """
    if fuses(x) and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
