"""One gate per head, forward. Per chunk of C steps with state S entering, P, X and D in gates.py's terms:

    add        U = (X o K)^T V,  P_C                 then the sweep, see states.py
    outputs    O = P o (Q S) + (Q K^T o D) V         D_ts = a_{s+1} ... a_t for t >= s

A decay is one number per row, or per pair of rows: the gates never have the width of the keys. Grids: a
program per (chunk, head), and per slice of the columns of v in `outputs`.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.tiles import chunk_rows, dot_out, load_tile, store_tile
from statetrack.ops.gated_linear_attention.triton.channel_forward import dot_added
from statetrack.ops.gated_linear_attention.triton.gates import cumulated, load_gates, product


@triton.jit
def row_decays(gate, sign, rows, H, C: tl.constexpr, GATE: tl.constexpr):
    """l, which gates are negative, L and c of a chunk's rows, and L and c at its end."""
    ic = tl.arange(0, C)
    l, negative = load_gates(gate, sign, ic * H, ic < rows, GATE)
    L, c = cumulated(l, negative)
    # rows beyond the last have gates of 1, so that the last row of the tile is the end of the chunk
    end = ic == C - 1
    L_end, c_end = tl.sum(tl.where(end, L, 0.0), axis=0), tl.sum(tl.where(end, c, 0.0), axis=0)
    return l, negative, L, c, L_end, c_end


@triton.jit
def add_kernel(
    k, v, gate, sign, states, kept, chunk_table, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GATE: tl.constexpr, PACKED: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:
        return
    ic = tl.arange(0, C)
    valid, slot = ic < rows, (chunk * H + h).to(tl.int64)
    _, _, L, c, L_end, c_end = row_decays(gate + first * H + h, sign + first * H + h, rows, H, C, GATE)
    _, X = product(L_end - L)
    _, P_C = product(L_end)
    tl.store(kept + slot, P_C * c_end)
    for slice in tl.range(0, (K + BK - 1) // BK, num_stages=1):
        ik = slice * BK + tl.arange(0, BK)
        k_c = load_tile(k + (first * H + h) * K, ic * (H * K), ik, valid, K, BK, False)
        k_c *= (X * c * c_end)[:, None]
        for columns in tl.range(0, (V + BV - 1) // BV, num_stages=1):
            iv = columns * BV + tl.arange(0, BV)
            v_c = load_tile(v + (first * H + h) * V, ic * (H * V), iv, valid, V, BV, BF16)
            U = dot_added(tl.trans(k_c), v_c, BF16)
            cell = slot * K * V + ik[:, None] * V + iv[None, :]
            inside = (ik < K)[:, None] & (iv < V)[None, :]
            tl.store(states + cell, U.to(states.dtype.element_ty), mask=inside)


@triton.jit
def head_outputs_kernel(
    q, k, v, gate, sign, states, o, chunk_table, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GATE: tl.constexpr, PACKED: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = (V + BV - 1) // BV
    chunk, h = tl.program_id(0) // columns, tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:
        return
    ic, iv = tl.arange(0, C), (tl.program_id(0) % columns) * BV + tl.arange(0, BV)
    i, j, valid, slot = ic[:, None], ic[None, :], ic < rows, (chunk * H + h).to(tl.int64)
    QK, O = tl.zeros((C, C), tl.float32), tl.zeros((C, BV), tl.float32)
    for slice in tl.range(0, (K + BK - 1) // BK, num_stages=STAGES):
        ik = slice * BK + tl.arange(0, BK)
        q_c = load_tile(q + (first * H + h) * K, ic * (H * K), ik, valid, K, BK, BF16)
        k_c = load_tile(k + (first * H + h) * K, ic * (H * K), ik, valid, K, BK, BF16)
        cell = slot * K * V + ik[:, None] * V + iv[None, :]
        S = tl.load(states + cell, mask=(ik < K)[:, None] & (iv < V)[None, :], other=0.0)
        QK = dot_out(q_c, tl.trans(k_c), QK, BF16, OUT)
        O = dot_out(q_c, S, O, BF16, OUT)
    _, _, L, c, _, _ = row_decays(gate + first * H + h, sign + first * H + h, rows, H, C, GATE)
    _, P = product(L)
    _, D = product(tl.where(i >= j, L[:, None] - L[None, :], 0.0))
    A = tl.where(i >= j, QK * D * (c[:, None] * c[None, :]), 0.0)
    v_c = load_tile(v + (first * H + h) * V, ic * (H * V), iv, valid, V, BV, BF16)
    O = dot_out(A, v_c, O * (P * c)[:, None], BF16, OUT) * scale
    store_tile(o + (first * H + h) * V, O, ic * (H * V), iv, valid, V, BV)
