"""Stepwise forward kernel: one step of the recurrence after the other, with channels innermost.

    h_t = a_t h_{t-1} + delta_t B_t u_t        y_t = sum_n C_t h_t + D u_t        out_t = y_t silu(z_t)

docs/internals/selective_scan.md, "Stepwise forward". Used where time is not cut into segments and N is at
most 16.

Grid: (blocks of BD channels, sequences); a program is one warp. Registers: the states h and A of its
channels, (BN, BD), one channel per lane, for the whole sequence; the inputs of this step and of the next one.
It takes exactly the steps of its sequence and saves the states every L steps, where a tile of the backward
begins. Arithmetic is float32; names as in `reference.py`, where `x_now` is x_t and `x_next` is x_{t+1}.
"""

# A branch on a constexpr may not be joined to one on a number: the compiler drops only the former.
# ruff: noqa: SIM102

import triton.language as tl

from statetrack.ops.selective_scan.triton.jit import scan_jit
from statetrack.ops.selective_scan.triton.load_store import (
    BC_pointers,
    channel_layout_zeros,
    first_step,
    load_masked,
    packed_sequence,
)
from statetrack.ops.selective_scan.triton.tile_math import (
    LOG2_E,
    opaque,
    recurrence_step,
    sigmoid,
    softplus,
    transition_exp,
)


@scan_jit
def stepwise_forward_kernel(
    u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens, longest_first,
    out, last_state, saved_states, saved_y, channels, T,
    u_b, u_t, delta_b, delta_t, z_b, z_t, out_b, out_t,
    B_b, B_n, B_t, C_b, C_n, C_t, A_d, A_n, initial_state_b, initial_state_d, initial_state_n,
    N: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, L: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_DELTA_BIAS: tl.constexpr, HAS_INITIAL_STATE: tl.constexpr,
    DELTA_SOFTPLUS: tl.constexpr, SIGNED: tl.constexpr, PACKED: tl.constexpr, SORTED: tl.constexpr,
    SAVE_STATES: tl.constexpr, SAVE_Y: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    if SORTED:
        b = tl.load(longest_first + b).to(tl.int64)
    start = 0
    if PACKED:
        start, T, _, _ = packed_sequence(cu_seqlens, b, L)  # pyright: ignore[reportGeneralTypeIssues]
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    n = tl.arange(0, BN)
    in_d, in_n = d < channels, n < N
    inside = in_n[:, None] & in_d[None, :]
    u = first_step(u, b, start, u_b, u_t, PACKED)
    delta = first_step(delta, b, start, delta_b, delta_t, PACKED)
    z = first_step(z, b, start, z_b, z_t, PACKED)
    out = first_step(out, b, start, out_b, out_t, PACKED)
    saved_y = first_step(saved_y, b, start, out_b, out_t, PACKED)
    B = first_step(B, b, start, B_b, B_t, PACKED)
    C = first_step(C, b, start, C_b, C_t, PACKED)
    BC = BC_pointers(B, C, n[:, None], B_n, C_n)
    BC_t = tl.where(tl.arange(0, 2)[None, :] == 0, B_t, C_t)
    saved_states += (start // L if PACKED else b * ((T - 1) // L)) * N * channels
    # Loaded as (channels, states) and transposed: the compiler puts lanes along the first axis where neither
    # axis is known to have stride 1, and lanes must go along channels.
    inside_transposed = in_d[:, None] & in_n[None, :]
    A_log2 = tl.trans(load_masked(A + d[:, None] * A_d + n[None, :] * A_n, inside_transposed)) * LOG2_E
    A_log2 += channel_layout_zeros(A, d, n[:, None], A_n)
    h = tl.zeros((BN, BD), tl.float32)
    if HAS_INITIAL_STATE:
        initial_state += b * initial_state_b
        h_at = initial_state + d[:, None] * initial_state_d + n[None, :] * initial_state_n
        h = tl.trans(load_masked(h_at, inside_transposed))
    if HAS_D:
        D_d = load_masked(D + d, in_d)
    if HAS_DELTA_BIAS:
        delta_bias_d = load_masked(delta_bias + d, in_d)
    here = in_d & (T > 0)
    u_next, delta_next, z_next = (
        load_masked(u + d, here),
        load_masked(delta + d, here),
        load_masked(z + d, here),
    )
    BC_next = load_masked(BC, in_n[:, None] & (T > 0))
    at = d
    t = 0
    while t < T:
        u_now, delta_now, z_now = u_next, delta_next, z_next
        B_now, C_now = tl.split(BC_next)
        out_at = at if SAME_STRIDES else t * out_t + d
        # The next step's inputs are prefetched while this step is computed: a step is too short to hide a
        # load, and there are only as many warps as sequences times blocks of channels.
        t += 1
        at += u_t
        here = in_d & (t < T)
        u_next = load_masked(u + at, here)
        delta_next = load_masked(delta + (at if SAME_STRIDES else t * delta_t + d), here)
        if HAS_Z:
            z_next = load_masked(z + (at if SAME_STRIDES else t * z_t + d), here)
        BC_next = load_masked(BC + t * BC_t, in_n[:, None] & (t < T))
        if HAS_DELTA_BIAS:
            delta_now += delta_bias_d
        if DELTA_SOFTPLUS:
            delta_now = softplus(delta_now)
        e = transition_exp(delta_now[None, :] * A_log2, SIGNED)
        h = recurrence_step(e, h, (delta_now * u_now)[None, :] * B_now[:, None], SIGNED)
        y = tl.sum(h * C_now[:, None], axis=0)
        if HAS_D:
            y += D_d * u_now
        if HAS_Z:
            if SAVE_Y:
                tl.store(saved_y + out_at, y.to(saved_y.dtype.element_ty), mask=in_d)
            y *= z_now * sigmoid(z_now)
        tl.store(out + out_at, y.to(out.dtype.element_ty), mask=in_d)
        if SAVE_STATES:
            if (t % L == 0) & (t < T):
                # Addresses are computed here, not before the loop, where they would occupy registers.
                tl.store(saved_states + n[:, None] * opaque(channels) + d[None, :], h, mask=inside)
                saved_states += N * channels
    tl.store(last_state + b * N * channels + n[:, None] * channels + d[None, :], h, mask=inside)
