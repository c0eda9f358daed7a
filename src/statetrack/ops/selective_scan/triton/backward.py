"""The Triton kernels of the backward selective scan. How they work: docs/selective_scan.md.

    g_t = C_t dy_t + a_{t+1} g_{t+1}                         the gradient of h_t
    dB_t = sum_d g_t x_t        dC_t = sum_d h_t dy_t        dx_t = sum_n B_t g_t        x_t = delta_t u_t
    w_t = g_t h_{t-1} a'_t      ddelta_t = sum_n w_t A       dA = sum_t w_t delta_t

with a' the derivative of a in delta A. The tiles of `triton_forward`, last one first: each recomputes its
states from the one saved before it. Between tiles a_t g_t waits in `carry` and dA in `sums`. Sums over all
channels and all sequences are left to `reduce_kernel`, in a fixed order, so results repeat exactly.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false

import triton.language as tl

from statetrack.ops.selective_scan.triton.tiles import (
    LN_2,
    LOG2_E,
    advance,
    by_eight,
    by_two,
    first_step,
    kernel,
    lanes_along_channels,
    load_tile,
    offsets,
    opaque,
    packed_sequence,
    shift_rows,
    sigmoid,
    softplus_slope,
    split_rows,
    store_tile,
    strides,
    sum_channels,
    take_row,
    transition_slope,
    two_rows,
    walk_rows,
    with_bias,
)

# A branch on a constant may not be joined to one on a number: the compiler drops only the former.
# ruff: noqa: SIM102


@kernel
def backward_kernel(
    u, delta, A, B, C, D, z, bias, state, cu_seqlens, order, saved, ungated, dout, dlast,
    du, ddelta, dz, dBC, sums, carry, starts, products, batch, channels, T, tiles, each, segments,
    u_b, u_d, u_t, delta_b, delta_d, delta_t, z_b, z_d, z_t, dout_b, dout_d, dout_t, du_b, du_d, du_t,
    B_b, B_n, B_t, C_b, C_n, C_t, A_d, A_n, state_b, state_d, state_n, dlast_b, dlast_d, dlast_n,
    N: tl.constexpr, BD: tl.constexpr, L: tl.constexpr, TAIL: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_LAST: tl.constexpr,
    SOFTPLUS: tl.constexpr, EXTENDED: tl.constexpr, SEGMENTED: tl.constexpr, PACKED: tl.constexpr,
    ORDERED: tl.constexpr, KEPT: tl.constexpr, FULL: tl.constexpr, ALIKE: tl.constexpr, VECTOR: tl.constexpr,
    PAIRS: tl.constexpr, U_LIES: tl.constexpr, DELTA_LIES: tl.constexpr, Z_LIES: tl.constexpr,
    DOUT_LIES: tl.constexpr, DU_LIES: tl.constexpr,
):  # fmt: skip
    if VECTOR:
        T = by_eight(T)
    if PAIRS:
        channels = by_two(channels)
    u_b, u_d, u_t = strides(u_b, u_d, u_t, U_LIES, VECTOR, PAIRS)
    delta_b, delta_d, delta_t = strides(delta_b, delta_d, delta_t, DELTA_LIES, VECTOR, PAIRS)
    z_b, z_d, z_t = strides(z_b, z_d, z_t, Z_LIES, VECTOR, PAIRS)
    dout_b, dout_d, dout_t = strides(dout_b, dout_d, dout_t, DOUT_LIES, VECTOR, PAIRS)
    du_b, du_d, du_t = strides(du_b, du_d, du_t, DU_LIES, VECTOR, PAIRS)
    b = tl.program_id(1).to(tl.int64)
    if ORDERED:
        b = tl.load(order + tl.program_id(1)).to(tl.int64)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    in_d = d < channels
    pair = tl.arange(0, 2)[None, :]
    carry += b * N * channels + d
    sums += b * (N + 2) * channels + d
    start, half, row_tiles = 0, TAIL, tiles
    if PACKED:
        start, T, tiles, half = packed_sequence(cu_seqlens, b, L)
    first = 0
    i = tiles - 1
    if SEGMENTED:
        segment = b % segments
        b = b // segments
        first = (segment * each).to(tl.int32)
        i = tl.minimum(first + each, tiles) - 1
    u = first_step(u, b, start, u_b, u_t, PACKED)
    delta = first_step(delta, b, start, delta_b, delta_t, PACKED)
    z = first_step(z, b, start, z_b, z_t, PACKED)
    dout = first_step(dout, b, start, dout_b, dout_t, PACKED)
    du = first_step(du, b, start, du_b, du_t, PACKED)
    ddelta = first_step(ddelta, b, start, du_b, du_t, PACKED)
    dz = first_step(dz, b, start, du_b, du_t, PACKED)
    ungated = first_step(ungated, b, start, du_b, du_t, PACKED)
    B = first_step(B, b, start, B_b, B_t, PACKED)
    C = first_step(C, b, start, C_b, C_t, PACKED)
    state += b * state_b
    dlast += b * dlast_b
    saved += (start // L if PACKED else b * (tiles - 1)) * N * channels + d
    if PACKED:  # dB and dC go into tiles of the whole row
        dBC += (tl.program_id(0) * row_tiles + start // L) * N * 2 * L
    else:
        dBC += (tl.program_id(0) * batch + b) * tiles * N * 2 * L
    if SEGMENTED:
        if i < tiles - 1:  # what enters this segment from behind
            after = b * segments * N * channels + d
            for n in range(N):
                q = tl.zeros((BD,), tl.float32)
                if HAS_LAST:
                    q = tl.load(dlast + n * dlast_n + d * dlast_d, mask=in_d, other=0.0).to(tl.float32)
                j = segments - 1
                while j > segment:
                    at = after + (j * N + n) * channels
                    q = q * tl.load(products + at, mask=in_d, other=0.0)
                    q += tl.load(starts + at, mask=in_d, other=0.0)
                    j -= 1
                tl.store(carry + n * channels, q, mask=in_d)
    D_d = tl.zeros((BD,), tl.float32)
    if HAS_D:
        D_d = tl.load(D + d, mask=in_d, other=0.0).to(tl.float32)
    dD = tl.zeros((BD,), tl.float32)
    dbias = tl.zeros((BD,), tl.float32)
    stop = i
    # if the last steps fill at most half a tile, half a one, and then whole tiles
    for part in tl.static_range(1 + TAIL):
        row = tl.arange(0, L >> (TAIL - part))[:, None]
        rows = tl.arange(0, 16)[:, None] % (L >> (TAIL - part))
        dBC_at = tl.arange(0, 2 * (L >> (TAIL - part)))
        dBC_row, of_C = dBC_at % (L >> (TAIL - part)), dBC_at // (L >> (TAIL - part))
        dBC_at = of_C * L + dBC_row
        while i >= tl.maximum(first, (tiles - half) * (TAIL - part)):
            t = i * L + row
            in_t = t < T
            inside = in_t & in_d[None, :]
            at = offsets(u_d, u_t, d, t, U_LIES)
            delta_at = at if ALIKE else offsets(delta_d, delta_t, d, t, DELTA_LIES)
            step = load_tile(delta + delta_at, inside, FULL)
            u_t_ = load_tile(u + at, inside, FULL)
            dy = load_tile(dout + (at if ALIKE else offsets(dout_d, dout_t, d, t, DOUT_LIES)), inside, FULL)
            if HAS_Z:
                z_t_ = load_tile(z + (at if ALIKE else offsets(z_d, z_t, d, t, Z_LIES)), inside, FULL)
                dy *= z_t_ * sigmoid(z_t_)
            if (DELTA_LIES != 0) | (U_LIES != 0) | (DOUT_LIES != 0) | (Z_LIES != 0):
                nothing = lanes_along_channels(A, d, t, A_n)
                step += nothing
                dy += nothing
            step = with_bias(step, bias, d, in_d, HAS_BIAS, SOFTPLUS)
            if not FULL:
                step = tl.where(in_t, step, 0.0)
            x = step * u_t_
            y = tl.zeros((L >> (TAIL - part), BD), tl.float32)
            dx = tl.zeros((L >> (TAIL - part), BD), tl.float32)
            dw = tl.zeros((L >> (TAIL - part), BD), tl.float32)
            enter = saved + (i - 1).to(tl.int64) * N * channels
            enter_n, entered = channels, in_d
            if HAS_STATE:
                enter = tl.where(i > 0, enter, state + d * state_d)
                enter_n = tl.where(i > 0, channels, state_n)
            else:
                entered = in_d & (i > 0)
            behind, behind_n, followed = carry, channels, in_d
            if HAS_LAST:
                behind = tl.where(i == tiles - 1, dlast + d * dlast_d, carry)
                behind_n = tl.where(i == tiles - 1, dlast_n, channels)
            else:
                followed = in_d & (i < tiles - 1)
            BC = two_rows(B, C, i * L + rows, B_t, C_t)
            BC_n = tl.where(pair == 0, B_n, C_n)
            in_BC = (i * L + rows < T) & (pair < 2)
            if PACKED:
                in_row = (start % L).to(tl.int32) + i * L + dBC_row
                packed_at = (in_row // L * N * 2 + of_C) * L + in_row % L
                packed_in = i * L + dBC_row < T
            # what the next state needs is loaded while this one is computed
            BC_next = load_tile(BC, in_BC, FULL)
            A_next = tl.load(A + d * A_d, mask=in_d, other=0.0).to(tl.float32) * LOG2_E
            h_next = tl.load(enter, mask=entered, other=0.0).to(tl.float32)
            q_next = tl.load(behind, mask=followed, other=0.0).to(tl.float32)
            for n in range(N):
                A_log2, h0, q = A_next, h_next, q_next
                B_t_, C_t_ = split_rows(BC_next, L >> (TAIL - part))
                dA = tl.load(sums + n * channels, mask=in_d & (i < stop), other=0.0)
                m = tl.minimum(n + 1, N - 1)
                BC_next = load_tile(BC + m * BC_n, in_BC, FULL)
                A_next = tl.load(A + d * A_d + m * A_n, mask=in_d, other=0.0).to(tl.float32) * LOG2_E
                h_next = tl.load(enter + m * enter_n, mask=entered, other=0.0).to(tl.float32)
                q_next = tl.load(behind + m * behind_n, mask=followed, other=0.0).to(tl.float32)
                a = transition_slope(step * A_log2[None, :], EXTENDED)
                xB = x * B_t_[:, None]
                h = walk_rows(a, tl.where(row == 0, advance(a, h0[None, :], xB, EXTENDED), xB), EXTENDED)
                # from the end of the tile: flipped, row 0 is the last step; what enters is a_{t+1} g_{t+1}
                c = tl.flip(C_t_[:, None] * dy, 0)
                a_after = shift_rows(tl.flip(a, 0), tl.full((BD,), 1.0, tl.float32), row)
                g = tl.flip(walk_rows(a_after, tl.where(row == 0, c + q[None, :], c), EXTENDED), 0)
                if HAS_Z:
                    if not KEPT:
                        y += h * C_t_[:, None]
                dx += g * B_t_[:, None]
                # a' h comes before its product with g: where a has underflowed to zero, g h may overflow
                w = a * shift_rows(h, h0, row) * g
                dw += w * A_log2[None, :]
                tl.store(sums + n * channels, dA + tl.sum(w * step, axis=0), mask=in_d)
                dBC_t = sum_channels(g * x, h * dy, L >> (TAIL - part), BD)
                if PACKED:
                    tl.store(dBC + n * 2 * L + packed_at, dBC_t, mask=packed_in)
                else:
                    tl.store(dBC + (i * N + n) * 2 * L + dBC_at, dBC_t)
                tl.store(carry + n * channels, take_row(advance(a, g, 0.0, EXTENDED), row, 0), mask=in_d)
            # loaded again: they, and even where they lie, would take the registers the loop above needs
            t = opaque(i) * L + row
            in_t = t < T
            inside = in_t & in_d[None, :]
            at = offsets(u_d, u_t, d, t, U_LIES)
            u_t_ = load_tile(u + at, inside, FULL)
            if HAS_Z:
                z_t_ = load_tile(z + (at if ALIKE else offsets(z_d, z_t, d, t, Z_LIES)), inside, FULL)
                dout_at = dout + (at if ALIKE else offsets(dout_d, dout_t, d, t, DOUT_LIES))
                dout_t_ = load_tile(dout_at, inside, FULL)
                if KEPT:
                    y = load_tile(
                        ungated + (at if ALIKE else offsets(du_d, du_t, d, t, DU_LIES)), inside, FULL
                    )
            if (DELTA_LIES != 0) | (U_LIES != 0) | (DOUT_LIES != 0) | (Z_LIES != 0):
                u_t_ += lanes_along_channels(A, d, t, A_n)
            du_at = at if ALIKE else offsets(du_d, du_t, d, t, DU_LIES)
            store_tile(du + du_at, dx * step + D_d[None, :] * dy, inside, FULL)
            dD += tl.sum(dy * u_t_, axis=0)
            dstep = dx * u_t_ + dw * LN_2
            if SOFTPLUS:
                dstep *= softplus_slope(step)
            elif not FULL:
                dstep = tl.where(in_t, dstep, 0.0)
            dbias += tl.sum(dstep, axis=0)
            store_tile(ddelta + du_at, dstep, inside, FULL)
            if HAS_Z:
                gate = sigmoid(z_t_)
                if not KEPT:
                    y += D_d[None, :] * u_t_
                dz_t_ = dout_t_ * y * gate * (1.0 + z_t_ * (1.0 - gate))
                store_tile(dz + du_at, dz_t_, inside, FULL)
            i -= 1
    tl.store(sums + N * channels, dD, mask=in_d)
    tl.store(sums + (N + 1) * channels, dbias, mask=in_d)
