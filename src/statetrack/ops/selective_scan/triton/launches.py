"""The launches of a scan. A call object is made once per `layout` of the inputs and then only started."""

import torch
from torch import Tensor

from statetrack.ops.selective_scan.triton.backward import backward_kernel
from statetrack.ops.selective_scan.triton.forward import forward_kernel, step_kernel
from statetrack.ops.selective_scan.triton.order import order_kernel
from statetrack.ops.selective_scan.triton.plan import (
    INTERPRETED,
    PAIRED,
    Inputs,
    alike,
    all_in_pairs,
    in_vectors,
    is_filled,
    is_ordered,
    keeps_ungated,
    lies,
    saved_numbers,
    sequences,
    sizes_for,
)
from statetrack.ops.selective_scan.triton.reduce import reduce_kernel
from statetrack.ops.selective_scan.triton.segments import backward_segment_kernel, forward_segment_kernel
from statetrack.ops.selective_scan.triton.tiles import BY_CHANNEL
from statetrack.ops.selective_scan.triton.walk import stepwise_kernel
from statetrack.ops.triton_runtime.launcher import Launcher
from statetrack.ops.triton_runtime.sizes import block

# Channels of a program that walks step by step; the most states it keeps of each; and the registers that let
# a processor run twenty-three such programs.
WALK_CHANNELS = 32
WALK_STATES = 16
WALK_REGISTERS = 88
# With these a processor runs twelve programs of the backward that have two channels to a lane.
BACKWARD_REGISTERS = 168


def _given(inputs: Inputs) -> tuple[bool, ...]:
    """Whether there are D, z, a bias and a first state."""
    return tuple([x is not None for x in inputs[5:9]])


def _filled_up(inputs: Inputs, stand_in: Tensor) -> Inputs:
    """The inputs with some tensor in the place of each that is missing: a kernel will not look at it."""
    u, _, A, _, _, D, z, bias, state, cu_seqlens = inputs
    D, z, bias = A if D is None else D, u if z is None else z, A if bias is None else bias
    state, cu_seqlens = (stand_in if x is None else x for x in (state, cu_seqlens))
    return *inputs[:5], D, z, bias, state, cu_seqlens


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()


class StepCall:
    """The launch for one step, as in decoding."""

    def __init__(self, inputs: Inputs, out: Tensor, softplus: bool, extended: bool):
        u, delta, A, B, C, _, z, _, state, _ = inputs
        (batch, channels, _), N, device = u.shape, A.shape[1], u.get_device()
        wide = 128 if N <= 16 else 32
        strides = [x.stride()[:2] for x in (u, delta, u if z is None else z, out, B, C)]
        strides += [A.stride(), _strides(state)]
        self.start = Launcher(
            step_kernel, device, (-(-channels // wide), batch),
            (channels, *(s for of_one in strides for s in of_one)),
            (N, block(N, 1), wide, *_given(inputs), softplus, extended),
            warps=4,
        )  # fmt: skip

    def run(self, inputs: Inputs, out: Tensor, last: Tensor, _ungated: Tensor, _order: Tensor) -> Tensor:
        self.start(*_filled_up(inputs, last)[:9], out, last)
        return last.new_empty(0)


class ForwardCall:
    """The launches for more steps.

    If sequences are packed, one puts them in order. Where time is cut, one finds the ends of segments. One
    does the whole: step by step if that can be done, else in tiles.
    """

    def __init__(self, inputs: Inputs, out: Tensor, softplus: bool, extended: bool, save: bool):
        u, delta, A, B, C, _, z, bias, state, cu_seqlens = inputs
        (batch, channels, T), N, device = u.shape, A.shape[1], u.get_device()
        gate = u if z is None else z
        size, number, packed = sizes_for(u, cu_seqlens), sequences(u, cu_seqlens), cu_seqlens is not None
        (L, BD), segmented, ordered = size.tile, size.segments > 1, is_ordered(cu_seqlens)
        self.saved = saved_numbers(u, A, cu_seqlens, save)
        self.products = batch * size.segments * N * channels if segmented else 0
        self.sort = Launcher(order_kernel, device, (-(-number // 16), 1), (number,), (16, 256), warps=4)
        self.ordered = ordered
        self.segments = Launcher(
            forward_segment_kernel, device, (size.blocks, batch * (size.segments - 1)),
            (channels, T, size.each, size.segments, *u.stride(), *delta.stride(), *B.stride(), *A.stride()),
            (N, BD, L, bias is not None, softplus, extended, channels % BD == 0, alike(u, delta),
             in_vectors(T, packed, u, delta), lies(u), lies(delta)),
            warps=1,
        )  # fmt: skip
        keep = save and keeps_ungated(u, z, cu_seqlens)
        timed = u, delta, gate, out
        self.walks = not segmented and N <= WALK_STATES and all(lies(x) == BY_CHANNEL for x in timed)
        if self.walks:
            each = 8 if INTERPRETED else WALK_CHANNELS  # few, so that tests have several programs
            self.whole = Launcher(
                stepwise_kernel, device, (-(-channels // each), number),
                (channels, T, *[s for x in timed for s in (x.stride(0), x.stride(2))],
                 *B.stride(), *C.stride(), *A.stride(), *_strides(state)),
                (N, block(N, 1), each, L, *_given(inputs), softplus, extended, packed, ordered, save,
                 keep, alike(*timed)),
                warps=1, registers=WALK_REGISTERS,
            )  # fmt: skip
        else:
            self.whole = Launcher(
                forward_kernel, device, (size.blocks, number * size.segments),
                (channels, T, size.tiles, size.each, size.segments,
                 *[s for x in timed for s in x.stride()], *B.stride(), *C.stride(), *A.stride(),
                 *_strides(state)),
                (N, BD, L, size.tail, *_given(inputs), softplus, extended, segmented, packed, ordered, save,
                 keep, is_filled(channels, T, size, packed), alike(*timed), in_vectors(T, packed, *timed),
                 all_in_pairs(size, *timed), *map(lies, timed)),
                warps=1,
            )  # fmt: skip

    def run(self, inputs: Inputs, out: Tensor, last: Tensor, ungated: Tensor, order: Tensor) -> Tensor:
        """Fills outputs, last states, outputs before the gate and the order; returns the states to keep."""
        saved = last.new_empty(self.saved)
        inputs = _filled_up(inputs, last)
        u, delta, A, B, _, _, _, bias, _, cu_seqlens = inputs
        if self.ordered:
            self.sort(cu_seqlens, order)
        ends = products = saved
        if self.products:
            products = saved[-self.products :]
            ends = torch.empty_like(products)
            self.segments(u, delta, A, B, bias, ends, products)
        between = () if self.walks else (ends, products)
        self.whole(*inputs, order, out, last, saved, ungated, *between)
        return saved


class BackwardCall:
    """The launches of the backward: of the starts of segments, of the whole, and of sums over sequences."""

    def __init__(self, inputs: Inputs, dout: Tensor, dlast: Tensor | None, softplus: bool, extended: bool):
        u, delta, A, B, C, _, z, bias, state, cu_seqlens = inputs
        du, dB, dC = (torch.empty_like(x, device="meta") for x in (u, B, C))  # for their layouts
        (batch, channels, T), N, device = u.shape, A.shape[1], u.get_device()
        gate = u if z is None else z
        size, packed = sizes_for(u, cu_seqlens), cu_seqlens is not None
        (L, BD), rows = size.tile, sequences(u, cu_seqlens) * size.segments
        self.number, self.segmented = size.segments, size.segments > 1
        self.sums = rows, N + 2, channels
        self.dBC = size.blocks, batch, size.tiles, N, 2 * L
        behind = delta, gate, dout
        self.segments = Launcher(
            backward_segment_kernel, device, (size.blocks, batch * (size.segments - 1)),
            (channels, T, size.tiles, size.each, size.segments,
             *[s for x in behind for s in x.stride()], *C.stride(), *A.stride()),
            (N, BD, L, z is not None, bias is not None, softplus, extended,
             channels % BD == 0 and T % L == 0, alike(*behind), in_vectors(T, packed, *behind),
             *map(lies, behind)),
            warps=1,
        )  # fmt: skip
        timed = u, delta, gate, dout, du
        ordered, kept = is_ordered(cu_seqlens), keeps_ungated(u, z, cu_seqlens)
        registers = BACKWARD_REGISTERS if size.tile == PAIRED else None
        self.whole = Launcher(
            backward_kernel, device, (size.blocks, rows),
            (batch, channels, T, size.tiles, size.each, size.segments,
             *[s for x in timed for s in x.stride()], *B.stride(), *C.stride(), *A.stride(),
             *_strides(state), *_strides(dlast)),
            (N, BD, L, size.tail, *_given(inputs), dlast is not None, softplus, extended, self.segmented,
             packed, ordered, kept, is_filled(channels, T, size, packed), alike(*timed),
             in_vectors(T, packed, *timed), all_in_pairs(size, *timed), *map(lies, timed)),
            warps=1, registers=registers,
        )  # fmt: skip
        # what a program of the last kernel adds: columns and rows of `sums`, or tiles of dBC
        wide, high = (16, 256) if rows > 64 else (32, 32)
        columns, BN = -(-(N + 2) * channels // wide), block(N, 1)
        tiles = max(1, 1024 // (BN * 2 * L))
        self.reduce = Launcher(
            reduce_kernel, device, (columns + -(-batch * size.tiles // tiles), 1),
            (size.blocks, batch, channels, T, size.tiles, rows, columns, *dB.stride(), *dC.stride()),
            (N, BN, L, high, wide, tiles, 4),
            warps=4,
        )  # fmt: skip

    def run(
        self,
        inputs: Inputs,
        kept: tuple[Tensor, Tensor, Tensor],
        gradients: Inputs,
        dout: Tensor,
        dlast: Tensor | None,
    ) -> None:
        """Fills the gradients, the last of which are those of the states that enter segments."""
        (saved, ungated, order), carry = kept, gradients[-1]
        du, ddelta, dA, dB, dC, dD, dz, dbias, _ = gradients
        inputs = _filled_up(inputs, carry)
        _, delta, A, _, C, _, z, bias, _, _ = inputs
        sums, dBC = carry.new_empty(*self.sums), carry.new_empty(*self.dBC)
        starts = products = carry
        if self.segmented:
            products = saved[-carry.numel() :]
            starts = torch.empty_like(carry)
            self.segments(delta, A, C, z, bias, dout, starts, products)
        self.whole(
            *inputs, order, saved, ungated, dout, carry if dlast is None else dlast,
            du, ddelta, dz, dBC, sums, carry, starts, products,
        )  # fmt: skip
        self.reduce(dBC, sums, dB, dC, dA, dD, dbias)
