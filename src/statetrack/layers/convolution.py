"""The short causal convolution in front of the recurrences of DeltaNet, Mamba and xLSTM."""

import torch
from torch import Tensor, nn

from statetrack.layers.mixer import Packing, offsets
from statetrack.ops.short_convolution import short_convolution


class ShortConvolution(nn.Conv1d):
    """A causal depthwise convolution over the last `width` values of each channel, then SiLU if `silu`.

    Time before channels, (B, T, C). The state holds the last width - 1 inputs, (B, C, width - 1); with a
    `packing` each sequence starts from an empty state, and None is returned for the state. A subclass of
    Conv1d for its parameter names and initial values.
    """

    def __init__(self, channels: int, width: int, bias: bool):
        super().__init__(channels, channels, width, groups=channels, bias=bias)

    def forward(  # type: ignore[override]
        self, x: Tensor, state: Tensor | None = None, *, silu: bool = False, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor | None]:
        y = short_convolution(x, self.taps, self.bias, silu=silu, initial_state=state, **offsets(packing))
        return y, None if packing is not None else self.next_state(x, state)

    @property
    def taps(self) -> Tensor:
        """The weights, (C, width)."""
        return self.weight.squeeze(1)

    def next_state(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        """The state after the inputs x, which followed `state`."""
        past = self.kernel_size[0] - 1
        kept = x[:, max(0, x.shape[1] - past) :].mT
        if kept.shape[-1] < past:  # x is shorter than the state: keep the end of the previous one
            before = x.new_zeros(x.shape[0], x.shape[2], past) if state is None else state.to(x.dtype)
            kept = torch.cat([before[..., kept.shape[-1] :], kept], dim=-1)
        return kept
