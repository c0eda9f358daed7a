"""The short causal convolution in front of the recurrences of DeltaNet, Mamba and xLSTM."""

import torch
from torch import Tensor, nn

from statetrack.layers.mixer import Packing, offsets, returns_states
from statetrack.ops.short_convolution import short_convolution


class ShortConvolution(nn.Conv1d):
    """A causal depthwise convolution over the last `width` values of each channel, then SiLU if `silu`.

    Time before channels, (B, T, C). The state holds the last width - 1 inputs, (B, C, width - 1); with a
    `packing` of S sequences states are (S, C, width - 1), and None is returned where the packing asks for no
    states. A subclass of Conv1d for its parameter names and initial values.
    """

    def __init__(self, channels: int, width: int, bias: bool):
        super().__init__(channels, channels, width, groups=channels, bias=bias)

    def forward(  # type: ignore[override]
        self, x: Tensor, state: Tensor | None = None, *, silu: bool = False, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor | None]:
        after = self.next_state(x, state, packing)
        if packing is None or state is None:
            taken, places = x, None
        else:
            taken, packing, places = _behind_states(x, state, packing)
            state = None
        y = short_convolution(taken, self.taps, self.bias, silu=silu, initial_state=state, **offsets(packing))
        return y if places is None else y[:, places], after

    @property
    def taps(self) -> Tensor:
        """The weights, (C, width)."""
        return self.weight.squeeze(1)

    def next_state(
        self, x: Tensor, state: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor | None:
        """The state after the inputs x, which followed `state`; None for a packing that asks for none."""
        if not returns_states(packing):
            return None
        past = self.kernel_size[0] - 1
        if packing is not None:
            return _packed_next_state(x, state, packing, past)
        kept = x[:, max(0, x.shape[1] - past) :].mT
        if kept.shape[-1] < past:  # x is shorter than the state: keep the end of the previous one
            before = x.new_zeros(x.shape[0], x.shape[2], past) if state is None else state.to(x.dtype)
            kept = torch.cat([before[..., kept.shape[-1] :], kept], dim=-1)
        return kept


def _packed_next_state(x: Tensor, state: Tensor | None, packing: Packing, past: int) -> Tensor:
    """The last `past` inputs of every packed sequence in x (1, N, C), which followed `state`; (S, C, past).

    A sequence shorter than that keeps the end of its previous state, or zeros.
    """
    first, end = packing.cu_seqlens[:-1, None], packing.cu_seqlens[1:, None]
    places = end - past + torch.arange(past, device=x.device)  # (S, past)
    # a packing of empty sequences alone has no input to name: a step of zeros stands in for it
    inputs = x[0] if x.shape[1] else x.new_zeros(1, x.shape[2])
    kept = inputs[places.clamp(0, len(inputs) - 1)].mT
    inside = (places >= first)[:, None]
    if state is None:
        return kept.where(inside, 0)
    # place p of the sequence, counted from its start, is p + past in what was before it
    before = (places - first + past).clamp(max=past - 1)[:, None].expand(-1, x.shape[2], -1)
    return kept.where(inside, state.to(x.dtype).gather(-1, before))


def _behind_states(x: Tensor, state: Tensor, packing: Packing) -> tuple[Tensor, Packing, Tensor]:
    """Packed sequences with their states (S, C, past) put in front of them as inputs.

    Returns the longer row, its packing, and the places (N,) of the inputs x in it.
    """
    (S, _, past), N = state.shape, x.shape[1]
    starts = packing.cu_seqlens + past * torch.arange(S + 1, device=x.device)
    steps = torch.arange(N, device=x.device)
    sequence = torch.bucketize(steps, packing.cu_seqlens[1:], right=True)
    places = steps + past * (sequence + 1)
    row = x.new_zeros(1, N + S * past, x.shape[2])
    row[:, places] = x
    before = starts[:-1, None] + torch.arange(past, device=x.device)  # (S, past)
    row[0, before] = state.to(x.dtype).mT
    return row, Packing(starts, packing.max_seqlen + past), places
