"""Norms of the backbone, and the residual addition fused into the norm that reads its result."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.layers.fusion import fuses, may_read
from statetrack.layers.precision import working_dtype
from statetrack.ops.layer_norm import add_layer_norm
from statetrack.ops.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm; on a GPU one kernel in each direction, which writes the dtype that the next layer reads."""

    def __init__(self, width: int, eps: float):
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight  # read once: a parametrised weight is computed on every access
        if fuses(x):
            return rms_norm(x, weight, self.eps or 0.0, out_dtype=working_dtype(x))
        # under autocast x can be in half precision, which PyTorch's norm does not take with float32 weights
        return F.rms_norm(x.to(weight.dtype), self.normalized_shape, weight, self.eps).to(x.dtype)


def normalise(norm: nn.Module, x: Tensor, out_dtype: torch.dtype) -> Tensor:
    """norm(x), computed in float32 and returned in `out_dtype`."""
    if may_read(RMSNorm, norm):
        assert isinstance(norm, RMSNorm)
        return rms_norm(x, norm.weight, norm.eps or 0.0, out_dtype=out_dtype)
    return norm(x).to(out_dtype)


def normalise_sum(norm: nn.Module, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """s = x + y (x if y is None) and norm(s)."""
    if fuses(x) and may_read(RMSNorm, norm):
        assert isinstance(norm, RMSNorm)
        return add_rms_norm(x, y, norm.weight, norm.eps or 0.0, out_dtype=working_dtype(x))
    if fuses(x) and may_read(nn.LayerNorm, norm):
        assert isinstance(norm, nn.LayerNorm)
        if len(norm.normalized_shape) == 1 and norm.elementwise_affine and norm.bias is not None:
            return add_layer_norm(x, y, norm.weight, norm.bias, norm.eps, out_dtype=working_dtype(x))
    x = x if y is None else x + y
    return x, norm(x)
