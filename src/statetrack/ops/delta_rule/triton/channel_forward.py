"""The delta rule with a gate per key channel, in chunks, forward (docs/internals/gates.md).

Per chunk of C steps with state S entering, P_t = a_1 ... a_t and X_t = a_{t+1} ... a_C per channel:

    cumulate   L = -log2 |P| and its signs, P_C                                         (channel_gates.py)
    prepare    N_ts = sum_k k_tk (a_{s+1} ... a_t)_k k_sk b_s  (t > s),  A_ts likewise with q_t  (t >= s)
               q_in = P o Q,  k_out = X o K,  W = (I + N)^-1 (P o K),  E_0 = (I + N)^-1 V
    sweep      E = E_0 - W S,  S <- P_C o S + k_out^T b E
    outputs    O = q_in S + A b E

So one step from chunk to chunk is two products, and all else is done for all chunks at once. N and A are
built from pairs of neighbouring blocks of m = 1, 2, 4, ... steps, as in gated_linear_attention/triton: with r
the last step of the first block of a pair, and y_t the row k_t times the gates between t and r, the pairs'
corners of Y Y^T are those of N. Every factor is a product of gates; nothing is divided.

q and k carry 1 / norm and the cumulated sign in all these tiles; with the signs alone they are kept for the
backward pass as q_signed and k_signed, which are q and k themselves without signs. With bfloat16 inputs every
product is one of bfloat16 tiles, sums and states are float32; with float32 inputs what is carried along time
takes three tf32 products (`dot_carried`). Grids: sweep has a program per sequence, head and BV columns of v,
the others one per (chunk, head), outputs for each BV columns. Letters and `slot`: chunk_forward.py.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.channel_gates import (
    gates_to,
    last_of_first_block,
    load_sums,
    with_sign,
)
from statetrack.ops.delta_rule.triton.chunk_state import load_state, sweep_program, sweep_sequence
from statetrack.ops.delta_rule.triton.tiles import (
    chunk_rows,
    dot_out,
    dot_tf32x3,
    inverse_norm,
    load_beta,
    load_inverse,
    load_tile,
    store_tile,
    unit_lower_inverse,
)
from statetrack.ops.gated_linear_attention.triton.gates import product


@triton.jit
def dot_carried(x, y, total, BF16: tl.constexpr):
    """total + x y for what later steps depend on: one bfloat16 product, or float32 in effect."""
    if BF16:
        total = tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16), total)
    else:
        total = dot_tf32x3(x.to(tl.float32), y.to(tl.float32), total)
    return total


@triton.jit
def _dot_inverse(high, low, x, BF16: tl.constexpr):
    """The inverse, as `load_inverse` gave it, times an input tile or one of the same dtype."""
    if BF16:
        total = tl.dot(high, x, tl.dot(low, x))
    else:
        total = dot_tf32x3(high, x, None)
    return total


@triton.jit
def prepare_kernel(
    q, k, v, beta, L, A, inverse, inverse_norms, q_in, k_out, W, E, q_signed, k_signed, chunk_table, T, H,
    scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, SIGNED: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr,
    BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:  # the grid is sized for the largest number of chunks that packed sequences can have
        return
    rows, HK = tl.minimum(rows, C).to(tl.int32), H * K
    ic = tl.arange(0, C)
    i, j, valid, last = ic[:, None], ic[None, :], ic < rows, tl.minimum(ic, rows - 1) * HK
    at, slot, start = ic * HK, (chunk * H + h).to(tl.int64), (first * H + h) * K
    q, k, L, q_in, k_out, W = q + start, k + start, L + start, q_in + start, k_out + start, W + start
    q_signed, k_signed = q_signed + start, k_signed + start
    kk, qq, qk = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for part in tl.static_range(0, (K + BK - 1) // BK):
        ik = part * BK + tl.arange(0, BK)
        q_c = load_tile(q, at, ik, valid, K, BK, False)
        k_c = load_tile(k, at, ik, valid, K, BK, False)
        kk += tl.sum(k_c * k_c, axis=1)
        qq += tl.sum(q_c * q_c, axis=1)
        qk += tl.sum(q_c * k_c, axis=1)
    r_k, r_q = inverse_norm(kk, L2NORM), inverse_norm(qq, L2NORM)
    tl.store(inverse_norms + slot * 2 * C + ic, r_k)
    tl.store(inverse_norms + slot * 2 * C + C + ic, r_q)
    for slice in tl.range(0, (K + BK - 1) // BK, num_stages=1, disable_licm=True):
        tl.debug_barrier()
        ik = slice * BK + tl.arange(0, BK)
        L_c = load_sums(L, last, ik, K, BK)
        L_end = tl.load(L + (rows - 1) * HK + ik, mask=ik < K, other=0.0)[None, :]
        _, P = product(L_c)
        _, X = product(L_end - L_c)
        q_c = with_sign(load_tile(q, at, ik, valid, K, BK, False), L_c, SIGNED)
        k_c = with_sign(load_tile(k, at, ik, valid, K, BK, False), L_c, SIGNED)
        if SIGNED:
            store_tile(q_signed, q_c, at, ik, valid, K, BK)
            store_tile(k_signed, k_c, at, ik, valid, K, BK)
        q_c *= (scale * r_q)[:, None]
        k_c *= r_k[:, None]
        store_tile(q_in, q_c * P, at, ik, valid, K, BK)
        store_tile(W, k_c * P, at, ik, valid, K, BK)  # replaced below
        store_tile(k_out, with_sign(k_c * X, L_end, SIGNED), at, ik, valid, K, BK)
    # without norms and scale, which multiply rows and columns of the sums
    KK, QK = tl.zeros((C, C), tl.float32), tl.where(i == j, qk[:, None], 0.0)
    for level in tl.range(0, LEVELS, num_stages=1, disable_licm=True):
        tl.debug_barrier()  # after which tiles are loaded again: kept, they would not fit in the registers
        r = last_of_first_block(ic, level, rows) * HK
        KK_level, QK_level = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
        for part in tl.static_range(0, (K + BK - 1) // BK):
            ik = part * BK + tl.arange(0, BK)
            L_c = load_sums(L, last, ik, K, BK)
            F = gates_to(L_c, load_sums(L, r, ik, K, BK), ic, level)
            y = load_tile(k_signed, at, ik, valid, K, BK, False) * F
            KK_level = dot_carried(y, tl.trans(y), KK_level, BF16)
            x = load_tile(q_signed, at, ik, valid, K, BK, False) * F
            QK_level = dot_out(x, tl.trans(y), QK_level, BF16, OUT)
        corner = ((i ^ j) >> level == 1) & (i > j)
        KK, QK = tl.where(corner, KK_level, KK), tl.where(corner, QK_level, QK)
    QK *= (scale * r_q)[:, None] * r_k[None, :]
    tl.store(A + slot * C * C + i * C + j, QK.to(A.dtype.element_ty))
    b = load_beta(beta + first * H + h, ic * H, valid, BETA_FROM_LOGITS, HARD_BETA)
    inverse += slot * C * C
    unit_lower_inverse(inverse, KK * (r_k[:, None] * (r_k * b)[None, :]), C, BF16)

    high, low = load_inverse(inverse, i, j, C, BF16)
    for slice in tl.range(0, (K + BK - 1) // BK, num_stages=1, disable_licm=True):
        ik = slice * BK + tl.arange(0, BK)
        W_c = _dot_inverse(high, low, load_tile(W, at, ik, valid, K, BK, BF16), BF16)
        tl.debug_barrier()  # all has been read
        store_tile(W, W_c, at, ik, valid, K, BK)
    for slice in tl.range(0, (V + BV - 1) // BV, num_stages=1, disable_licm=True):
        iv = slice * BV + tl.arange(0, BV)
        v_c = load_tile(v + (first * H + h) * V, ic * (H * V), iv, valid, V, BV, BF16)
        E_c = _dot_inverse(high, low, v_c, BF16)
        store_tile(E + (first * H + h) * V, E_c, ic * (H * V), iv, valid, V, BV)


@triton.jit
def sweep_kernel(
    beta, W, k_out, E, E_total, kept, initial_state, states, final_state, cu_seqlens, first_chunk, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr, BF16: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """S of every chunk, and E in E_total; E holds what `prepare` left there. E and S are transposed here."""
    sequence, h, iv = sweep_program(H, V, BV)
    first, rows, chunk = sweep_sequence(cu_seqlens, first_chunk, sequence, T, C, 1, PACKED)
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    S, inside, state_offsets = load_state(initial_state, sequence, h, iv, H, K, V, BK, HAS_INITIAL_STATE)
    keys, values = (first * H + h) * K, (first * H + h) * V
    W, k_out, E, E_total, beta = W + keys, k_out + keys, E + values, E_total + values, beta + first * H + h
    for step in tl.range(0, tl.cdiv(rows, C), num_stages=STAGES, disable_licm=True):
        row = step * C + ic
        valid, slot = row < rows, ((chunk + step) * H + h).to(tl.int64)
        W_c = load_tile(W, row * (H * K), ik, valid, K, BK, BF16)
        k_c = load_tile(k_out, row * (H * K), ik, valid, K, BK, BF16)
        E_c = tl.trans(load_tile(E, row * (H * V), iv, valid, V, BV, False))
        end = tl.load(kept + slot * K + ik, mask=ik < K, other=0.0)
        b = load_beta(beta, row * H, valid, BETA_FROM_LOGITS, HARD_BETA)
        cell = slot * K * V + iv[:, None] * K + ik[None, :]
        tl.store(states + cell, S.to(states.dtype.element_ty), mask=inside)
        E_c -= dot_carried(S, tl.trans(W_c), None, BF16)
        store_tile(E_total, tl.trans(E_c), row * (H * V), iv, valid, V, BV)
        S = dot_carried(b[None, :] * E_c, k_c, S * end[None, :], BF16)
    tl.store(final_state + state_offsets, S, mask=inside)


@triton.jit
def outputs_kernel(
    beta, q_in, A, E, states, out, chunk_table, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr, BF16: tl.constexpr,
    OUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = (V + BV - 1) // BV
    chunk, h = tl.program_id(0) // columns, tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:
        return
    ic, iv = tl.arange(0, C), (tl.program_id(0) % columns) * BV + tl.arange(0, BV)
    valid, slot, values = ic < rows, (chunk * H + h).to(tl.int64), (first * H + h) * V
    b = load_beta(beta + first * H + h, ic * H, valid, BETA_FROM_LOGITS, HARD_BETA)
    A_c = tl.load(A + slot * C * C + ic[:, None] * C + ic[None, :])
    U = b[:, None] * load_tile(E + values, ic * (H * V), iv, valid, V, BV, False)
    O = dot_out(A_c, U, None, BF16, OUT)
    for slice in tl.range(0, (K + BK - 1) // BK, num_stages=STAGES):
        ik = slice * BK + tl.arange(0, BK)
        q_c = load_tile(q_in + (first * H + h) * K, ic * (H * K), ik, valid, K, BK, BF16)
        cell, inside = iv[:, None] * K + ik[None, :], (iv < V)[:, None] & (ik < K)[None, :]
        S = tl.load(states + slot * K * V + cell, mask=inside, other=0.0)
        O = dot_out(q_c, tl.trans(S), O, BF16, OUT)
    store_tile(out + values, O, ic * (H * V), iv, valid, V, BV)
