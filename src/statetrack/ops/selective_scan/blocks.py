"""The core of the chunked selective scan: h_t = a_t h_{t-1} + B_t x_t, y_t = sum_n C_t h_t, block by block.

A block is a few sequences for a few steps. Its states, (steps, sequences, G, N, P), are the largest thing
ever held: they fit a cache, and are thrown away once read. Between blocks only the entering state is kept.
Time comes first, so that one step is one contiguous slab and one call; channels come last, so that every
broadcast runs along them. D = G P: channels are split in the groups that share B and C.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Numbers one step should update, and numbers one block should hold, measured (see docs/selective_scan.md).
# Below the first, the cost of a call shows (2 us on a CPU) and PyTorch leaves its threads idle.
# Above the second, a block leaves the cache.
STEP = {"cpu": 1 << 16, "cuda": 1 << 20}
BLOCK = {"cpu": 1 << 20, "cuda": 1 << 25}
LOG2_E = math.log2(math.e)


def block_size(batch: int, T: int, channels: int, N: int, device: str = "cpu") -> tuple[int, int]:
    """Sequences and steps of a block. Neither depends on the values, nor the steps on the length.

    At least N steps each, so that the states kept between blocks are never more numbers than u.
    """
    import os
    if "BLK" in os.environ:
        b,l=map(int,os.environ["BLK"].split(",")); return min(b,batch),min(l,T)
    step, block = (sizes.get(device, sizes["cuda"]) for sizes in (STEP, BLOCK))
    width = max(1, channels * N)
    sequences = min(batch, max(1, step // width))
    steps = min(T, max(N, 16, block // (max(1, sequences) * width)))
    return sequences, steps


class Wanted(NamedTuple):
    """Which gradients the backward has to give. `decay` stands for delta and A."""

    x: bool
    decay: bool
    B: bool
    C: bool
    y: bool  # the outputs again: the gradient of the gate z reads them


class Scan:
    """The recurrence over one call's inputs, with the buffers its blocks share.

    Shapes: delta, x (T, B, G, P); A (G, N, P); B and C each (T, B, G, N), or (G, N, P) if constant.
    """

    def __init__(self, delta: Tensor, x: Tensor, A: Tensor, B: Tensor, C: Tensor, extended: bool):
        self.delta, self.x, self.A, self.B, self.C, self.extended = delta, x, A, B, C, extended
        # exp2 takes a third of the time of exp on a CPU.
        self.A_log2 = A * LOG2_E
        T, batch, groups, channels = x.shape
        self.sequences, self.steps = block_size(batch, T, groups * channels, A.shape[1], x.device.type)
        self._pool = {}

    @property
    def chunks(self) -> int:
        """How many blocks follow each other in time."""
        return -(-self.x.shape[0] // self.steps) if self.steps else 0

    def forward(self, state: Tensor, checkpoints: Tensor | None) -> tuple[Tensor, Tensor]:
        """y (T, B, G, P) and the last state (B, G, N, P). Fills `checkpoints` (chunks, B, G, N, P)."""
        y, last = torch.empty_like(self.x), state.clone()
        for rows in self._rows():
            for i, times in enumerate(self._times()):
                if checkpoints is not None:
                    checkpoints[i, rows] = last[rows]
                _, h = self._states(times, rows, last[rows])
                y[times, rows] = read(_cut(self.C, times, rows), h[1:])
                last[rows] = h[-1]
        return y, last

    def backward(self, checkpoints: Tensor, dy: Tensor, dstate: Tensor, wanted: Wanted) -> dict[str, Tensor]:
        """Gradients by name from dy (T, B, G, P) and the last state's, which becomes the first state's.

            g_t = C_t dy_t + a_{t+1} g_{t+1}                      the gradient of h_t
            dB_t = sum_d g_t x_t        dC_t = sum_d h_t dy_t        dx_t = sum_n B_t g_t
            w_t = g_t h_{t-1} da_t/d(delta_t A)        ddelta_t = sum_n w_t A        dA = sum_t w_t delta_t

        da/d(delta A) is a in the range [0,1] and a + 1 in [-1,1].
        """
        out = {name: torch.empty_like(self.x) for name, want in (("x", wanted.x), ("y", wanted.y)) if want}
        if wanted.decay:
            out |= {"delta": torch.empty_like(self.x), "A": torch.zeros_like(self.A)}
        out |= {name: torch.zeros_like(getattr(self, name)) for name in "BC" if getattr(wanted, name)}
        for rows in self._rows():
            for i, times in reversed(list(enumerate(self._times()))):
                a, h = self._states(times, rows, checkpoints[i, rows])
                B, C = _cut(self.B, times, rows), _cut(self.C, times, rows)
                if wanted.y:
                    out["y"][times, rows] = read(C, h[1:])
                if wanted.C:
                    _cut(out["C"], times, rows).add_(weigh(C, h[1:], dy[times, rows]))
                g = self._buffer("g", *a.shape)
                spread(C, dy[times, rows], g)
                slabs = g.unbind(0)[::-1]
                slabs[0].add_(dstate[rows])
                run(a.unbind(0)[:0:-1], slabs)
                torch.mul(a[0], g[0], out=dstate[rows])
                if wanted.B:
                    _cut(out["B"], times, rows).add_(weigh(B, g, self.x[times, rows]))
                if wanted.x:
                    out["x"][times, rows] = read(B, g)
                if wanted.decay:
                    ddelta, dA = self._decay_gradients(a, h[:-1], g, self.delta[times, rows])
                    out["delta"][times, rows] = ddelta
                    out["A"] += dA
        return out

    def _states(self, times: slice, rows: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        """a (steps, sequences, G, N, P) of a block, and h one step longer, from `state` in front on."""
        delta, x = self.delta[times, rows], self.x[times, rows]
        L, b, G, P = x.shape
        a = self._buffer("a", L, b, G, self.A.shape[1], P)
        h = self._buffer("h", L + 1, b, G, self.A.shape[1], P)
        torch.mul(delta.unsqueeze(-2), self.A_log2, out=a)
        torch.exp2(a, out=a)
        if self.extended:
            torch.add(a.new_tensor(-1.0), a, alpha=2, out=a)
        h[0] = state
        spread(_cut(self.B, times, rows), x, h[1:])
        run(a.unbind(0), h.unbind(0))
        return a, h

    def _decay_gradients(self, a: Tensor, before: Tensor, g: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Of delta and A through a; overwrites all three blocks. a times h comes first: a may have underflowed
        where g h would overflow."""
        w = before.addcmul_(before, a) if self.extended else before.mul_(a)
        w.mul_(g)
        weighted = torch.mul(w, delta.unsqueeze(-2), out=a).flatten(0, 1)
        # A product with ones sums faster than sum().
        dA = torch.mv(weighted.flatten(1).t(), weighted.new_ones(weighted.shape[0])).view_as(self.A)
        return w.mul_(self.A).sum(-2), dA

    def _buffer(self, name: str, *shape: int) -> Tensor:
        """A contiguous block, cut from memory that the blocks of one call share."""
        size = math.prod(shape)
        if name not in self._pool or self._pool[name].numel() < size:
            self._pool[name] = self.x.new_empty(size)
        return self._pool[name][:size].view(shape)

    def _rows(self) -> Iterator[slice]:
        return _slices(self.x.shape[1], self.sequences)

    def _times(self) -> Iterator[slice]:
        return _slices(self.x.shape[0], self.steps)


def run(decays: Sequence[Tensor], slabs: Sequence[Tensor]) -> None:
    """slabs[i + 1] += decays[i] slabs[i], in place and in order: the recurrence itself."""
    for decay, before, now in zip(decays, slabs, slabs[1:], strict=False):
        now.addcmul_(decay, before)


def spread(weights: Tensor, x: Tensor, out: Tensor) -> None:
    """out = B x: one value per channel (.., G, P) becomes one per state (.., G, N, P)."""
    torch.mul(x.unsqueeze(-2), weights if weights.ndim == 3 else weights.unsqueeze(-1), out=out)


def read(weights: Tensor, h: Tensor) -> Tensor:
    """sum_n C h: one value per channel (.., G, P) from one per state."""
    if weights.ndim == 3:
        return (weights * h).sum(-2)
    return torch.matmul(weights.unsqueeze(-2), h).squeeze(-2)


def weigh(weights: Tensor, h: Tensor, dy: Tensor) -> Tensor:
    """The gradient of `read` in the weights: sum_d h dy, or the sum over time and batch for constant ones."""
    if weights.ndim == 3:
        return (h * dy.unsqueeze(-2)).sum((0, 1))
    return torch.matmul(dy.unsqueeze(-2), h.mT).squeeze(-2)


def _cut(weights: Tensor, times: slice, rows: slice) -> Tensor:
    return weights if weights.ndim == 3 else weights[times, rows]


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, max(1, step)))
