"""Root-mean-square norms, and the residual addition fused into the norm that reads its result."""

import torch
from torch import Tensor, nn

from statetrack.layers.fusion import fuses, may_read
from statetrack.layers.precision import working_dtype
from statetrack.ops import add_rms_norm, rms_norm


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm; on a GPU one kernel in each direction, which writes the dtype that the next layer reads."""

    def __init__(self, width: int, eps: float):
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        if not fuses(x):
            return super().forward(x)
        return rms_norm(x, self.weight, self.eps or 0.0, out_dtype=working_dtype(x))


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
    x = x if y is None else x + y
    return x, norm(x)
