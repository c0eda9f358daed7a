"""Gates per channel, forward. Per chunk of C steps with state S entering (docs/internals/gates.md):

    cumulate   L and the cumulated signs c                                            (gates.py)
    scores     A_ts = sum_k q_tk (a_{s+1} ... a_t)_k k_sk,  q_in = P o Q,  k_out = X o K,  U = k_out^T V
    sweep      S of every chunk                                                       (states.py)
    outputs    O = q_in S + A V

A is built from pairs of neighbouring blocks of m = 1, 2, 4, ... steps. With r the last step of the first
block of a pair, and x_t = q_t in second and k_t in first blocks, y_t = x_t times the product of the gates
between t and r, the pairs' corners of Y Y^T are those of A: one product for all pairs of a level, every
factor a product of gates, and nothing divided.

Signs are folded: q_t and k_t are multiplied by c_t. q_in and A contain the scale. Grids: a program per
(chunk, head). `slot` is the place of a (chunk, head) in A and in the states.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.tiles import (
    chunk_rows,
    dot_out,
    dot_tf32x3,
    load_tile,
    store_tile,
)
from statetrack.ops.gated_linear_attention.triton.gates import load_cumulated, load_end, product


@triton.jit
def dot_added(x, y, BF16: tl.constexpr):
    """x y for what is added to a state: float32 in effect, or one bfloat16 product."""
    if BF16:
        result = tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16))
    else:
        result = dot_tf32x3(x, y, None)
    return result


@triton.jit
def level_decay(L_c, L, ic, ik, rows, HK, level, K: tl.constexpr, BK: tl.constexpr):
    """For blocks of m = 2^level steps: the rows in second blocks, and the products from each row to r."""
    second = ((ic >> level) & 1) == 1
    r = ((ic >> (level + 1)) << (level + 1)) + (1 << level) - 1
    L_r, _ = load_cumulated(L, tl.minimum(r, rows - 1) * HK, ik, K, BK)
    between = L_c - L_r
    whole, cut = product(tl.where(second[:, None], between, -between))
    return second, whole, cut


@triton.jit
def scores_kernel(
    q, k, v, L, A, q_in, k_out, states, chunk_table, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, PACKED: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:  # the grid is sized for the largest number of chunks that packed sequences can have
        return
    rows = tl.minimum(rows, C).to(tl.int32)
    ic = tl.arange(0, C)
    i, j, valid, last = ic[:, None], ic[None, :], ic < rows, tl.minimum(ic, rows - 1)
    slot = (chunk * H + h).to(tl.int64)
    q += (first * H + h) * K
    k += (first * H + h) * K
    L += (first * H + h) * K
    q_in += (first * H + h) * K
    k_out += (first * H + h) * K
    v += (first * H + h) * V
    A_c = tl.zeros((C, C), tl.float32)
    for slice in tl.range(0, (K + BK - 1) // BK, num_stages=1):
        ik = slice * BK + tl.arange(0, BK)
        L_c, c = load_cumulated(L, last * (H * K), ik, K, BK)
        L_end, c_end = load_end(L, (rows - 1) * (H * K), ik, K)
        q_c = load_tile(q, ic * (H * K), ik, valid, K, BK, False) * (c * scale)
        k_c = load_tile(k, ic * (H * K), ik, valid, K, BK, False) * c
        _, P = product(L_c)
        _, X = product(L_end - L_c)
        store_tile(q_in, q_c * P, ic * (H * K), ik, valid, K, BK)
        k_end = k_c * X * c_end
        store_tile(k_out, k_end, ic * (H * K), ik, valid, K, BK)
        A_c += tl.where(i == j, tl.sum(q_c * k_c, axis=1)[:, None], 0.0)
        for level in tl.range(0, LEVELS, num_stages=1, disable_licm=True):  # unrolled, it would spill
            second, _, W = level_decay(L_c, L, ic, ik, rows, H * K, level, K, BK)
            y = tl.where(second[:, None], q_c, k_c) * W
            corner = ((i >> level) & 1 == 1) & ((i >> level) == (j >> level) + 1)
            A_c += tl.where(corner, dot_out(y, tl.trans(y), None, BF16, OUT), 0.0)
        for columns in tl.range(0, (V + BV - 1) // BV, num_stages=1):
            iv = columns * BV + tl.arange(0, BV)
            v_c = load_tile(v, ic * (H * V), iv, valid, V, BV, BF16)
            U = dot_added(tl.trans(k_end), v_c, BF16)
            inside = (ik < K)[:, None] & (iv < V)[None, :]
            cell = slot * K * V + ik[:, None] * V + iv[None, :]
            tl.store(states + cell, U.to(states.dtype.element_ty), mask=inside)
    tl.store(A + slot * C * C + i * C + j, A_c.to(A.dtype.element_ty))


@triton.jit
def outputs_kernel(
    q_in, v, A, states, o, chunk_table, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = (V + BV - 1) // BV
    chunk, h = tl.program_id(0) // columns, tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:
        return
    ic, iv = tl.arange(0, C), (tl.program_id(0) % columns) * BV + tl.arange(0, BV)
    valid, slot = ic < rows, (chunk * H + h).to(tl.int64)
    A_c = tl.load(A + slot * C * C + ic[:, None] * C + ic[None, :])
    v_c = load_tile(v + (first * H + h) * V, ic * (H * V), iv, valid, V, BV, BF16)
    O = dot_out(A_c, v_c, None, BF16, OUT)
    for slice in tl.range(0, (K + BK - 1) // BK, num_stages=STAGES):
        ik = slice * BK + tl.arange(0, BK)
        q_c = load_tile(q_in + (first * H + h) * K, ic * (H * K), ik, valid, K, BK, BF16)
        cell = slot * K * V + ik[:, None] * V + iv[None, :]
        S = tl.load(states + cell, mask=(ik < K)[:, None] & (iv < V)[None, :], other=0.0)
        O = dot_out(q_c, S, O, BF16, OUT)
    store_tile(o + (first * H + h) * V, O, ic * (H * V), iv, valid, V, BV)
