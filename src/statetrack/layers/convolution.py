"""The short causal convolution that DeltaNet and Mamba put in front of their recurrence."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ShortConvolution(nn.Conv1d):
    """Each channel filtered over its last `width` values: y_t = sum_i w_i x_{t-width+1+i}.

    Channels first, (B, C, T); the state holds the last width - 1 inputs, (B, C, width - 1).
    """

    def __init__(self, channels: int, width: int, bias: bool):
        super().__init__(channels, channels, width, groups=channels, bias=bias)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        past = self.kernel_size[0] - 1
        if state is None:
            x = F.pad(x, (past, 0))
        else:
            x = torch.cat([state.to(x.dtype), x], dim=-1)
        return super().forward(x), x[..., x.shape[-1] - past :]
