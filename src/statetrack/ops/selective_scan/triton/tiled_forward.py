"""Tiled forward kernel: the scan in tiles of L steps by BD channels, one state index n after the other.

    h_t = a_t h_{t-1} + delta_t B_t u_t        y_t = sum_n C_t h_t + D u_t        out_t = y_t silu(z_t)

docs/internals/selective_scan.md, "Tiled forward". Used where `stepwise_forward` is not: time innermost, time
cut into segments, or more than 16 states.

Grid: (blocks of BD channels, sequences x segments); a program is one warp and goes through the tiles of its
segment in time. Registers: the tile's delta, x = delta u and y, (L, BD), for all n; and e, x B and h of one
n. The N states of the channels do not fit beside them: between tiles they are in memory, in `saved_states`,
which is also where the backward starts from. Arithmetic is float32; names as in `reference.py`.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false
# A branch on a constexpr may not be joined to one on a number: the compiler drops only the former.
# ruff: noqa: SIM102

import triton.language as tl

from statetrack.ops.selective_scan.triton.jit import scan_jit
from statetrack.ops.selective_scan.triton.load_store import (
    BC_pointers,
    annotated_strides,
    channel_layout_zeros,
    first_step,
    load_masked,
    load_tile,
    multiple_of_2,
    multiple_of_8,
    packed_sequence,
    split_BC,
    store_tile,
    tile_offsets,
)
from statetrack.ops.selective_scan.triton.tile_math import (
    LOG2_E,
    opaque,
    scan_rows_from,
    select_row,
    sigmoid,
    step_sizes,
    transition_exp,
)


@scan_jit
def tiled_forward_kernel(
    u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens, longest_first,
    out, last_state, saved_states, saved_y, segment_states, segment_decays,
    channels, T, tiles, segment_tiles, segments,
    u_b, u_d, u_t, delta_b, delta_d, delta_t, z_b, z_d, z_t, out_b, out_d, out_t,
    B_b, B_n, B_t, C_b, C_n, C_t, A_d, A_n, initial_state_b, initial_state_d, initial_state_n,
    N: tl.constexpr, BD: tl.constexpr, L: tl.constexpr, HALF_TAIL: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_DELTA_BIAS: tl.constexpr, HAS_INITIAL_STATE: tl.constexpr,
    DELTA_SOFTPLUS: tl.constexpr, SIGNED: tl.constexpr, SEGMENTED: tl.constexpr, PACKED: tl.constexpr,
    SORTED: tl.constexpr, SAVE_STATES: tl.constexpr, SAVE_Y: tl.constexpr, UNMASKED: tl.constexpr,
    SAME_STRIDES: tl.constexpr, VECTOR_LOADS: tl.constexpr, CHANNEL_PAIRS: tl.constexpr,
    U_LAYOUT: tl.constexpr, DELTA_LAYOUT: tl.constexpr, Z_LAYOUT: tl.constexpr, OUT_LAYOUT: tl.constexpr,
):  # fmt: skip
    if VECTOR_LOADS:
        T = multiple_of_8(T)
    if CHANNEL_PAIRS:
        channels = multiple_of_2(channels)
    u_b, u_d, u_t = annotated_strides(u_b, u_d, u_t, U_LAYOUT, VECTOR_LOADS, CHANNEL_PAIRS)
    delta_b, delta_d, delta_t = annotated_strides(
        delta_b, delta_d, delta_t, DELTA_LAYOUT, VECTOR_LOADS, CHANNEL_PAIRS
    )
    z_b, z_d, z_t = annotated_strides(z_b, z_d, z_t, Z_LAYOUT, VECTOR_LOADS, CHANNEL_PAIRS)
    out_b, out_d, out_t = annotated_strides(out_b, out_d, out_t, OUT_LAYOUT, VECTOR_LOADS, CHANNEL_PAIRS)
    b = tl.program_id(1).to(tl.int64)
    if SORTED:
        b = tl.load(longest_first + tl.program_id(1)).to(tl.int64)
    # where the program's states are between tiles: in one place each, or one per tile if they are saved
    saved_at = b * N * channels
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    in_d = d < channels
    pair = tl.arange(0, 2)[None, :]
    start, half_tail = 0, HALF_TAIL
    if PACKED:
        start, T, tiles, half_tail = packed_sequence(cu_seqlens, b, L)
    i = 0
    stop = tiles
    if SEGMENTED:
        segment = b % segments
        b = b // segments
        i = (segment * segment_tiles).to(tl.int32)
        stop = tl.minimum(i + segment_tiles, tiles)
    if SAVE_STATES:  # the packed sequences before this one save at most start // L states
        saved_at = (start // L if PACKED else b * (tiles - 1)) * N * channels
    u = first_step(u, b, start, u_b, u_t, PACKED)
    delta = first_step(delta, b, start, delta_b, delta_t, PACKED)
    z = first_step(z, b, start, z_b, z_t, PACKED)
    out = first_step(out, b, start, out_b, out_t, PACKED)
    saved_y = first_step(saved_y, b, start, out_b, out_t, PACKED)
    B = first_step(B, b, start, B_b, B_t, PACKED)
    C = first_step(C, b, start, C_b, C_t, PACKED)
    initial_state += b * initial_state_b
    last_state += b * N * channels + d
    saved_states += saved_at + d
    if SEGMENTED:
        # The state that enters this segment: the maps h -> P h + s of the segments before it, composed.
        if segment > 0:
            before = b * segments * N * channels + d
            for n in range(N):
                h_in = tl.zeros((BD,), tl.float32)
                if HAS_INITIAL_STATE:
                    h_in = load_masked(initial_state + n * initial_state_n + d * initial_state_d, in_d)
                j = 0
                while j < segment:
                    at = before + (j * N + n) * channels
                    h_in = h_in * tl.load(segment_decays + at, mask=in_d, other=0.0)
                    h_in += tl.load(segment_states + at, mask=in_d, other=0.0)
                    j += 1
                at = saved_states + n * channels
                if SAVE_STATES:
                    at += (i - 1).to(tl.int64) * N * channels
                tl.store(at, h_in, mask=in_d)
    # Whole tiles first. If the remaining steps fill at most half a tile, part 1 takes a tile of L / 2 steps.
    for part in tl.static_range(1 + HALF_TAIL):
        row = tl.arange(0, L >> part)[:, None]
        # At least 32 numbers of B and C: with fewer, the compiler has every lane load all of them.
        rows = tl.arange(0, 16)[:, None] % (L >> part)
        while i < tl.minimum(stop, tiles - half_tail + part):
            t = i * L + row
            in_t = t < T
            inside = in_t & in_d[None, :]
            at = tile_offsets(u_d, u_t, d, t, U_LAYOUT)
            delta_at = at if SAME_STRIDES else tile_offsets(delta_d, delta_t, d, t, DELTA_LAYOUT)
            delta_tile = load_tile(delta + delta_at, inside, UNMASKED)
            u_tile = load_tile(u + at, inside, UNMASKED)
            if (DELTA_LAYOUT != 0) | (U_LAYOUT != 0):
                delta_tile += channel_layout_zeros(A, d, t, A_n)
            delta_tile = step_sizes(delta_tile, delta_bias, d, in_d, HAS_DELTA_BIAS, DELTA_SOFTPLUS)
            if not UNMASKED:
                delta_tile = tl.where(in_t, delta_tile, 0.0)  # steps past the end have a = 1 and x = 0
            x = delta_tile * u_tile
            y = tl.zeros((L >> part, BD), tl.float32)
            if HAS_D:
                y = load_masked(D + d, in_d)[None, :] * u_tile
            if SAVE_STATES:
                h_in_at = saved_states + (i - 1).to(tl.int64) * N * channels
                h_out_at = h_in_at + N * channels
            else:
                h_in_at, h_out_at = saved_states, saved_states
            h_out_at = tl.where(i + 1 < tiles, h_out_at, last_state)
            # the next segment stores the state that enters it, and no other program
            leaves = (i + 1 < stop) | (i + 1 == tiles)
            h_in_n, has_h_in = channels, in_d
            if HAS_INITIAL_STATE:
                h_in_at = tl.where(i > 0, h_in_at, initial_state + d * initial_state_d)
                h_in_n = tl.where(i > 0, channels, initial_state_n)
            else:
                has_h_in = in_d & (i > 0)
            BC = BC_pointers(B, C, i * L + rows, B_t, C_t)
            BC_n = tl.where(pair == 0, B_n, C_n)
            in_BC = (i * L + rows < T) & (pair < 2)
            # One state index n at a time: what differs per n is small (a row of B and C, one A and one h per
            # channel), while the tile of delta and x stays in registers. The inputs of n + 1 are prefetched
            # while n is computed; the last iteration loads its own again instead of branching.
            BC_next = load_tile(BC, in_BC, UNMASKED)
            A_next = load_masked(A + d * A_d, in_d) * LOG2_E
            h_in_next = load_masked(h_in_at, has_h_in)
            for n in range(N):
                A_log2, h_in = A_next, h_in_next
                B_tile, C_tile = split_BC(BC_next, L >> part)
                next_n = tl.minimum(n + 1, N - 1)
                BC_next = load_tile(BC + next_n * BC_n, in_BC, UNMASKED)
                A_next = load_masked(A + d * A_d + next_n * A_n, in_d) * LOG2_E
                h_in_next = load_masked(h_in_at + next_n * h_in_n, has_h_in)
                e = transition_exp(delta_tile * A_log2[None, :], SIGNED)
                xB = x * B_tile[:, None]
                h = scan_rows_from(e, xB, h_in, row, SIGNED)
                y += h * C_tile[:, None]
                tl.store(h_out_at + n * channels, select_row(h, row, (L >> part) - 1), mask=in_d & leaves)
            # Addresses of the results are computed only here, so that they occupy no registers in the loop.
            t = opaque(i) * L + row
            inside = (t < T) & in_d[None, :]
            at = tile_offsets(u_d, u_t, d, t, U_LAYOUT)
            out_at = at if SAME_STRIDES else tile_offsets(out_d, out_t, d, t, OUT_LAYOUT)
            if HAS_Z:
                if SAVE_Y:
                    store_tile(saved_y + out_at, y, inside, UNMASKED)
                z_at = at if SAME_STRIDES else tile_offsets(z_d, z_t, d, t, Z_LAYOUT)
                z_tile = load_tile(z + z_at, inside, UNMASKED)
                y *= z_tile * sigmoid(z_tile)
            store_tile(out + out_at, y, inside, UNMASKED)
            i += 1
