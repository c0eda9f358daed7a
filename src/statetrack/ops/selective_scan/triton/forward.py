"""The Triton kernels of the forward selective scan. How they work: docs/selective_scan.md.

A program owns BD channels of one sequence, or of one segment of it, and walks along time in tiles of L steps.
It loads a tile's inputs once and then takes the N states of its channels one after the other: for each, a
whole tile of h_t is computed in registers and read out into y. Between tiles a state waits in memory, in
`saved`, which is what the backward starts from. Names as in `reference.py`; all arithmetic is float32.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false

import triton.language as tl

from statetrack.ops.selective_scan.triton.tiles import (
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
    sigmoid,
    softplus,
    split_rows,
    store_tile,
    strides,
    take_row,
    transition,
    transition_slope,
    two_rows,
    walk_rows,
    with_bias,
)

# A branch on a constant may not be joined to one on a number: the compiler drops only the former.
# ruff: noqa: SIM102


@kernel
def forward_kernel(
    u, delta, A, B, C, D, z, bias, state, cu_seqlens, order, out, last, saved, ungated, ends, products,
    channels, T, tiles, each, segments,
    u_b, u_d, u_t, delta_b, delta_d, delta_t, z_b, z_d, z_t, out_b, out_d, out_t,
    B_b, B_n, B_t, C_b, C_n, C_t, A_d, A_n, state_b, state_d, state_n,
    N: tl.constexpr, BD: tl.constexpr, L: tl.constexpr, TAIL: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, SOFTPLUS: tl.constexpr,
    EXTENDED: tl.constexpr, SEGMENTED: tl.constexpr, PACKED: tl.constexpr,
    ORDERED: tl.constexpr, SAVE: tl.constexpr, KEEP: tl.constexpr, FULL: tl.constexpr, ALIKE: tl.constexpr,
    VECTOR: tl.constexpr, PAIRS: tl.constexpr, U_LIES: tl.constexpr, DELTA_LIES: tl.constexpr,
    Z_LIES: tl.constexpr, OUT_LIES: tl.constexpr,
):  # fmt: skip
    if VECTOR:
        T = by_eight(T)
    if PAIRS:
        channels = by_two(channels)
    u_b, u_d, u_t = strides(u_b, u_d, u_t, U_LIES, VECTOR, PAIRS)
    delta_b, delta_d, delta_t = strides(delta_b, delta_d, delta_t, DELTA_LIES, VECTOR, PAIRS)
    z_b, z_d, z_t = strides(z_b, z_d, z_t, Z_LIES, VECTOR, PAIRS)
    out_b, out_d, out_t = strides(out_b, out_d, out_t, OUT_LIES, VECTOR, PAIRS)
    b = tl.program_id(1).to(tl.int64)
    if ORDERED:
        b = tl.load(order + tl.program_id(1)).to(tl.int64)
    place = b * N * channels  # of the one state a program keeps if the others are not saved
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    in_d = d < channels
    pair = tl.arange(0, 2)[None, :]
    start, half = 0, TAIL
    if PACKED:
        start, T, tiles, half = packed_sequence(cu_seqlens, b, L)
    i = 0
    stop = tiles
    if SEGMENTED:
        segment = b % segments
        b = b // segments
        i = (segment * each).to(tl.int32)
        stop = tl.minimum(i + each, tiles)
    if SAVE:  # packed sequences before this one have no more states to save than start // L
        place = (start // L if PACKED else b * (tiles - 1)) * N * channels
    u = first_step(u, b, start, u_b, u_t, PACKED)
    delta = first_step(delta, b, start, delta_b, delta_t, PACKED)
    z = first_step(z, b, start, z_b, z_t, PACKED)
    out = first_step(out, b, start, out_b, out_t, PACKED)
    ungated = first_step(ungated, b, start, out_b, out_t, PACKED)
    B = first_step(B, b, start, B_b, B_t, PACKED)
    C = first_step(C, b, start, C_b, C_t, PACKED)
    state += b * state_b
    last += b * N * channels + d
    saved += place + d
    if SEGMENTED:
        if segment > 0:  # the state that enters this segment, from what the ones before do to a state
            before = b * segments * N * channels + d
            for n in range(N):
                h0 = tl.zeros((BD,), tl.float32)
                if HAS_STATE:
                    h0 = tl.load(state + n * state_n + d * state_d, mask=in_d, other=0.0).to(tl.float32)
                j = 0
                while j < segment:
                    at = before + (j * N + n) * channels
                    h0 = h0 * tl.load(products + at, mask=in_d, other=0.0)
                    h0 += tl.load(ends + at, mask=in_d, other=0.0)
                    j += 1
                at = saved + n * channels
                if SAVE:
                    at += (i - 1).to(tl.int64) * N * channels
                tl.store(at, h0, mask=in_d)
    # whole tiles, and then, if the last steps fill at most half a tile, half a one
    for part in tl.static_range(1 + TAIL):
        row = tl.arange(0, L >> part)[:, None]
        # 32 numbers with C's or more, or the compiler has every lane load all of them
        rows = tl.arange(0, 16)[:, None] % (L >> part)
        while i < tl.minimum(stop, tiles - half + part):
            t = i * L + row
            in_t = t < T
            inside = in_t & in_d[None, :]
            at = offsets(u_d, u_t, d, t, U_LIES)
            step = load_tile(
                delta + (at if ALIKE else offsets(delta_d, delta_t, d, t, DELTA_LIES)), inside, FULL
            )
            u_t_ = load_tile(u + at, inside, FULL)
            if (DELTA_LIES != 0) | (U_LIES != 0):
                step += lanes_along_channels(A, d, t, A_n)
            step = with_bias(step, bias, d, in_d, HAS_BIAS, SOFTPLUS)
            if not FULL:
                step = tl.where(in_t, step, 0.0)  # steps past the end leave the state as it is
            x = step * u_t_
            y = tl.zeros((L >> part, BD), tl.float32)
            if HAS_D:
                y = tl.load(D + d, mask=in_d, other=0.0).to(tl.float32)[None, :] * u_t_
            if SAVE:
                enter = saved + (i - 1).to(tl.int64) * N * channels
                leave = enter + N * channels
            else:
                enter, leave = saved, saved
            leave = tl.where(i + 1 < tiles, leave, last)
            enter_n, entered = channels, in_d
            if HAS_STATE:
                enter = tl.where(i > 0, enter, state + d * state_d)
                enter_n = tl.where(i > 0, channels, state_n)
            else:
                entered = in_d & (i > 0)
            BC = two_rows(B, C, i * L + rows, B_t, C_t)
            BC_n = tl.where(pair == 0, B_n, C_n)
            in_BC = (i * L + rows < T) & (pair < 2)
            # what the next state needs is loaded while this one is computed
            BC_next = load_tile(BC, in_BC, FULL)
            A_next = tl.load(A + d * A_d, mask=in_d, other=0.0).to(tl.float32) * LOG2_E
            h_next = tl.load(enter, mask=entered, other=0.0).to(tl.float32)
            for n in range(N):
                A_log2, h0 = A_next, h_next
                B_t_, C_t_ = split_rows(BC_next, L >> part)
                m = tl.minimum(n + 1, N - 1)
                BC_next = load_tile(BC + m * BC_n, in_BC, FULL)
                A_next = tl.load(A + d * A_d + m * A_n, mask=in_d, other=0.0).to(tl.float32) * LOG2_E
                h_next = tl.load(enter + m * enter_n, mask=entered, other=0.0).to(tl.float32)
                a = transition_slope(step * A_log2[None, :], EXTENDED)
                xB = x * B_t_[:, None]
                h = walk_rows(a, tl.where(row == 0, advance(a, h0[None, :], xB, EXTENDED), xB), EXTENDED)
                y += h * C_t_[:, None]
                tl.store(leave + n * channels, take_row(h, row, (L >> part) - 1), mask=in_d)
            # where the results lie is computed here: it would take the registers the loop above needs
            t = opaque(i) * L + row
            inside = (t < T) & in_d[None, :]
            at = offsets(u_d, u_t, d, t, U_LIES)
            out_at = at if ALIKE else offsets(out_d, out_t, d, t, OUT_LIES)
            if HAS_Z:
                if KEEP:
                    store_tile(ungated + out_at, y, inside, FULL)
                z_t_ = load_tile(z + (at if ALIKE else offsets(z_d, z_t, d, t, Z_LIES)), inside, FULL)
                y *= z_t_ * sigmoid(z_t_)
            store_tile(out + out_at, y, inside, FULL)
            i += 1


@kernel
def step_kernel(
    u, delta, A, B, C, D, z, bias, state, out, last, channels,
    u_b, u_d, delta_b, delta_d, z_b, z_d, out_b, out_d, B_b, B_n, C_b, C_n, A_d, A_n,
    state_b, state_d, state_n,
    N: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, SOFTPLUS: tl.constexpr, EXTENDED: tl.constexpr,
):  # fmt: skip
    """One step of decoding, T = 1: all states of BD channels at once."""
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    n = tl.arange(0, BN)[:, None]
    in_d, in_n = d < channels, n < N
    inside = in_n & in_d[None, :]
    u_t_ = tl.load(u + b * u_b + d * u_d, mask=in_d, other=0.0).to(tl.float32)
    step = tl.load(delta + b * delta_b + d * delta_d, mask=in_d, other=0.0).to(tl.float32)
    A_log2 = tl.load(A + (d * A_d)[None, :] + n * A_n, mask=inside, other=0.0).to(tl.float32) * LOG2_E
    B_t_ = tl.load(B + b * B_b + n * B_n, mask=in_n, other=0.0).to(tl.float32)
    C_t_ = tl.load(C + b * C_b + n * C_n, mask=in_n, other=0.0).to(tl.float32)
    if HAS_BIAS:
        step += tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)
    if SOFTPLUS:
        step = softplus(step)
    h = (step * u_t_)[None, :] * B_t_
    if HAS_STATE:
        a = transition(step[None, :] * A_log2, EXTENDED)
        at = state + b * state_b + (d * state_d)[None, :] + n * state_n
        h += a * tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(last + (b * N + n) * channels + d[None, :], h, mask=inside)
    y = tl.sum(h * C_t_, axis=0)
    if HAS_D:
        y += tl.load(D + d, mask=in_d, other=0.0).to(tl.float32) * u_t_
    if HAS_Z:
        z_t_ = tl.load(z + b * z_b + d * z_d, mask=in_d, other=0.0).to(tl.float32)
        y *= z_t_ * sigmoid(z_t_)
    tl.store(out + b * out_b + d * out_d, y.to(out.dtype.element_ty), mask=in_d)
