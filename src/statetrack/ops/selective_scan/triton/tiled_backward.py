"""Tiled backward kernel: the adjoint scan, in the tiles of `tiled_forward`, last tile first.

    g_t = C_t dy_t + a_{t+1} g_{t+1}                         the gradient of h_t
    dB_t = sum_d g_t x_t        dC_t = sum_d h_t dy_t        dx_t = sum_n B_t g_t        x_t = delta_t u_t
    w_t = g_t h_{t-1} a'_t      ddelta_t = sum_n w_t A       dA = sum_t w_t delta_t

with dy = dout silu(z) and a' the derivative of a in delta A. docs/internals/selective_scan.md, "Backward".

Grid: (blocks of BD channels, sequences x segments); a program is one warp. Registers: the tile's delta, x,
dy, dx and sum_n w A, (L, BD), for all n; and e, h and g of one n, h recomputed from the state saved before
the tile. Between tiles, in memory: a_t g_t, the gradient of the state that enters a tile, in `dstate`, and dA
in `dparams`. Sums over all channels and sequences are left to `sum_gradients_kernel`. Arithmetic is float32.
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
    LN_2,
    LOG2_E,
    opaque,
    recurrence_step,
    scan_rows,
    scan_rows_from,
    select_row,
    shift_rows,
    sigmoid,
    softplus_derivative,
    step_sizes,
    sum_over_channels,
    transition_exp,
)


@scan_jit
def tiled_backward_kernel(
    u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens, longest_first, saved_states, saved_y,
    dout, dlast_state, du, ddelta, dz, dBC, dparams, dstate, segment_gradients, segment_decays,
    batch, channels, T, tiles, segment_tiles, segments,
    u_b, u_d, u_t, delta_b, delta_d, delta_t, z_b, z_d, z_t, dout_b, dout_d, dout_t, du_b, du_d, du_t,
    B_b, B_n, B_t, C_b, C_n, C_t, A_d, A_n, initial_state_b, initial_state_d, initial_state_n,
    dlast_state_b, dlast_state_d, dlast_state_n,
    N: tl.constexpr, BD: tl.constexpr, L: tl.constexpr, HALF_TAIL: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_DELTA_BIAS: tl.constexpr, HAS_INITIAL_STATE: tl.constexpr,
    HAS_DLAST_STATE: tl.constexpr, DELTA_SOFTPLUS: tl.constexpr, SIGNED: tl.constexpr,
    SEGMENTED: tl.constexpr, PACKED: tl.constexpr, SORTED: tl.constexpr, HAS_SAVED_Y: tl.constexpr,
    UNMASKED: tl.constexpr, SAME_STRIDES: tl.constexpr, VECTOR_LOADS: tl.constexpr,
    CHANNEL_PAIRS: tl.constexpr, U_LAYOUT: tl.constexpr, DELTA_LAYOUT: tl.constexpr, Z_LAYOUT: tl.constexpr,
    DOUT_LAYOUT: tl.constexpr, DU_LAYOUT: tl.constexpr,
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
    dout_b, dout_d, dout_t = annotated_strides(
        dout_b, dout_d, dout_t, DOUT_LAYOUT, VECTOR_LOADS, CHANNEL_PAIRS
    )
    du_b, du_d, du_t = annotated_strides(du_b, du_d, du_t, DU_LAYOUT, VECTOR_LOADS, CHANNEL_PAIRS)
    b = tl.program_id(1).to(tl.int64)
    if SORTED:
        b = tl.load(longest_first + tl.program_id(1)).to(tl.int64)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    in_d = d < channels
    pair = tl.arange(0, 2)[None, :]
    dstate += b * N * channels + d
    dparams += b * (N + 2) * channels + d
    start, half_tail, row_tiles = 0, HALF_TAIL, tiles
    if PACKED:
        start, T, tiles, half_tail = packed_sequence(cu_seqlens, b, L)
    first = 0
    i = tiles - 1
    if SEGMENTED:
        segment = b % segments
        b = b // segments
        first = (segment * segment_tiles).to(tl.int32)
        i = tl.minimum(first + segment_tiles, tiles) - 1
    u = first_step(u, b, start, u_b, u_t, PACKED)
    delta = first_step(delta, b, start, delta_b, delta_t, PACKED)
    z = first_step(z, b, start, z_b, z_t, PACKED)
    dout = first_step(dout, b, start, dout_b, dout_t, PACKED)
    du = first_step(du, b, start, du_b, du_t, PACKED)
    ddelta = first_step(ddelta, b, start, du_b, du_t, PACKED)
    dz = first_step(dz, b, start, du_b, du_t, PACKED)
    saved_y = first_step(saved_y, b, start, du_b, du_t, PACKED)
    B = first_step(B, b, start, B_b, B_t, PACKED)
    C = first_step(C, b, start, C_b, C_t, PACKED)
    initial_state += b * initial_state_b
    dlast_state += b * dlast_state_b
    saved_states += (start // L if PACKED else b * (tiles - 1)) * N * channels + d
    if PACKED:  # dB and dC go into tiles of the whole row
        dBC += (tl.program_id(0) * row_tiles + start // L) * N * 2 * L
    else:
        dBC += (tl.program_id(0) * batch + b) * tiles * N * 2 * L
    if SEGMENTED:
        # The gradient that enters this segment from behind: the maps dh -> P dh + r of the segments after it,
        # composed.
        if i < tiles - 1:
            after = b * segments * N * channels + d
            for n in range(N):
                dh_out = tl.zeros((BD,), tl.float32)
                if HAS_DLAST_STATE:
                    dh_out = load_masked(dlast_state + n * dlast_state_n + d * dlast_state_d, in_d)
                j = segments - 1
                while j > segment:
                    at = after + (j * N + n) * channels
                    dh_out = dh_out * tl.load(segment_decays + at, mask=in_d, other=0.0)
                    dh_out += tl.load(segment_gradients + at, mask=in_d, other=0.0)
                    j -= 1
                tl.store(dstate + n * channels, dh_out, mask=in_d)
    D_d = tl.zeros((BD,), tl.float32)
    if HAS_D:
        D_d = load_masked(D + d, in_d)
    dD = tl.zeros((BD,), tl.float32)
    ddelta_bias = tl.zeros((BD,), tl.float32)
    stop = i
    # If the last steps fill at most half a tile, part 0 takes a tile of L / 2 steps; then come whole tiles.
    for part in tl.static_range(1 + HALF_TAIL):
        row = tl.arange(0, L >> (HALF_TAIL - part))[:, None]
        rows = tl.arange(0, 16)[:, None] % (L >> (HALF_TAIL - part))
        dBC_at = tl.arange(0, 2 * (L >> (HALF_TAIL - part)))
        dBC_row, of_C = dBC_at % (L >> (HALF_TAIL - part)), dBC_at // (L >> (HALF_TAIL - part))
        dBC_at = of_C * L + dBC_row
        while i >= tl.maximum(first, (tiles - half_tail) * (HALF_TAIL - part)):
            t = i * L + row
            in_t = t < T
            inside = in_t & in_d[None, :]
            at = tile_offsets(u_d, u_t, d, t, U_LAYOUT)
            delta_at = at if SAME_STRIDES else tile_offsets(delta_d, delta_t, d, t, DELTA_LAYOUT)
            delta_tile = load_tile(delta + delta_at, inside, UNMASKED)
            u_tile = load_tile(u + at, inside, UNMASKED)
            dout_at = at if SAME_STRIDES else tile_offsets(dout_d, dout_t, d, t, DOUT_LAYOUT)
            dy = load_tile(dout + dout_at, inside, UNMASKED)
            if HAS_Z:
                z_at = at if SAME_STRIDES else tile_offsets(z_d, z_t, d, t, Z_LAYOUT)
                z_tile = load_tile(z + z_at, inside, UNMASKED)
                dy *= z_tile * sigmoid(z_tile)
            if (DELTA_LAYOUT != 0) | (U_LAYOUT != 0) | (DOUT_LAYOUT != 0) | (Z_LAYOUT != 0):
                zeros = channel_layout_zeros(A, d, t, A_n)
                delta_tile += zeros
                dy += zeros
            delta_tile = step_sizes(delta_tile, delta_bias, d, in_d, HAS_DELTA_BIAS, DELTA_SOFTPLUS)
            if not UNMASKED:
                delta_tile = tl.where(in_t, delta_tile, 0.0)
            x = delta_tile * u_tile
            y = tl.zeros((L >> (HALF_TAIL - part), BD), tl.float32)
            dx = tl.zeros((L >> (HALF_TAIL - part), BD), tl.float32)
            wA = tl.zeros((L >> (HALF_TAIL - part), BD), tl.float32)
            h_in_at = saved_states + (i - 1).to(tl.int64) * N * channels
            h_in_n, has_h_in = channels, in_d
            if HAS_INITIAL_STATE:
                h_in_at = tl.where(i > 0, h_in_at, initial_state + d * initial_state_d)
                h_in_n = tl.where(i > 0, channels, initial_state_n)
            else:
                has_h_in = in_d & (i > 0)
            dh_out_at, dh_out_n, has_dh_out = dstate, channels, in_d
            if HAS_DLAST_STATE:
                dh_out_at = tl.where(i == tiles - 1, dlast_state + d * dlast_state_d, dstate)
                dh_out_n = tl.where(i == tiles - 1, dlast_state_n, channels)
            else:
                has_dh_out = in_d & (i < tiles - 1)
            BC = BC_pointers(B, C, i * L + rows, B_t, C_t)
            BC_n = tl.where(pair == 0, B_n, C_n)
            in_BC = (i * L + rows < T) & (pair < 2)
            if PACKED:
                in_row = (start % L).to(tl.int32) + i * L + dBC_row
                packed_at = (in_row // L * N * 2 + of_C) * L + in_row % L
                packed_in = i * L + dBC_row < T
            # One state index n at a time, as in the forward; the inputs of n + 1 are prefetched while n is
            # computed, because a warp alone on its scheduler slot would wait for every load.
            BC_next = load_tile(BC, in_BC, UNMASKED)
            A_next = load_masked(A + d * A_d, in_d) * LOG2_E
            h_in_next = load_masked(h_in_at, has_h_in)
            dh_out_next = load_masked(dh_out_at, has_dh_out)
            for n in range(N):
                A_log2, h_in, dh_out = A_next, h_in_next, dh_out_next
                B_tile, C_tile = split_BC(BC_next, L >> (HALF_TAIL - part))
                dA = tl.load(dparams + n * channels, mask=in_d & (i < stop), other=0.0)
                next_n = tl.minimum(n + 1, N - 1)
                BC_next = load_tile(BC + next_n * BC_n, in_BC, UNMASKED)
                A_next = load_masked(A + d * A_d + next_n * A_n, in_d) * LOG2_E
                h_in_next = load_masked(h_in_at + next_n * h_in_n, has_h_in)
                dh_out_next = load_masked(dh_out_at + next_n * dh_out_n, has_dh_out)
                e = transition_exp(delta_tile * A_log2[None, :], SIGNED)
                xB = x * B_tile[:, None]
                h = scan_rows_from(e, xB, h_in, row, SIGNED)
                # Reversed, row 0 is the last step and the adjoint is a scan down the rows. It multiplies by
                # a_{t+1}, not a_t, hence the shift. dh_out, which enters in row 0, is a_{t+1} g_{t+1}.
                c = tl.flip(C_tile[:, None] * dy, 0)
                e_after = shift_rows(tl.flip(e, 0), tl.full((BD,), 1.0, tl.float32), row)
                g = tl.flip(scan_rows(e_after, tl.where(row == 0, c + dh_out[None, :], c), SIGNED), 0)
                if HAS_Z:
                    if not HAS_SAVED_Y:
                        y += h * C_tile[:, None]
                dx += g * B_tile[:, None]
                # a' h (a' is e) before its product with g: where e has underflowed to zero, g h may overflow.
                w = e * shift_rows(h, h_in, row) * g
                wA += w * A_log2[None, :]
                tl.store(dparams + n * channels, dA + tl.sum(w * delta_tile, axis=0), mask=in_d)
                dBC_sums = sum_over_channels(g * x, h * dy, L >> (HALF_TAIL - part), BD)
                if PACKED:
                    tl.store(dBC + n * 2 * L + packed_at, dBC_sums, mask=packed_in)
                else:
                    tl.store(dBC + (i * N + n) * 2 * L + dBC_at, dBC_sums)
                dstate_at = dstate + n * channels
                tl.store(dstate_at, select_row(recurrence_step(e, g, 0.0, SIGNED), row, 0), mask=in_d)
            # u, z and dout are loaded again, from addresses computed again: kept, they would occupy registers
            # that the loop needs.
            t = opaque(i) * L + row
            in_t = t < T
            inside = in_t & in_d[None, :]
            at = tile_offsets(u_d, u_t, d, t, U_LAYOUT)
            u_tile = load_tile(u + at, inside, UNMASKED)
            if HAS_Z:
                z_at = at if SAME_STRIDES else tile_offsets(z_d, z_t, d, t, Z_LAYOUT)
                z_tile = load_tile(z + z_at, inside, UNMASKED)
                dout_at = at if SAME_STRIDES else tile_offsets(dout_d, dout_t, d, t, DOUT_LAYOUT)
                dout_tile = load_tile(dout + dout_at, inside, UNMASKED)
                if HAS_SAVED_Y:
                    y_at = at if SAME_STRIDES else tile_offsets(du_d, du_t, d, t, DU_LAYOUT)
                    y = load_tile(saved_y + y_at, inside, UNMASKED)
            if (DELTA_LAYOUT != 0) | (U_LAYOUT != 0) | (DOUT_LAYOUT != 0) | (Z_LAYOUT != 0):
                u_tile += channel_layout_zeros(A, d, t, A_n)
            du_at = at if SAME_STRIDES else tile_offsets(du_d, du_t, d, t, DU_LAYOUT)
            store_tile(du + du_at, dx * delta_tile + D_d[None, :] * dy, inside, UNMASKED)
            dD += tl.sum(dy * u_tile, axis=0)
            ddelta_tile = dx * u_tile + wA * LN_2
            if DELTA_SOFTPLUS:
                ddelta_tile *= softplus_derivative(delta_tile)
            elif not UNMASKED:
                ddelta_tile = tl.where(in_t, ddelta_tile, 0.0)
            ddelta_bias += tl.sum(ddelta_tile, axis=0)
            store_tile(ddelta + du_at, ddelta_tile, inside, UNMASKED)
            if HAS_Z:
                gate = sigmoid(z_tile)
                if not HAS_SAVED_Y:
                    y += D_d[None, :] * u_tile
                dz_tile = dout_tile * y * gate * (1.0 + z_tile * (1.0 - gate))
                store_tile(dz + du_at, dz_tile, inside, UNMASKED)
            i -= 1
    tl.store(dparams + N * channels, dD, mask=in_d)
    tl.store(dparams + (N + 1) * channels, ddelta_bias, mask=in_d)
