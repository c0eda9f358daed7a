"""The norm of heads, the skip and the output gate in plain PyTorch: the definition."""

import torch
import torch.nn.functional as F
from torch import Tensor


def head_norm_reference(
    h: Tensor,
    weight: Tensor,
    eps: float,
    skip: Tensor | None,
    c: Tensor | None,
    z: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """weight * u, or (weight * u + skip * c) silu(z), with u the layer norm of each head of h (..., H, D).

    Shapes: weight and skip (H D,); c, z and the result (..., H D). Halves are computed in float32.
    """
    dtype = torch.promote_types(h.dtype, torch.float32)
    y = F.layer_norm(h.to(dtype), h.shape[-1:], eps=eps).flatten(-2) * weight
    if skip is not None and c is not None and z is not None:
        y = (y + skip * c) * F.silu(z.to(dtype))
    return y.to(out_dtype)
