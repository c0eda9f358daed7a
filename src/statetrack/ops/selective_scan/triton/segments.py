"""The Triton kernels for parts of a long sequence: what each does to a state, or back to a gradient.

Tiles and names as in `triton_forward` and `triton_backward`.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false

import triton.language as tl

from statetrack.ops.selective_scan.triton.tiles import (
    LOG2_E,
    by_eight,
    kernel,
    lanes_along_channels,
    load_tile,
    offsets,
    scan_rows,
    shift_rows,
    sigmoid,
    strides,
    take_row,
    transition,
    with_bias,
)

# A branch on a constant may not be joined to one on a number: the compiler drops only the former.
# ruff: noqa: SIM102


@kernel
def forward_segment_kernel(
    u, delta, A, B, bias, ends, products, channels, T, each, segments,
    u_b, u_d, u_t, delta_b, delta_d, delta_t, B_b, B_n, B_t, A_d, A_n,
    N: tl.constexpr, BD: tl.constexpr, L: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    EXTENDED: tl.constexpr, FULL: tl.constexpr, ALIKE: tl.constexpr, VECTOR: tl.constexpr,
    U_LIES: tl.constexpr, DELTA_LIES: tl.constexpr,
):  # fmt: skip
    """What every segment but the last does to a state h: products h + ends."""
    if VECTOR:
        T = by_eight(T)
    u_b, u_d, u_t = strides(u_b, u_d, u_t, U_LIES, VECTOR, False)
    delta_b, delta_d, delta_t = strides(delta_b, delta_d, delta_t, DELTA_LIES, VECTOR, False)
    b = tl.program_id(1).to(tl.int64)
    segment = b % (segments - 1)
    b = b // (segments - 1)
    first = (segment * each).to(tl.int32)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    in_d = d < channels
    row = tl.arange(0, L)[:, None]
    rows = tl.arange(0, 2 * L) % L
    u += b * u_b
    delta += b * delta_b
    B += b * B_b
    ends += (b * segments + segment) * N * channels + d
    products += (b * segments + segment) * N * channels + d
    total = tl.zeros((BD,), tl.float32)
    i = first
    while i < first + each:
        t = i * L + row
        inside = (t < T) & in_d[None, :]
        at = offsets(u_d, u_t, d, t, U_LIES)
        step = load_tile(delta + (at if ALIKE else offsets(delta_d, delta_t, d, t, DELTA_LIES)), inside, FULL)
        u_t_ = load_tile(u + at, inside, FULL)
        if (DELTA_LIES != 0) | (U_LIES != 0):
            step += lanes_along_channels(A, d, t, A_n)
        step = with_bias(step, bias, d, in_d, HAS_BIAS, SOFTPLUS)
        x = step * u_t_
        total += tl.sum(step, axis=0)
        again = in_d & (i > first)
        B_at = B + (i * L + rows) * B_t
        B_next = tl.load(B_at).to(tl.float32)
        A_next = tl.load(A + d * A_d, mask=in_d, other=0.0).to(tl.float32) * LOG2_E
        h_next = tl.load(ends, mask=again, other=0.0)
        for n in range(N):
            A_log2, h0 = A_next, h_next
            B_t_, _ = tl.split(tl.permute(tl.reshape(B_next, (2, L)), (1, 0)))
            m = tl.minimum(n + 1, N - 1)
            B_next = tl.load(B_at + m * B_n).to(tl.float32)
            A_next = tl.load(A + d * A_d + m * A_n, mask=in_d, other=0.0).to(tl.float32) * LOG2_E
            h_next = tl.load(ends + m * channels, mask=again, other=0.0)
            a = transition(step * A_log2[None, :], EXTENDED)
            product, h = scan_rows(a, x * B_t_[:, None], h0, row)
            tl.store(ends + n * channels, take_row(h, row, L - 1), mask=in_d)
            if EXTENDED:
                product = take_row(product, row, L - 1)
                product *= tl.load(products + n * channels, mask=again, other=1.0)
                tl.store(products + n * channels, product, mask=in_d)
        i += 1
    if not EXTENDED:
        for n in range(N):
            A_log2 = tl.load(A + d * A_d + n * A_n, mask=in_d, other=0.0).to(tl.float32) * LOG2_E
            tl.store(products + n * channels, tl.exp2(A_log2 * total), mask=in_d)


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
    delta_b, delta_d, delta_t = strides(delta_b, delta_d, delta_t, DELTA_LIES, VECTOR, False)
    z_b, z_d, z_t = strides(z_b, z_d, z_t, Z_LIES, VECTOR, False)
    dout_b, dout_d, dout_t = strides(dout_b, dout_d, dout_t, DOUT_LIES, VECTOR, False)
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
        step = with_bias(step, bias, d, in_d, HAS_BIAS, SOFTPLUS)
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
