"""The forward selective scan step by step, where channels lie next to each other.

A program owns BD channels of one sequence and keeps all their states in registers, a channel per lane. It
takes exactly the steps of its sequence, one after the other, and loads what a step needs one step ahead.
Every L steps it saves the states, for the backward to start from. Names as in `reference.py`.
"""

import triton
import triton.language as tl

from statetrack.ops.selective_scan.triton.tiles import (
    LOG2_E,
    advance,
    first_step,
    kernel,
    lanes_along_channels,
    opaque,
    packed_sequence,
    sigmoid,
    softplus,
    transition_slope,
    two_rows,
)

# A branch on a constant may not be joined to one on a number: the compiler drops only the former.
# ruff: noqa: SIM102


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@kernel
def stepwise_kernel(
    u, delta, A, B, C, D, z, bias, state, cu_seqlens, order, out, last, saved, ungated, channels, T,
    u_b, u_t, delta_b, delta_t, z_b, z_t, out_b, out_t,
    B_b, B_n, B_t, C_b, C_n, C_t, A_d, A_n, state_b, state_d, state_n,
    N: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, L: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, SOFTPLUS: tl.constexpr,
    EXTENDED: tl.constexpr, PACKED: tl.constexpr, ORDERED: tl.constexpr, SAVE: tl.constexpr,
    KEEP: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    if ORDERED:
        b = tl.load(order + b).to(tl.int64)
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
    ungated = first_step(ungated, b, start, out_b, out_t, PACKED)
    B = first_step(B, b, start, B_b, B_t, PACKED)
    C = first_step(C, b, start, C_b, C_t, PACKED)
    BC = two_rows(B, C, n[:, None], B_n, C_n)
    BC_t = tl.where(tl.arange(0, 2)[None, :] == 0, B_t, C_t)
    saved += (start // L if PACKED else b * ((T - 1) // L)) * N * channels
    # as (channels, states) and then transposed: lanes go along the first index if neither has stride 1
    turned = in_d[:, None] & in_n[None, :]
    A_log2 = tl.trans(_load(A + d[:, None] * A_d + n[None, :] * A_n, turned)) * LOG2_E
    A_log2 += lanes_along_channels(A, d, n[:, None], A_n)
    h = tl.zeros((BN, BD), tl.float32)
    if HAS_STATE:
        h = tl.trans(_load(state + b * state_b + d[:, None] * state_d + n[None, :] * state_n, turned))
    if HAS_D:
        D_d = _load(D + d, in_d)
    if HAS_BIAS:
        bias_d = _load(bias + d, in_d)
    here = in_d & (T > 0)
    u_next, delta_next, z_next = _load(u + d, here), _load(delta + d, here), _load(z + d, here)
    BC_next = _load(BC, in_n[:, None] & (T > 0))
    at = d
    t = 0
    while t < T:
        u_t_, step, z_t_ = u_next, delta_next, z_next
        B_t_, C_t_ = tl.split(BC_next)
        out_at = at if ALIKE else t * out_t + d
        t += 1
        at += u_t
        here = in_d & (t < T)
        u_next = _load(u + at, here)
        delta_next = _load(delta + (at if ALIKE else t * delta_t + d), here)
        if HAS_Z:
            z_next = _load(z + (at if ALIKE else t * z_t + d), here)
        BC_next = _load(BC + t * BC_t, in_n[:, None] & (t < T))
        if HAS_BIAS:
            step += bias_d
        if SOFTPLUS:
            step = softplus(step)
        a = transition_slope(step[None, :] * A_log2, EXTENDED)
        h = advance(a, h, (step * u_t_)[None, :] * B_t_[:, None], EXTENDED)
        y = tl.sum(h * C_t_[:, None], axis=0)
        if HAS_D:
            y += D_d * u_t_
        if HAS_Z:
            if KEEP:
                tl.store(ungated + out_at, y.to(ungated.dtype.element_ty), mask=in_d)
            y *= z_t_ * sigmoid(z_t_)
        tl.store(out + out_at, y.to(out.dtype.element_ty), mask=in_d)
        if SAVE:
            if (t % L == 0) & (t < T):
                # where states go is computed here: it would take registers all along
                tl.store(saved + n[:, None] * opaque(channels) + d[None, :], h, mask=inside)
                saved += N * channels
    tl.store(last + b * N * channels + n[:, None] * channels + d[None, :], h, mask=inside)
