"""Layer normalisation by `torch.nn.functional.layer_norm`: the definition."""

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_norm_reference(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """s = x + y (x alone when y is None) and its norm over the last axis, times the weight, plus the bias.

    Shapes: x, y and both results (..., N); weight and bias (N,). Halves are normalised in float32.
    """
    s = x if y is None else x + y
    dtype = torch.promote_types(s.dtype, torch.float32)
    out = F.layer_norm(s.to(dtype), s.shape[-1:], weight.to(dtype), bias.to(dtype), eps)
    return s, out.to(out_dtype)
