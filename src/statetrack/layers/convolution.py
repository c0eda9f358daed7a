"""The short causal convolution that DeltaNet, Mamba and xLSTM put in front of their recurrence."""

import torch
from torch import Tensor, nn

from statetrack.layers.mixer import Packing, offsets
from statetrack.ops import short_convolution


class ShortConvolution(nn.Conv1d):
    """Each channel filtered over its last `width` values, then SiLU where asked for (`silu`).

    Time before channels, (B, T, C); the state holds the last width - 1 inputs, (B, C, width - 1). A Conv1d
    for its parameters' names and initial values.
    """

    def __init__(self, channels: int, width: int, bias: bool):
        super().__init__(channels, channels, width, groups=channels, bias=bias)

    def forward(  # type: ignore[override]
        self, x: Tensor, state: Tensor | None = None, *, silu: bool = False
    ) -> tuple[Tensor, Tensor]:
        y = short_convolution(x, self.taps, self.bias, silu=silu, initial_state=state)
        return y, self.next_state(x, state)

    def packed(self, x: Tensor, packing: Packing, *, silu: bool = False) -> Tensor:
        """Packed sequences (1, N, C), each from an empty past; there is no state to carry on from."""
        return short_convolution(x, self.taps, self.bias, silu=silu, **offsets(packing))

    @property
    def taps(self) -> Tensor:
        """The weights, (C, width)."""
        return self.weight.squeeze(1)

    def next_state(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        """The state after the inputs x, which came after `state`."""
        past = self.kernel_size[0] - 1
        kept = x[:, max(0, x.shape[1] - past) :].mT
        if kept.shape[-1] < past:  # a short sequence keeps some of what came before it
            before = x.new_zeros(x.shape[0], x.shape[2], past) if state is None else state.to(x.dtype)
            kept = torch.cat([before[..., kept.shape[-1] :], kept], dim=-1)
        return kept
