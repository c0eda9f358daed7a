"""The launches of a scan: kernels, grids and arguments.

A call object is made once per `call_key` of the inputs and then only run.
"""

import torch
from torch import Tensor

from statetrack.ops.selective_scan.arguments import ScanInputs
from statetrack.ops.selective_scan.triton.decode_step import decode_step_kernel
from statetrack.ops.selective_scan.triton.length_sort import length_sort_kernel
from statetrack.ops.selective_scan.triton.load_store import CHANNELS_INNERMOST
from statetrack.ops.selective_scan.triton.plan import (
    INTERPRETED,
    PAIRED,
    has_channel_pairs,
    has_vector_loads,
    innermost,
    is_sorted,
    is_unmasked,
    partition_for,
    same_strides,
    saved_size,
    saves_y,
    sequence_count,
)
from statetrack.ops.selective_scan.triton.segment_maps import segment_backward_kernel, segment_forward_kernel
from statetrack.ops.selective_scan.triton.stepwise_forward import stepwise_forward_kernel
from statetrack.ops.selective_scan.triton.sum_gradients import sum_gradients_kernel
from statetrack.ops.selective_scan.triton.tiled_backward import tiled_backward_kernel
from statetrack.ops.selective_scan.triton.tiled_forward import tiled_forward_kernel
from statetrack.ops.triton_runtime.launcher import Launcher
from statetrack.ops.triton_runtime.sizes import block

# The stepwise forward: channels of a program, the most states per channel it holds in registers, and the
# registers per thread with which a multiprocessor runs twenty-three programs.
STEPWISE_CHANNELS = 32
STEPWISE_MAX_STATES = 16
STEPWISE_REGISTERS = 88
# With these a multiprocessor runs twelve programs of the backward with two channels per lane.
BACKWARD_REGISTERS = 168


def _present(inputs: ScanInputs) -> tuple[bool, ...]:
    """The constants HAS_D, HAS_Z, HAS_DELTA_BIAS and HAS_INITIAL_STATE."""
    return tuple([x is not None for x in inputs[5:9]])


def _with_placeholders(inputs: ScanInputs, placeholder: Tensor) -> tuple[Tensor, ...]:
    """The inputs with some tensor in the place of each that is None: a kernel does not read it."""
    u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens = inputs
    D, z, delta_bias = A if D is None else D, u if z is None else z, A if delta_bias is None else delta_bias
    initial_state, cu_seqlens = (placeholder if x is None else x for x in (initial_state, cu_seqlens))
    return u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()


class DecodeCall:
    """The launch for one step, as in decoding."""

    def __init__(self, inputs: ScanInputs, out: Tensor, delta_softplus: bool, signed: bool):
        u, delta, A, B, C, _, z, _, initial_state, _ = inputs
        (batch, channels, _), N, device = u.shape, A.shape[1], u.get_device()
        BD = 128 if N <= 16 else 32
        strides = [x.stride()[:2] for x in (u, delta, u if z is None else z, out, B, C)]
        strides += [A.stride(), _strides(initial_state)]
        self.step = Launcher(
            decode_step_kernel, device, (-(-channels // BD), batch),
            (channels, *(s for of_one in strides for s in of_one)),
            (N, block(N, 1), BD, *_present(inputs), delta_softplus, signed),
            warps=4,
        )  # fmt: skip

    def run(
        self, inputs: ScanInputs, out: Tensor, last_state: Tensor, _saved_y: Tensor, _longest_first: Tensor
    ) -> Tensor:
        self.step(*_with_placeholders(inputs, last_state)[:9], out, last_state)
        return last_state.new_empty(0)


class ForwardCall:
    """The launches for more than one step.

    Packed sequences are sorted by length. Where time is cut into segments, their maps are computed. Then
    one kernel does the scan: stepwise if it can, else in tiles.
    """

    def __init__(self, inputs: ScanInputs, out: Tensor, delta_softplus: bool, signed: bool, save: bool):
        u, delta, A, B, C, _, z, delta_bias, initial_state, cu_seqlens = inputs
        (batch, channels, T), N, device = u.shape, A.shape[1], u.get_device()
        size, packed = partition_for(u, cu_seqlens), cu_seqlens is not None
        sequences, segmented = sequence_count(u, cu_seqlens), size.segments > 1
        (L, BD), self.sorted = size.tile, is_sorted(cu_seqlens)
        self.saved_size = saved_size(u, A, cu_seqlens, save)
        self.decays_size = batch * size.segments * N * channels if segmented else 0
        self.length_sort = Launcher(
            length_sort_kernel, device, (-(-sequences // 16), 1), (sequences,), (16, 256), warps=4
        )
        self.segment_maps = Launcher(
            segment_forward_kernel, device, (size.channel_blocks, batch * (size.segments - 1)),
            (channels, T, size.segment_tiles, size.segments,
             *u.stride(), *delta.stride(), *B.stride(), *A.stride()),
            (N, BD, L, delta_bias is not None, delta_softplus, signed, channels % BD == 0,
             same_strides(u, delta), has_vector_loads(T, packed, u, delta), innermost(u), innermost(delta)),
            warps=1,
        )  # fmt: skip
        timed = u, delta, u if z is None else z, out
        channels_innermost = all(innermost(x) == CHANNELS_INNERMOST for x in timed)
        self.stepwise = not segmented and N <= STEPWISE_MAX_STATES and channels_innermost
        options = delta_softplus, signed
        save_flags = save, save and saves_y(u, z, cu_seqlens)
        if self.stepwise:
            BD = 8 if INTERPRETED else STEPWISE_CHANNELS  # few, so that tests have several programs
            self.scan = Launcher(
                stepwise_forward_kernel, device, (-(-channels // BD), sequences),
                (channels, T, *[s for x in timed for s in (x.stride(0), x.stride(2))],
                 *B.stride(), *C.stride(), *A.stride(), *_strides(initial_state)),
                (N, block(N, 1), BD, L, *_present(inputs), *options, packed, self.sorted, *save_flags,
                 same_strides(*timed)),
                warps=1, registers=STEPWISE_REGISTERS,
            )  # fmt: skip
        else:
            self.scan = Launcher(
                tiled_forward_kernel, device, (size.channel_blocks, sequences * size.segments),
                (channels, T, size.tiles, size.segment_tiles, size.segments,
                 *[s for x in timed for s in x.stride()], *B.stride(), *C.stride(), *A.stride(),
                 *_strides(initial_state)),
                (N, BD, L, size.half_tail, *_present(inputs), *options, segmented, packed, self.sorted,
                 *save_flags, is_unmasked(channels, T, size, packed), same_strides(*timed),
                 has_vector_loads(T, packed, *timed), has_channel_pairs(size, *timed),
                 *map(innermost, timed)),
                warps=1,
            )  # fmt: skip

    def run(
        self, inputs: ScanInputs, out: Tensor, last_state: Tensor, saved_y: Tensor, longest_first: Tensor
    ) -> Tensor:
        """Fill out, the last states, y before the gate and the order by length; return the saved states."""
        saved_states = last_state.new_empty(self.saved_size)
        tensors = _with_placeholders(inputs, last_state)
        u, delta, A, B, _, _, _, delta_bias, _, cu_seqlens = tensors
        if self.sorted:
            self.length_sort(cu_seqlens, longest_first)
        segment_states = segment_decays = saved_states
        if self.decays_size:
            segment_decays = saved_states[-self.decays_size :]
            segment_states = torch.empty_like(segment_decays)
            self.segment_maps(u, delta, A, B, delta_bias, segment_states, segment_decays)
        maps = () if self.stepwise else (segment_states, segment_decays)
        self.scan(*tensors, longest_first, out, last_state, saved_states, saved_y, *maps)
        return saved_states


class BackwardCall:
    """The launches of the backward: the maps of segments, the adjoint scan, and the sums of its gradients."""

    def __init__(
        self,
        inputs: ScanInputs,
        dout: Tensor,
        dlast_state: Tensor | None,
        delta_softplus: bool,
        signed: bool,
    ):
        u, delta, A, B, C, _, z, delta_bias, initial_state, cu_seqlens = inputs
        du, dB, dC = (torch.empty_like(x, device="meta") for x in (u, B, C))  # for their strides
        (batch, channels, T), N, device = u.shape, A.shape[1], u.get_device()
        gate = u if z is None else z
        size, packed = partition_for(u, cu_seqlens), cu_seqlens is not None
        (L, BD), rows = size.tile, sequence_count(u, cu_seqlens) * size.segments
        self.segments, self.segmented = size.segments, size.segments > 1
        self.dparams_shape = rows, N + 2, channels
        self.dBC_shape = size.channel_blocks, batch, size.tiles, N, 2 * L
        timed = delta, gate, dout
        self.segment_maps = Launcher(
            segment_backward_kernel, device, (size.channel_blocks, batch * (size.segments - 1)),
            (channels, T, size.tiles, size.segment_tiles, size.segments,
             *[s for x in timed for s in x.stride()], *C.stride(), *A.stride()),
            (N, BD, L, z is not None, delta_bias is not None, delta_softplus, signed,
             channels % BD == 0 and T % L == 0, same_strides(*timed), has_vector_loads(T, packed, *timed),
             *map(innermost, timed)),
            warps=1,
        )  # fmt: skip
        timed = u, delta, gate, dout, du
        self.scan = Launcher(
            tiled_backward_kernel, device, (size.channel_blocks, rows),
            (batch, channels, T, size.tiles, size.segment_tiles, size.segments,
             *[s for x in timed for s in x.stride()], *B.stride(), *C.stride(), *A.stride(),
             *_strides(initial_state), *_strides(dlast_state)),
            (N, BD, L, size.half_tail, *_present(inputs), dlast_state is not None, delta_softplus, signed,
             self.segmented, packed, is_sorted(cu_seqlens), saves_y(u, z, cu_seqlens),
             is_unmasked(channels, T, size, packed), same_strides(*timed),
             has_vector_loads(T, packed, *timed), has_channel_pairs(size, *timed), *map(innermost, timed)),
            warps=1, registers=BACKWARD_REGISTERS if size.tile == PAIRED else None,
        )  # fmt: skip
        # what a program of the last kernel adds: columns and rows of `dparams`, or tiles of dBC
        BW, BR = (16, 256) if rows > 64 else (32, 32)
        columns, BN = -(-(N + 2) * channels // BW), block(N, 1)
        BT = max(1, 1024 // (BN * 2 * L))
        self.sum_gradients = Launcher(
            sum_gradients_kernel, device, (columns + -(-batch * size.tiles // BT), 1),
            (size.channel_blocks, batch, channels, T, size.tiles, rows, columns, *dB.stride(), *dC.stride()),
            (N, BN, L, BR, BW, BT, 4),
            warps=4,
        )  # fmt: skip

    def run(
        self,
        inputs: ScanInputs,
        saved: tuple[Tensor, Tensor, Tensor],
        gradients: tuple[Tensor, ...],
        dout: Tensor,
        dlast_state: Tensor | None,
    ) -> None:
        """Fill the gradients, the last of which are those of the states that enter segments."""
        saved_states, saved_y, longest_first = saved
        du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dstate = gradients
        tensors = _with_placeholders(inputs, dstate)
        _, delta, A, _, C, _, z, delta_bias, _, _ = tensors
        dparams, dBC = dstate.new_empty(*self.dparams_shape), dstate.new_empty(*self.dBC_shape)
        segment_gradients = segment_decays = dstate
        if self.segmented:
            segment_decays = saved_states[-dstate.numel() :]
            segment_gradients = torch.empty_like(dstate)
            self.segment_maps(delta, A, C, z, delta_bias, dout, segment_gradients, segment_decays)
        self.scan(
            *tensors, longest_first, saved_states, saved_y,
            dout, dstate if dlast_state is None else dlast_state,
            du, ddelta, dz, dBC, dparams, dstate, segment_gradients, segment_decays,
        )  # fmt: skip
        self.sum_gradients(dBC, dparams, dB, dC, dA, dD, ddelta_bias)
