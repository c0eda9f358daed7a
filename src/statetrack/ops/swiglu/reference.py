"""The gated activation in plain PyTorch: the definition."""

import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(x: Tensor) -> Tensor:
    """silu(x[..., :W]) * x[..., W:]. Shapes: x (..., 2 W), result (..., W)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
