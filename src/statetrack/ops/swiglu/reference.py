"""The gated activation in plain PyTorch: the definition."""

import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(x: Tensor) -> Tensor:
    """silu(x[..., :W]) * x[..., W:]. Shapes: x (..., 2 W), result (..., W)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_product_reference(x: Tensor, weight: Tensor) -> Tensor:
    """swiglu(x) W^T. Shapes: x (..., 2 w); weight W (n, w); result (..., n)."""
    return F.linear(swiglu_reference(x), weight)
