"""What the shapes and layouts of a scan's inputs decide: how the work is cut up, and the launches.

A call object is made once per `layout` and then only started.
"""

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from statetrack.ops.selective_scan.triton_backward import (
    backward_kernel,
    backward_segment_kernel,
    reduce_kernel,
)
from statetrack.ops.selective_scan.triton_forward import forward_kernel, forward_segment_kernel, step_kernel
from statetrack.ops.selective_scan.triton_tiles import BY_CHANNEL, BY_NEITHER, BY_TIME
from statetrack.ops.triton_launch import Launcher
from statetrack.ops.triton_sizes import block, processors

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Steps and channels of a tile. The interpreter visits a tile's numbers one by one, so its tiles are small.
L, BD = (4, 8) if INTERPRETED else (16, 32)
# Programs every processor should get, of which it runs sixteen at once forward and eight backward; and the
# fewest tiles worth a segment of their own.
PROGRAMS = 16
SHORTEST = 4
# u, delta, A, B, C, D, z, bias, first state and cu_seqlens: tensors, or None for the last five
Inputs = tuple[Any, ...]


class Sizes(NamedTuple):
    blocks: int  # programs beside each other, along channels
    tiles: int  # of L steps; if sequences are packed, those of the row they lie in
    segments: int  # parts of time that run at once
    each: int  # tiles of a segment
    tail: int  # 1 if the last tile is half a one, or may be


def sizes(batch: int, channels: int, T: int, processors: int) -> Sizes:
    """How the work is cut up: along time only if sequences and channels leave processors idle.

    A segment costs a further half pass forward and a quarter of a pass backward.
    """
    blocks, tiles = -(-channels // BD), -(-T // L)
    segments = max(1, min(PROGRAMS * processors // (batch * blocks), tiles // SHORTEST))
    each = -(-tiles // segments)
    return Sizes(blocks, tiles, -(-tiles // each), each, int(0 < T % L <= L // 2))


def sizes_for(u: Tensor, cu_seqlens: Tensor | None = None) -> Sizes:
    """Packed sequences run whole: one program walks along a sequence, however long, for BD channels."""
    batch, channels, T = u.shape
    if cu_seqlens is not None:
        tiles = -(-T // L)
        return Sizes(-(-channels // BD), tiles, 1, tiles, 1)
    return sizes(batch, channels, T, processors(u.device))


def sequences(u: Tensor, cu_seqlens: Tensor | None) -> int:
    return u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def saved_numbers(u: Tensor, A: Tensor, cu_seqlens: Tensor | None, save: bool) -> int:
    """Of the state before every tile but the first, and of what segments multiply a state by.

    A packed sequence of T > 0 steps has (T - 1) // L such states; over all sequences of a row of R steps
    these add up to at most R // L, wherever the sequences begin.
    """
    (batch, channels, T), N, size = u.shape, A.shape[1], sizes_for(u, cu_seqlens)
    if not save:
        states = sequences(u, cu_seqlens) * size.segments
    else:
        states = batch * (size.tiles - 1) if cu_seqlens is None else T // L
    products = batch * size.segments if size.segments > 1 else 0
    return (states + products) * channels * N


def layout(inputs: Inputs) -> tuple:
    """All that the calls below depend on: the shapes of u and A give those of the others."""
    u, A, cu_seqlens = inputs[0], inputs[2], inputs[9]
    return (
        u.shape,
        A.shape,
        None if cu_seqlens is None else cu_seqlens.shape,
        u.get_device(),
        *[None if x is None else (x.stride(), x.dtype) for x in inputs],
    )


def _lies(x: Tensor) -> int:
    _, d, t = x.stride()
    return BY_CHANNEL if d == 1 else BY_TIME if t == 1 else BY_NEITHER


def _alike(x: Tensor, *others: Tensor) -> bool:
    strides = x.stride()
    return all(y.stride() == strides for y in others)


def _vectors(T: int, packed: bool, *tensors: Tensor) -> bool:
    """Whether eight numbers along time can be loaded at once wherever time is innermost."""
    if packed:  # a sequence may start at any step
        return False
    return T % 8 == 0 and not any(x.stride(0) % 8 or x.stride(1) % 8 for x in tensors if _lies(x) == BY_TIME)


def _filled(full: bool, T: int, size: Sizes, packed: bool) -> bool:
    """Whether every tile lies inside its sequence, and its block inside the channels (`full`)."""
    return full and not packed and T % (L >> size.tail) == 0


class StepCall:
    """The launch for one step, as in decoding."""

    def __init__(self, inputs: Inputs, out: Tensor, softplus: bool, extended: bool):
        u, delta, A, B, C, D, z, bias, state, _ = inputs
        (batch, channels, _), N, device = u.shape, A.shape[1], u.get_device()
        wide = 128 if N <= 16 else 32
        gate = u if z is None else z
        strides = [x.stride()[:2] for x in (u, delta, gate, out, B, C)]
        strides += [A.stride(), (0, 0, 0) if state is None else state.stride()]
        given = D is not None, z is not None, bias is not None, state is not None
        self.start = Launcher(
            step_kernel, device, (-(-channels // wide), batch),
            (channels, *(s for of_one in strides for s in of_one)),
            (N, block(N, 1), wide, *given, softplus, extended),
            warps=4,
        )  # fmt: skip

    def run(self, inputs: Inputs, out: Tensor, last: Tensor) -> Tensor:
        u, delta, A, B, C, D, z, bias, state, _ = inputs
        self.start(
            u, delta, A, B, C, A if D is None else D, u if z is None else z, A if bias is None else bias,
            last if state is None else state, out, last,
        )  # fmt: skip
        return last.new_empty(0)


class ForwardCall:
    """The launches for more steps: of the ends of segments, where time is cut, and of the whole."""

    def __init__(self, inputs: Inputs, out: Tensor, softplus: bool, extended: bool, save: bool):
        u, delta, A, B, C, D, z, bias, state, cu_seqlens = inputs
        (batch, channels, T), N, device = u.shape, A.shape[1], u.get_device()
        size, packed = sizes_for(u, cu_seqlens), cu_seqlens is not None
        self.saved = saved_numbers(u, A, cu_seqlens, save)
        self.products = batch * size.segments * N * channels if size.segments > 1 else 0
        full = channels % BD == 0
        self.segments = Launcher(
            forward_segment_kernel, device, (size.blocks, batch * (size.segments - 1)),
            (channels, T, size.each, size.segments, *u.stride(), *delta.stride(), *B.stride(), *A.stride()),
            (N, BD, L, bias is not None, softplus, extended, full, _alike(u, delta),
             _vectors(T, packed, u, delta), _lies(u), _lies(delta)),
            warps=1,
        )  # fmt: skip
        gate = u if z is None else z
        first = (0, 0, 0) if state is None else state.stride()
        self.whole = Launcher(
            forward_kernel, device, (size.blocks, sequences(u, cu_seqlens) * size.segments),
            (channels, T, size.tiles, size.each, size.segments,
             *u.stride(), *delta.stride(), *gate.stride(), *out.stride(), *B.stride(), *C.stride(),
             *A.stride(), *first),
            (N, BD, L, size.tail, D is not None, z is not None, bias is not None, state is not None, softplus,
             extended, size.segments > 1, packed, save, _filled(full, T, size, packed),
             _alike(u, delta, gate, out), _vectors(T, packed, u, delta, gate, out),
             _lies(u), _lies(delta), _lies(gate), _lies(out)),
            warps=1,
        )  # fmt: skip

    def run(self, inputs: Inputs, out: Tensor, last: Tensor) -> Tensor:
        """Fills outputs and last states; returns what the backward starts from."""
        u, delta, A, B, C, D, z, bias, state, cu_seqlens = inputs
        saved = last.new_empty(self.saved)
        ends = products = saved
        bias = A if bias is None else bias
        if self.products:
            products = saved[-self.products :]
            ends = torch.empty_like(products)
            self.segments(u, delta, A, B, bias, ends, products)
        self.whole(
            u, delta, A, B, C, A if D is None else D, u if z is None else z, bias,
            last if state is None else state, last if cu_seqlens is None else cu_seqlens,
            out, last, saved, ends, products,
        )  # fmt: skip
        return saved


class BackwardCall:
    """The launches of the backward: of the starts of segments, of the whole, and of sums over sequences."""

    def __init__(self, inputs: Inputs, dout: Tensor, dlast: Tensor | None, softplus: bool, extended: bool):
        u, delta, A, B, C, D, z, bias, state, cu_seqlens = inputs
        du, dB, dC = (torch.empty_like(x, device="meta") for x in (u, B, C))  # for their layouts
        (batch, channels, T), N, device = u.shape, A.shape[1], u.get_device()
        size, packed = sizes_for(u, cu_seqlens), cu_seqlens is not None
        rows = sequences(u, cu_seqlens) * size.segments
        self.number, self.segmented = size.segments, size.segments > 1
        self.sums = rows, N + 2, channels
        self.dBC = size.blocks, batch, size.tiles, N, 2 * L
        full = channels % BD == 0
        gate = u if z is None else z
        self.segments = Launcher(
            backward_segment_kernel, device, (size.blocks, batch * (size.segments - 1)),
            (channels, T, size.tiles, size.each, size.segments,
             *delta.stride(), *gate.stride(), *dout.stride(), *C.stride(), *A.stride()),
            (N, BD, L, z is not None, bias is not None, softplus, extended, full and T % L == 0,
             _alike(delta, gate, dout), _vectors(T, packed, delta, gate, dout),
             _lies(delta), _lies(gate), _lies(dout)),
            warps=1,
        )  # fmt: skip
        first, behind = ((0, 0, 0) if x is None else x.stride() for x in (state, dlast))
        given = D is not None, z is not None, bias is not None, state is not None, dlast is not None
        self.whole = Launcher(
            backward_kernel, device, (size.blocks, rows),
            (batch, channels, T, size.tiles, size.each, size.segments,
             *u.stride(), *delta.stride(), *gate.stride(), *dout.stride(), *du.stride(), *B.stride(),
             *C.stride(), *A.stride(), *first, *behind),
            (N, BD, L, size.tail, *given, softplus, extended, self.segmented, packed,
             _filled(full, T, size, packed),
             _alike(u, delta, gate, dout, du), _vectors(T, packed, u, delta, gate, dout, du),
             _lies(u), _lies(delta), _lies(gate), _lies(dout), _lies(du)),
            warps=1,
        )  # fmt: skip
        columns = -(-(N + 2) * channels // 32)
        self.reduce = Launcher(
            reduce_kernel, device, (columns + batch * size.tiles, 1),
            (size.blocks, batch, channels, T, size.tiles, rows, columns, *dB.stride(), *dC.stride()),
            (N, block(N, 1), L, 128 if rows > 32 else 32, 32),
            warps=4,
        )  # fmt: skip

    def run(self, inputs: Inputs, gradients: Inputs, saved: Tensor, dout: Tensor, dlast: Tensor | None):
        """Fills the gradients, the last of which are those of the states that enter segments."""
        u, delta, A, B, C, D, z, bias, state, cu_seqlens = inputs
        du, ddelta, dA, dB, dC, dD, dz, dbias, carry = gradients
        z, bias = u if z is None else z, A if bias is None else bias
        sums, dBC = carry.new_empty(*self.sums), carry.new_empty(*self.dBC)
        starts = products = carry
        if self.segmented:
            products = saved[-carry.numel() :]
            starts = torch.empty_like(carry)
            self.segments(delta, A, C, z, bias, dout, starts, products)
        self.whole(
            u, delta, A, B, C, A if D is None else D, z, bias, carry if state is None else state,
            carry if cu_seqlens is None else cu_seqlens, saved, dout, carry if dlast is None else dlast,
            du, ddelta, dz, dBC, sums, carry, starts, products,
        )  # fmt: skip
        self.reduce(dBC, sums, dB, dC, dA, dD, dbias)
