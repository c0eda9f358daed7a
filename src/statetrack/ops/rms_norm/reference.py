"""Root-mean-square normalisation by `torch.nn.functional.rms_norm`: the definition."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_reference(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """s = x + y (x alone when y is None) and weight * s / sqrt(mean(s^2) + eps), the mean over the last axis.

    Shapes: x, y and both results (..., N); weight (N,). Halves are normalised in float32.
    """
    s = x if y is None else x + y
    dtype = torch.promote_types(s.dtype, torch.float32)
    out = F.rms_norm(s.to(dtype), s.shape[-1:], weight.to(dtype), eps)
    return s, out.to(out_dtype)
