"""Decoding kernel: one step of the recurrence, T = 1, without gradients.

    last_state = a initial_state + delta B u        out = (sum_n C last_state + D u) silu(z)

docs/internals/selective_scan.md, "Decoding". Grid: (blocks of BD channels, batch). Registers: all N states
of the BD channels, (BN, BD). Arithmetic is float32; names as in `reference.py`.
"""

import triton.language as tl

from statetrack.ops.selective_scan.triton.jit import scan_jit
from statetrack.ops.selective_scan.triton.load_store import load_masked
from statetrack.ops.selective_scan.triton.tile_math import LOG2_E, sigmoid, softplus, transition


@scan_jit
def decode_step_kernel(
    u, delta, A, B, C, D, z, delta_bias, initial_state, out, last_state, channels,
    u_b, u_d, delta_b, delta_d, z_b, z_d, out_b, out_d, B_b, B_n, C_b, C_n, A_d, A_n,
    initial_state_b, initial_state_d, initial_state_n,
    N: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_DELTA_BIAS: tl.constexpr, HAS_INITIAL_STATE: tl.constexpr, DELTA_SOFTPLUS: tl.constexpr,
    SIGNED: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    n = tl.arange(0, BN)[:, None]
    in_d, in_n = d < channels, n < N
    inside = in_n & in_d[None, :]
    u_now = load_masked(u + b * u_b + d * u_d, in_d)
    delta_now = load_masked(delta + b * delta_b + d * delta_d, in_d)
    A_log2 = load_masked(A + (d * A_d)[None, :] + n * A_n, inside) * LOG2_E
    B_now = load_masked(B + b * B_b + n * B_n, in_n)
    C_now = load_masked(C + b * C_b + n * C_n, in_n)
    if HAS_DELTA_BIAS:
        delta_now += load_masked(delta_bias + d, in_d)
    if DELTA_SOFTPLUS:
        delta_now = softplus(delta_now)
    h = (delta_now * u_now)[None, :] * B_now
    if HAS_INITIAL_STATE:
        a = transition(delta_now[None, :] * A_log2, SIGNED)
        at = initial_state + b * initial_state_b + (d * initial_state_d)[None, :] + n * initial_state_n
        h += a * load_masked(at, inside)
    tl.store(last_state + (b * N + n) * channels + d[None, :], h, mask=inside)
    y = tl.sum(h * C_now, axis=0)
    if HAS_D:
        y += load_masked(D + d, in_d) * u_now
    if HAS_Z:
        z_now = load_masked(z + b * z_b + d * z_d, in_d)
        y *= z_now * sigmoid(z_now)
    tl.store(out + b * out_b + d * out_d, y.to(out.dtype.element_ty), mask=in_d)
