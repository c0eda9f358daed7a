"""The linear part of the chunked selective scan, in blocks that fit the cache.

    h_t = a_t h_{t-1} + B_t x_t        y_t = sum_n C_t h_t

A block is some sequences for some steps. Its states, (sequences, steps, G, N, P), are the largest tensor in
memory: they fit the cache and are overwritten once read. Between blocks only the entering state is saved.
Sequences come first, so that PyTorch's threads divide a block in the same way in every call and each finds
its part in its own cache; channels come last, so that every broadcast runs along them. D = G P: G groups of P
channels share B and C.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from statetrack.ops.selective_scan.block_recurrence import scan_backward, scan_forward

# Numbers to update per PyTorch call, and numbers per block. Below the first, the overhead of a call (2 us on
# a CPU) dominates and PyTorch leaves threads idle. Above the second, a block no longer fits the cache.
STEP = {"cpu": 1 << 16, "cuda": 1 << 20}
BLOCK = {"cpu": 1 << 20, "cuda": 1 << 25}
# Steps of a lane, and the maximum number of lanes of a block: both loops over a block are then equally long.
LANE = 64
LOG2_E = math.log2(math.e)


class BlockSize(NamedTuple):
    sequences: int
    steps: int
    lane: int | None  # steps per lane, see `block_recurrence`


def block_size(batch: int, channels: int, N: int, device: str = "cpu") -> BlockSize:
    """The size of a block, by width alone: lengths change nothing but how many blocks there are.

    At least N steps, so that the states saved between blocks are never more numbers than u.
    """
    step, block = (sizes.get(device, sizes["cuda"]) for sizes in (STEP, BLOCK))
    width = max(1, channels * N)
    sequences = max(1, min(batch, step // width))
    numbers = sequences * width  # of one step
    if numbers > step // 32:
        return BlockSize(sequences, max(N, 16, block // numbers), None)
    lanes = max(min(LANE, step // 8 // numbers), -(-N // LANE))
    return BlockSize(sequences, lanes * LANE, LANE)


class BlockedScan:
    """The recurrence over one call's inputs, with the memory its blocks share.

    Shapes: delta, x (B, T, G, P); A (G, N, P); B and C each (B, T, G, N), or (G, N, P) if constant.
    """

    def __init__(self, delta: Tensor, x: Tensor, A: Tensor, B: Tensor, C: Tensor, signed: bool):
        self.delta, self.x, self.A, self.B, self.C, self.signed = delta, x, A, B, C, signed
        # exp2 takes a third of the time of exp on a CPU.
        self.A_log2 = A * LOG2_E
        batch, T, groups, channels = x.shape
        sequences, steps, self.lane = block_size(batch, groups * channels, A.shape[1], x.device.type)
        self.rows, self.times = list(_slices(batch, sequences)), list(_slices(T, steps))
        self._memory = [x.new_empty(min(batch, sequences) * min(T, steps) * A.numel()) for _ in range(3)]

    def forward(self, state: Tensor, checkpoints: Tensor | None) -> Tensor:
        """y. `state` (B, G, N, P) becomes the last one; fills `checkpoints`, one per chunk."""
        y = torch.empty_like(self.x)
        for rows in self.rows:
            for i, times in enumerate(self.times):
                if checkpoints is not None:
                    checkpoints[i, rows] = state[rows]
                _, h = self._states(rows, times, state[rows])
                y[rows, times] = channels_from_states(_select(self.C, rows, times), h)
                state[rows] = h[:, -1]
        return y

    def backward(
        self, checkpoints: Tensor, dy: Tensor, dstate: Tensor, wanted: set[str]
    ) -> dict[str, Tensor]:
        """The gradients in `wanted`. `dstate`, of the last state, is overwritten by that of the first state.

            g_t = C_t dy_t + a_{t+1} g_{t+1}                         the gradient of h_t
            dB_t = sum_d g_t x_t        dC_t = sum_d h_t dy_t        dx_t = sum_n B_t g_t
            w_t = g_t h_{t-1} a'_t      ddelta_t = sum_n w_t A       dA = sum_t w_t delta_t

        with a' the derivative of a in delta A: a itself in the range [0,1], a + 1 in [-1,1]. "y" in `wanted`
        recomputes the outputs, for the gradient of the gate.
        """
        out = {name: torch.empty_like(self.x) for name in ("x", "y", "delta") if name in wanted}
        out |= {name: torch.zeros_like(getattr(self, name)) for name in ("A", "B", "C") if name in wanted}
        for rows in self.rows:
            for i, times in reversed(list(enumerate(self.times))):
                self._backward_block(out, rows, times, checkpoints[i, rows], dy[rows, times], dstate[rows])
        return out

    def _backward_block(
        self, out: dict[str, Tensor], rows: slice, times: slice, state: Tensor, dy: Tensor, dstate: Tensor
    ) -> None:
        """`backward` of one block: `state` enters it, `dstate` is the gradient of the state leaving it."""
        a, h = self._states(rows, times, state)
        B, C = _select(self.B, rows, times), _select(self.C, rows, times)
        if "y" in out:
            out["y"][rows, times] = channels_from_states(C, h)
        if "C" in out:
            _select(out["C"], rows, times).add_(weight_gradients(C, h, dy))
        g = self._state_gradients(a, C, dy, dstate)
        if "B" in out:
            _select(out["B"], rows, times).add_(weight_gradients(B, g, self.x[rows, times]))
        if "x" in out:
            out["x"][rows, times] = channels_from_states(B, g)
        if "A" in out or "delta" in out:
            w = self._decay_gradients(a, h, g, state)
            if "A" in out:
                weighted = torch.mul(w, self.delta[rows, times].unsqueeze(-2), out=h).flatten(0, 1).flatten(1)
                # A product with ones is faster than sum().
                out["A"] += torch.mv(weighted.t(), weighted.new_ones(weighted.shape[0])).view_as(self.A)
            if "delta" in out:
                out["delta"][rows, times] = w.mul_(self.A).sum(-2)

    def _states(self, rows: slice, times: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        """a and h of one block that `state` enters."""
        delta, x = self.delta[rows, times], self.x[rows, times]
        a, h = (self._block(i, x) for i in (0, 1))
        torch.mul(delta.unsqueeze(-2), self.A_log2, out=a)
        torch.exp2(a, out=a)
        if self.signed:
            torch.add(a.new_full((), -1.0), a, alpha=2, out=a)
        states_from_channels(_select(self.B, rows, times), x, out=h)
        scan_forward(a, h, state, self.lane)
        return a, h

    def _state_gradients(self, a: Tensor, C: Tensor, dy: Tensor, dstate: Tensor) -> Tensor:
        """g of one block. `dstate`, of the state that leaves it, becomes that of the state that entered."""
        g = self._block(2, dy)
        states_from_channels(C, dy, out=g)
        scan_backward(a, g, dstate, self.lane)
        return g

    def _decay_gradients(self, a: Tensor, h: Tensor, g: Tensor, state: Tensor) -> Tensor:
        """w of one block, in the memory of a.

        a' h comes before its product with g: where a has underflowed to zero, g h may overflow.
        """
        for decay, before in ((a[:, :1], state.unsqueeze(1)), (a[:, 1:], h[:, :-1])):
            if self.signed:
                torch.addcmul(before, before, decay, out=decay)
            else:
                decay.mul_(before)
        return a.mul_(g)

    def _block(self, i: int, like: Tensor) -> Tensor:
        """Memory for N numbers, (b, L, G, N, P), in place of every one of `like`, (b, L, G, P)."""
        shape = (*like.shape[:3], self.A.shape[1], like.shape[3])
        return self._memory[i][: math.prod(shape)].view(shape)


def states_from_channels(weights: Tensor, x: Tensor, *, out: Tensor) -> None:
    """out = B x: one value per channel, (.., G, P), becomes one per state, (.., G, N, P)."""
    torch.mul(x.unsqueeze(-2), weights if weights.ndim == 3 else weights.unsqueeze(-1), out=out)


def channels_from_states(weights: Tensor, h: Tensor) -> Tensor:
    """sum_n C h: one value per channel from one per state."""
    if weights.ndim == 3:
        return (weights * h).sum(-2)
    return torch.matmul(weights.unsqueeze(-2), h).squeeze(-2)


def weight_gradients(weights: Tensor, h: Tensor, dy: Tensor) -> Tensor:
    """The gradient of `channels_from_states` in its weights: sum_d h dy, also over b and t if constant."""
    if weights.ndim == 3:
        return (h * dy.unsqueeze(-2)).sum((0, 1))
    return torch.matmul(dy.unsqueeze(-2), h.mT).squeeze(-2)


def _select(weights: Tensor, rows: slice, times: slice) -> Tensor:
    """The part of B or C that a block uses; all of it if constant."""
    return weights if weights.ndim == 3 else weights[rows, times]


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
