"""Segment kernels: what each segment of a long sequence does to a state, and to a gradient.

    forward    h -> P h + s      P = prod_t a_t, s = the last state of the segment from h = 0
    backward   dh -> P dh + r    r = the gradient of the entering state if none comes from behind

docs/internals/selective_scan.md, "Long sequences". `segment_decays` holds P, `segment_states` s,
`segment_gradients` r, each (batch, segments, N, channels). `tiled_forward_kernel` and `tiled_backward_kernel`
compose these maps and run every segment from its true state.

Grid: (blocks of BD channels, batch x (segments - 1)); a program is one warp. Registers: as in the tiled
kernels, a tile of L steps by BD channels of the inputs, and of one state index n at a time.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false
# A branch on a constexpr may not be joined to one on a number: the compiler drops only the former.
# ruff: noqa: SIM102

import triton.language as tl

from statetrack.ops.selective_scan.triton.jit import scan_jit
from statetrack.ops.selective_scan.triton.load_store import (
    annotated_strides,
    channel_layout_zeros,
    load_masked,
    load_tile,
    multiple_of_8,
    tile_offsets,
)
from statetrack.ops.selective_scan.triton.tile_math import (
    LOG2_E,
    scan_rows_with_decays,
    select_row,
    shift_rows,
    sigmoid,
    step_sizes,
    transition,
)


@scan_jit
def segment_forward_kernel(
    u, delta, A, B, delta_bias, segment_states, segment_decays, channels, T, segment_tiles, segments,
    u_b, u_d, u_t, delta_b, delta_d, delta_t, B_b, B_n, B_t, A_d, A_n,
    N: tl.constexpr, BD: tl.constexpr, L: tl.constexpr, HAS_DELTA_BIAS: tl.constexpr,
    DELTA_SOFTPLUS: tl.constexpr, SIGNED: tl.constexpr, UNMASKED: tl.constexpr, SAME_STRIDES: tl.constexpr,
    VECTOR_LOADS: tl.constexpr, U_LAYOUT: tl.constexpr, DELTA_LAYOUT: tl.constexpr,
):  # fmt: skip
    """P and s of every segment but the last one, which no other segment follows."""
    if VECTOR_LOADS:
        T = multiple_of_8(T)
    u_b, u_d, u_t = annotated_strides(u_b, u_d, u_t, U_LAYOUT, VECTOR_LOADS, False)
    delta_b, delta_d, delta_t = annotated_strides(
        delta_b, delta_d, delta_t, DELTA_LAYOUT, VECTOR_LOADS, False
    )
    b = tl.program_id(1).to(tl.int64)
    segment = b % (segments - 1)
    b = b // (segments - 1)
    first = (segment * segment_tiles).to(tl.int32)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    in_d = d < channels
    row = tl.arange(0, L)[:, None]
    rows = tl.arange(0, 2 * L) % L
    u += b * u_b
    delta += b * delta_b
    B += b * B_b
    segment_states += (b * segments + segment) * N * channels + d
    segment_decays += (b * segments + segment) * N * channels + d
    delta_sum = tl.zeros((BD,), tl.float32)
    i = first
    while i < first + segment_tiles:
        t = i * L + row
        inside = (t < T) & in_d[None, :]
        at = tile_offsets(u_d, u_t, d, t, U_LAYOUT)
        delta_tile = load_tile(
            delta + (at if SAME_STRIDES else tile_offsets(delta_d, delta_t, d, t, DELTA_LAYOUT)),
            inside,
            UNMASKED,
        )
        u_tile = load_tile(u + at, inside, UNMASKED)
        if (DELTA_LAYOUT != 0) | (U_LAYOUT != 0):
            delta_tile += channel_layout_zeros(A, d, t, A_n)
        delta_tile = step_sizes(delta_tile, delta_bias, d, in_d, HAS_DELTA_BIAS, DELTA_SOFTPLUS)
        x = delta_tile * u_tile
        # for P = exp(A sum_t delta_t) in the range [0,1]
        delta_sum += tl.sum(delta_tile, axis=0)
        continues = in_d & (i > first)
        B_at = B + (i * L + rows) * B_t
        B_next = tl.load(B_at).to(tl.float32)
        A_next = load_masked(A + d * A_d, in_d) * LOG2_E
        h_in_next = tl.load(segment_states, mask=continues, other=0.0)
        for n in range(N):
            A_log2, h_in = A_next, h_in_next
            B_tile, _ = tl.split(tl.permute(tl.reshape(B_next, (2, L)), (1, 0)))
            next_n = tl.minimum(n + 1, N - 1)
            B_next = tl.load(B_at + next_n * B_n).to(tl.float32)
            A_next = load_masked(A + d * A_d + next_n * A_n, in_d) * LOG2_E
            h_in_next = tl.load(segment_states + next_n * channels, mask=continues, other=0.0)
            a = transition(delta_tile * A_log2[None, :], SIGNED)
            decay, h = scan_rows_with_decays(a, x * B_tile[:, None], h_in, row)
            tl.store(segment_states + n * channels, select_row(h, row, L - 1), mask=in_d)
            if SIGNED:
                decay = select_row(decay, row, L - 1)
                decay *= tl.load(segment_decays + n * channels, mask=continues, other=1.0)
                tl.store(segment_decays + n * channels, decay, mask=in_d)
        i += 1
    if not SIGNED:
        for n in range(N):
            A_log2 = load_masked(A + d * A_d + n * A_n, in_d) * LOG2_E
            tl.store(segment_decays + n * channels, tl.exp2(A_log2 * delta_sum), mask=in_d)


@scan_jit
def segment_backward_kernel(
    delta, A, C, z, delta_bias, dout, segment_gradients, segment_decays,
    channels, T, tiles, segment_tiles, segments,
    delta_b, delta_d, delta_t, z_b, z_d, z_t, dout_b, dout_d, dout_t, C_b, C_n, C_t, A_d, A_n,
    N: tl.constexpr, BD: tl.constexpr, L: tl.constexpr, HAS_Z: tl.constexpr, HAS_DELTA_BIAS: tl.constexpr,
    DELTA_SOFTPLUS: tl.constexpr, SIGNED: tl.constexpr, UNMASKED: tl.constexpr, SAME_STRIDES: tl.constexpr,
    VECTOR_LOADS: tl.constexpr, DELTA_LAYOUT: tl.constexpr, Z_LAYOUT: tl.constexpr, DOUT_LAYOUT: tl.constexpr,
):  # fmt: skip
    """r of every segment but the first one, and P of the last one; the other P are those of the forward."""
    if VECTOR_LOADS:
        T = multiple_of_8(T)
    delta_b, delta_d, delta_t = annotated_strides(
        delta_b, delta_d, delta_t, DELTA_LAYOUT, VECTOR_LOADS, False
    )
    z_b, z_d, z_t = annotated_strides(z_b, z_d, z_t, Z_LAYOUT, VECTOR_LOADS, False)
    dout_b, dout_d, dout_t = annotated_strides(dout_b, dout_d, dout_t, DOUT_LAYOUT, VECTOR_LOADS, False)
    b = tl.program_id(1).to(tl.int64)
    segment = b % (segments - 1) + 1
    b = b // (segments - 1)
    first = (segment * segment_tiles).to(tl.int32)
    stop = tl.minimum(first + segment_tiles, tiles) - 1
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    in_d = d < channels
    row = tl.arange(0, L)[:, None]
    rows = tl.arange(0, 2 * L) % L
    delta += b * delta_b
    z += b * z_b
    dout += b * dout_b
    C += b * C_b
    segment_gradients += (b * segments + segment) * N * channels + d
    segment_decays += (b * segments + segment) * N * channels + d
    delta_sum = tl.zeros((BD,), tl.float32)
    i = stop
    while i >= first:
        t = i * L + row
        in_t = t < T
        inside = in_t & in_d[None, :]
        at = tile_offsets(delta_d, delta_t, d, t, DELTA_LAYOUT)
        delta_tile = load_tile(delta + at, inside, UNMASKED)
        dy = load_tile(
            dout + (at if SAME_STRIDES else tile_offsets(dout_d, dout_t, d, t, DOUT_LAYOUT)), inside, UNMASKED
        )
        if HAS_Z:
            z_tile = load_tile(
                z + (at if SAME_STRIDES else tile_offsets(z_d, z_t, d, t, Z_LAYOUT)), inside, UNMASKED
            )
            dy *= z_tile * sigmoid(z_tile)
        if (DELTA_LAYOUT != 0) | (DOUT_LAYOUT != 0) | (Z_LAYOUT != 0):
            zeros = channel_layout_zeros(A, d, t, A_n)
            delta_tile += zeros
            dy += zeros
        delta_tile = step_sizes(delta_tile, delta_bias, d, in_d, HAS_DELTA_BIAS, DELTA_SOFTPLUS)
        if not UNMASKED:
            delta_tile = tl.where(in_t, delta_tile, 0.0)
        delta_sum += tl.sum(delta_tile, axis=0)
        continues = in_d & (i < stop)
        C_at = C + (i * L + rows) * C_t
        in_C = i * L + rows < T
        C_next = load_masked(C_at, in_C)
        A_next = load_masked(A + d * A_d, in_d) * LOG2_E
        dh_out_next = tl.load(segment_gradients, mask=continues, other=0.0)
        for n in range(N):
            A_log2, dh_out = A_next, dh_out_next
            C_tile, _ = tl.split(tl.permute(tl.reshape(C_next, (2, L)), (1, 0)))
            next_n = tl.minimum(n + 1, N - 1)
            C_next = load_masked(C_at + next_n * C_n, in_C)
            A_next = load_masked(A + d * A_d + next_n * A_n, in_d) * LOG2_E
            dh_out_next = tl.load(segment_gradients + next_n * channels, mask=continues, other=0.0)
            a = transition(delta_tile * A_log2[None, :], SIGNED)
            c = tl.flip(C_tile[:, None] * dy, 0)
            a = tl.flip(a, 0)
            # Reversed, row 0 is the last step: g_t = C_t dy_t + a_{t+1} g_{t+1} is a scan down the rows.
            _, g = scan_rows_with_decays(shift_rows(a, tl.full((BD,), 1.0, tl.float32), row), c, dh_out, row)
            tl.store(segment_gradients + n * channels, select_row(a * g, row, L - 1), mask=in_d)
            if SIGNED:
                if segment == segments - 1:
                    decay, _h = scan_rows_with_decays(a, a, dh_out, row)
                    decay = select_row(decay, row, L - 1)
                    decay *= tl.load(segment_decays + n * channels, mask=continues, other=1.0)
                    tl.store(segment_decays + n * channels, decay, mask=in_d)
        i -= 1
    if not SIGNED:
        if segment == segments - 1:
            for n in range(N):
                A_log2 = load_masked(A + d * A_d + n * A_n, in_d) * LOG2_E
                tl.store(segment_decays + n * channels, tl.exp2(A_log2 * delta_sum), mask=in_d)
