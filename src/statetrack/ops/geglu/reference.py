"""The gated activation with GELU in plain PyTorch: the definition."""

import torch.nn.functional as F
from torch import Tensor


def geglu_reference(x: Tensor) -> Tensor:
    """gelu(x[..., :W]) * x[..., W:], GELU by the error function. Shapes: x (..., 2 W), result (..., W)."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up
