"""The norms of the backbone, and a residual added in the pass of the norm that reads it."""

from torch import Tensor, nn

from statetrack.layers.mixer import fuses, working_dtype
from statetrack.ops import add_rms_norm, rms_norm


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm; on a GPU in one kernel each way, and under autocast in the dtype that linear maps read."""

    def forward(self, x: Tensor) -> Tensor:
        if not fuses(x):
            return super().forward(x)
        return rms_norm(x, self.weight, self.eps or 0.0, out_dtype=working_dtype(x))


def normalise_sum(norm: nn.Module, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """x + y, or x where there is no y, and its norm."""
    if isinstance(norm, RMSNorm) and fuses(x):
        return add_rms_norm(x, y, norm.weight, norm.eps or 0.0, out_dtype=working_dtype(x))
    x = x if y is None else x + y
    return x, norm(x)
