"""The Triton kernels of the backward selective scan. How they work: docs/selective_scan.md.

    g_t = C_t dy_t + a_{t+1} g_{t+1}                         the gradient of h_t
    dB_t = sum_d g_t x_t        dC_t = sum_d h_t dy_t        dx_t = sum_n B_t g_t        x_t = delta_t u_t
    w_t = g_t h_{t-1} a'_t      ddelta_t = sum_n w_t A       dA = sum_t w_t delta_t

with a' the derivative of a in delta A. The tiles of `triton_forward`, last one first: each recomputes its
states from the one saved before it. Between tiles a_t g_t waits in `carry` and dA in `sums`. Sums over all
channels and all sequences are left to `reduce_kernel`, in a fixed order, so results repeat exactly.
"""

import triton.language as tl

from statetrack.ops.selective_scan.triton_tiles import (
    LN_2,
    LOG2_E,
    by_eight,
    first_step,
    kernel,
    lanes_along_channels,
    load_tile,
    offsets,
    opaque,
    packed_sequence,
    scan_rows,
    shift_rows,
    sigmoid,
    softplus,
    softplus_slope,
    split_rows,
    store_tile,
    sum_channels,
    take_row,
    transition,
    transition_slope,
    two_rows,
)

# A branch on a constant may not be joined to one on a number: the compiler drops only the former.
# ruff: noqa: SIM102


@kernel
def backward_kernel(
    u, delta, A, B, C, D, z, bias, state, cu_seqlens, saved, dout, dlast, du, ddelta, dz, dBC, sums, carry,
    starts, products, batch, channels, T, tiles, each, segments,
    u_b, u_d, u_t, delta_b, delta_d, delta_t, z_b, z_d, z_t, dout_b, dout_d, dout_t, du_b, du_d, du_t,
    B_b, B_n, B_t, C_b, C_n, C_t, A_d, A_n, state_b, state_d, state_n, dlast_b, dlast_d, dlast_n,
    N: tl.constexpr, BD: tl.constexpr, L: tl.constexpr, TAIL: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_LAST: tl.constexpr,
    SOFTPLUS: tl.constexpr, EXTENDED: tl.constexpr, SEGMENTED: tl.constexpr, PACKED: tl.constexpr,
    FULL: tl.constexpr, ALIKE: tl.constexpr, VECTOR: tl.constexpr, U_LIES: tl.constexpr,
    DELTA_LIES: tl.constexpr, Z_LIES: tl.constexpr, DOUT_LIES: tl.constexpr, DU_LIES: tl.constexpr,
):  # fmt: skip
    if VECTOR:
        T = by_eight(T)
        if U_LIES == 1:
            u_b, u_d = by_eight(u_b), by_eight(u_d)
        if DELTA_LIES == 1:
            delta_b, delta_d = by_eight(delta_b), by_eight(delta_d)
        if Z_LIES == 1:
            z_b, z_d = by_eight(z_b), by_eight(z_d)
        if DOUT_LIES == 1:
            dout_b, dout_d = by_eight(dout_b), by_eight(dout_d)
        if DU_LIES == 1:
            du_b, du_d = by_eight(du_b), by_eight(du_d)
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    in_d = d < channels
    pair = tl.arange(0, 2)[None, :]
    carry += b * N * channels + d
    sums += b * (N + 2) * channels + d
    start, half, row_tiles = 0, TAIL, tiles
    if PACKED:
        start, T, tiles, half = packed_sequence(cu_seqlens, b, L)  # pyright: ignore[reportGeneralTypeIssues]
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
        rows = tl.arange(0, L)[:, None] % (L >> (TAIL - part))
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
            if HAS_BIAS:
                step += tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
            if SOFTPLUS:
                step = softplus(step)
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
                a = transition(step * A_log2[None, :], EXTENDED)
                _, h = scan_rows(a, x * B_t_[:, None], h0, row)
                # from the end of the tile: flipped, row 0 is the last step; what enters is a_{t+1} g_{t+1}
                c = tl.flip(C_t_[:, None] * dy, 0)
                a_after = shift_rows(tl.flip(a, 0), tl.full((BD,), 1.0, tl.float32), row)
                _, g = scan_rows(a_after, c, q, row)
                g = tl.flip(g, 0)
                if HAS_Z:
                    y += h * C_t_[:, None]
                dx += g * B_t_[:, None]
                # a' h comes before its product with g: where a has underflowed to zero, g h may overflow
                w = transition_slope(a, shift_rows(h, h0, row), EXTENDED) * g
                dw += w * A_log2[None, :]
                tl.store(sums + n * channels, dA + tl.sum(w * step, axis=0), mask=in_d)
                dBC_t = sum_channels(g * x, h * dy, L >> (TAIL - part), BD)
                if PACKED:
                    tl.store(dBC + n * 2 * L + packed_at, dBC_t, mask=packed_in)
                else:
                    tl.store(dBC + (i * N + n) * 2 * L + dBC_at, dBC_t)
                tl.store(carry + n * channels, take_row(a * g, row, 0), mask=in_d)
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
                dz_t_ = dout_t_ * (y + D_d[None, :] * u_t_) * gate * (1.0 + z_t_ * (1.0 - gate))
                store_tile(dz + du_at, dz_t_, inside, FULL)
            i -= 1
    tl.store(sums + N * channels, dD, mask=in_d)
    tl.store(sums + (N + 1) * channels, dbias, mask=in_d)


@kernel
def backward_segment_kernel(
    delta, A, C, z, bias, dout, starts, products, channels, T, tiles, each, segments,
    delta_b, delta_d, delta_t, z_b, z_d, z_t, dout_b, dout_d, dout_t, C_b, C_n, C_t, A_d, A_n,
    N: tl.constexpr, BD: tl.constexpr, L: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr, EXTENDED: tl.constexpr, FULL: tl.constexpr, ALIKE: tl.constexpr,
    VECTOR: tl.constexpr, DELTA_LIES: tl.constexpr, Z_LIES: tl.constexpr, DOUT_LIES: tl.constexpr,
):  # fmt: skip
    """What every segment but the first does to a gradient q that enters it from behind: products q + starts.

    The products are those of the forward; it has not taken the last segment's, so they are taken here.
    """
    if VECTOR:
        T = by_eight(T)
        if DELTA_LIES == 1:
            delta_b, delta_d = by_eight(delta_b), by_eight(delta_d)
        if Z_LIES == 1:
            z_b, z_d = by_eight(z_b), by_eight(z_d)
        if DOUT_LIES == 1:
            dout_b, dout_d = by_eight(dout_b), by_eight(dout_d)
    b = tl.program_id(1).to(tl.int64)
    segment = b % (segments - 1) + 1
    b = b // (segments - 1)
    first = (segment * each).to(tl.int32)
    stop = tl.minimum(first + each, tiles) - 1
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    in_d = d < channels
    row = tl.arange(0, L)[:, None]
    rows = tl.arange(0, 2 * L) % L
    delta += b * delta_b
    z += b * z_b
    dout += b * dout_b
    C += b * C_b
    starts += (b * segments + segment) * N * channels + d
    products += (b * segments + segment) * N * channels + d
    total = tl.zeros((BD,), tl.float32)
    i = stop
    while i >= first:
        t = i * L + row
        in_t = t < T
        inside = in_t & in_d[None, :]
        at = offsets(delta_d, delta_t, d, t, DELTA_LIES)
        step = load_tile(delta + at, inside, FULL)
        dy = load_tile(dout + (at if ALIKE else offsets(dout_d, dout_t, d, t, DOUT_LIES)), inside, FULL)
        if HAS_Z:
            z_t_ = load_tile(z + (at if ALIKE else offsets(z_d, z_t, d, t, Z_LIES)), inside, FULL)
            dy *= z_t_ * sigmoid(z_t_)
        if (DELTA_LIES != 0) | (DOUT_LIES != 0) | (Z_LIES != 0):
            nothing = lanes_along_channels(A, d, t, A_n)
            step += nothing
            dy += nothing
        if HAS_BIAS:
            step += tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
        if SOFTPLUS:
            step = softplus(step)
        if not FULL:
            step = tl.where(in_t, step, 0.0)
        total += tl.sum(step, axis=0)
        again = in_d & (i < stop)
        C_at = C + (i * L + rows) * C_t
        in_C = i * L + rows < T
        C_next = tl.load(C_at, mask=in_C, other=0.0).to(tl.float32)
        A_next = tl.load(A + d * A_d, mask=in_d, other=0.0).to(tl.float32) * LOG2_E
        q_next = tl.load(starts, mask=again, other=0.0)
        for n in range(N):
            A_log2, q = A_next, q_next
            C_t_, _ = tl.split(tl.permute(tl.reshape(C_next, (2, L)), (1, 0)))
            m = tl.minimum(n + 1, N - 1)
            C_next = tl.load(C_at + m * C_n, mask=in_C, other=0.0).to(tl.float32)
            A_next = tl.load(A + d * A_d + m * A_n, mask=in_d, other=0.0).to(tl.float32) * LOG2_E
            q_next = tl.load(starts + m * channels, mask=again, other=0.0)
            a = transition(step * A_log2[None, :], EXTENDED)
            c = tl.flip(C_t_[:, None] * dy, 0)
            a = tl.flip(a, 0)
            _, g = scan_rows(shift_rows(a, tl.full((BD,), 1.0, tl.float32), row), c, q, row)
            tl.store(starts + n * channels, take_row(a * g, row, L - 1), mask=in_d)
            if EXTENDED:
                if segment == segments - 1:
                    product, _h = scan_rows(a, a, q, row)
                    product = take_row(product, row, L - 1)
                    product *= tl.load(products + n * channels, mask=again, other=1.0)
                    tl.store(products + n * channels, product, mask=in_d)
        i -= 1
    if not EXTENDED:
        if segment == segments - 1:
            for n in range(N):
                A_log2 = tl.load(A + d * A_d + n * A_n, mask=in_d, other=0.0).to(tl.float32) * LOG2_E
                tl.store(products + n * channels, tl.exp2(A_log2 * total), mask=in_d)


@kernel
def reduce_kernel(
    dBC, sums, dB, dC, dA, dD, dbias, blocks, batch, channels, T, tiles, rows, columns,
    dB_b, dB_n, dB_t, dC_b, dC_n, dC_t,
    N: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """The sums `backward_kernel` leaves: over sequences and segments, and for dB and dC over blocks."""
    item = tl.program_id(0)
    if item < columns:
        column = item * BW + tl.arange(0, BW)
        width = (N + 2) * channels
        part = tl.zeros((BR, BW), tl.float32)
        j = 0
        while j < rows:
            r = j + tl.arange(0, BR)[:, None]
            at = sums + r.to(tl.int64) * width + column[None, :]
            part += tl.load(at, mask=(r < rows) & (column < width)[None, :], other=0.0)
            j += BR
        total = tl.sum(part, axis=0)
        n, d = column // channels, column % channels
        tl.store(dA + d * N + n, total, mask=n < N)
        tl.store(dD + d, total, mask=n == N)
        tl.store(dbias + d, total, mask=n == N + 1)
    else:
        tile = (item - columns).to(tl.int64)
        number = tl.arange(0, BN * 2 * L)
        b, state, which = tile // tiles, number // (2 * L), number % (2 * L)
        t = (tile % tiles) * L + which % L
        inside = (state < N) & (t < T)  # half a tile leaves the rest of its place unwritten
        at_tile = dBC + tile * N * 2 * L + number
        block_sum = tl.zeros((BN * 2 * L,), tl.float32)
        k = 0
        while k < blocks:
            block_sum += tl.load(at_tile, mask=inside, other=0.0)
            at_tile += batch.to(tl.int64) * tiles * N * 2 * L
            k += 1
        at_B, at_C = b * dB_b + state * dB_n + t * dB_t, b * dC_b + state * dC_n + t * dC_t
        tl.store(dB + at_B, block_sum.to(dB.dtype.element_ty), mask=inside & (which < L))
        tl.store(dC + at_C, block_sum.to(dC.dtype.element_ty), mask=inside & (which >= L))
