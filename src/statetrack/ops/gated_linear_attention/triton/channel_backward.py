"""Gates per channel, backward. With D the gradient of the state that leaves a chunk, S the one that enters:

    prepare    dA = lower(dO V^T),  W = q_in^T dO                        then the sweep, see states.py
    values     dV = A^T dO + k_out D
    gradients  dQ = P o (dO S^T) + ...,  dK = X o (V D^T) + ...,  the gradient of the gates

The dots stand for the products inside the chunk. At a level of blocks of m steps (channel_forward.py), with M
the corners of dA made symmetric and Z = M Y, a row of W o Z is a part of dQ in second and of dK in first
blocks. Its product with x is the gradient of the logarithm of W, a sum of -l over the rows between t and r:
so dl_j of second blocks sums over t >= j and that of first blocks over t < j, one product with a matrix
of zeros and ones. The same holds for P and X with the whole chunk as the block.

So every term of dl_j contains a_j, and da_j = dl_j / a_j is exact where a_j is small. Of g, whose gradient is
dl itself, and where no a_j is small, all levels are summed at once:

    dl_j = sum_{t >= j} (q_t o dq_t - k_t o dk_t) + sum_s k_s o (X_s o V D^T)_s + P_C o rowsum(D o S)

The two ways are two launches of `gradients`, of which one ends at once (`taken_by_other` in gates.py): in one
kernel the faster would have the registers of the slower.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.tiles import chunk_rows, dot_input, dot_out, load_tile, store_tile
from statetrack.ops.gated_linear_attention.triton.channel_forward import dot_added, level_decay
from statetrack.ops.gated_linear_attention.triton.gates import (
    decoded,
    gate_gradient,
    load_end,
    load_gates,
    product,
    taken_by_other,
)


@triton.jit
def prepare_kernel(
    q_in, v, dout, dA, dstates, chunk_table, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:
        return
    ic = tl.arange(0, C)
    i, j, valid, slot = ic[:, None], ic[None, :], ic < rows, (chunk * H + h).to(tl.int64)
    dA_c = tl.zeros((C, C), tl.float32)
    for columns in tl.range(0, (V + BV - 1) // BV, num_stages=1):
        iv = columns * BV + tl.arange(0, BV)
        dO = load_tile(dout + (first * H + h) * V, ic * (H * V), iv, valid, V, BV, BF16)
        v_c = load_tile(v + (first * H + h) * V, ic * (H * V), iv, valid, V, BV, BF16)
        dA_c = dot_out(dO, tl.trans(v_c), dA_c, BF16, OUT)
        for slice in tl.range(0, (K + BK - 1) // BK, num_stages=1):
            ik = slice * BK + tl.arange(0, BK)
            q_c = load_tile(q_in + (first * H + h) * K, ic * (H * K), ik, valid, K, BK, BF16)
            W = dot_added(tl.trans(q_c), dO, BF16)
            cell = slot * K * V + ik[:, None] * V + iv[None, :]
            inside = (ik < K)[:, None] & (iv < V)[None, :]
            tl.store(dstates + cell, W.to(dstates.dtype.element_ty), mask=inside)
    # used below the diagonal alone, and stored as a symmetric matrix
    dA_c = dA_c.to(dA.dtype.element_ty)
    tl.store(dA + slot * C * C + i * C + j, dA_c, mask=i >= j)
    tl.store(dA + slot * C * C + j * C + i, dA_c, mask=i > j)


@triton.jit
def values_kernel(
    k_out, A, dout, dstates, dv, chunk_table, T, H,
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
    dO = load_tile(dout + (first * H + h) * V, ic * (H * V), iv, valid, V, BV, BF16)
    dV = dot_out(tl.trans(A_c), dO, None, BF16, OUT)
    for slice in tl.range(0, (K + BK - 1) // BK, num_stages=STAGES):
        ik = slice * BK + tl.arange(0, BK)
        k_c = load_tile(k_out + (first * H + h) * K, ic * (H * K), ik, valid, K, BK, BF16)
        cell = slot * K * V + ik[:, None] * V + iv[None, :]
        D = tl.load(dstates + cell, mask=(ik < K)[:, None] & (iv < V)[None, :], other=0.0)
        dV = dot_out(k_c, D, dV, BF16, OUT)
    store_tile(dv + (first * H + h) * V, dV, ic * (H * V), iv, valid, V, BV)


@triton.jit
def gradients_kernel(
    q, k, v, gate, sign, L, steepest, dA, states, dstates, dout, dq, dk, dgate, chunk_table, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, GATE: tl.constexpr, EXACT: tl.constexpr, PACKED: tl.constexpr, BF16: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    """A program has a chunk of one head and BK of its channels, which do not depend on the others."""
    slices: tl.constexpr = (K + BK - 1) // BK
    chunk, h = tl.program_id(0) // slices, tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:
        return
    rows = tl.minimum(rows, C).to(tl.int32)
    ic, ik = tl.arange(0, C), (tl.program_id(0) % slices) * BK + tl.arange(0, BK)
    i, j, valid, slot = ic[:, None], ic[None, :], ic < rows, (chunk * H + h).to(tl.int64)
    base = (first * H + h) * K
    if taken_by_other(steepest + slot * K + ik, ik < K, GATE, EXACT):
        return
    v += (first * H + h) * V
    dout += (first * H + h) * V
    # what the states contribute: dO S^T, V D^T and rowsum(D o S)
    dQ, dK = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
    dP_C = tl.zeros((BK,), tl.float32)
    for columns in tl.range(0, (V + BV - 1) // BV, num_stages=1):
        iv = columns * BV + tl.arange(0, BV)
        cell = slot * K * V + ik[:, None] * V + iv[None, :]
        inside = (ik < K)[:, None] & (iv < V)[None, :]
        S = tl.load(states + cell, mask=inside, other=0.0)
        D = tl.load(dstates + cell, mask=inside, other=0.0)
        dO = load_tile(dout, ic * (H * V), iv, valid, V, BV, BF16)
        v_c = load_tile(v, ic * (H * V), iv, valid, V, BV, BF16)
        dQ = dot_out(dO, tl.trans(S), dQ, BF16, OUT)
        dK = dot_out(v_c, tl.trans(D), dK, BF16, OUT)
        dP_C += tl.sum(S.to(tl.float32) * D.to(tl.float32), axis=1)
    last = tl.minimum(ic, rows - 1) * (H * K)
    L_and_c = tl.load(L + base + last[:, None] + ik[None, :], mask=(ik < K)[None, :], other=0.0)
    L_c, c = decoded(L_and_c)
    L_end, c_end = load_end(L + base, (rows - 1) * (H * K), ik, K)
    q_c = load_tile(q + base, ic * (H * K), ik, valid, K, BK, False) * (c * scale)
    k_c = load_tile(k + base, ic * (H * K), ik, valid, K, BK, False) * c
    P_whole, P = product(L_c)
    X_whole, X = product(L_end - L_c)
    dK *= c_end
    whole_chunk = tl.exp2(-L_end) * c_end * dP_C[None, :]
    if EXACT:
        dl = dot_out(tl.where(j >= i, 1.0, 0.0), q_c * P_whole * dQ, None, BF16, OUT)
        dl = dot_out(tl.where(j < i, 1.0, 0.0), k_c * X_whole * dK, dl, BF16, OUT) + whole_chunk
    else:
        whole_chunk += tl.sum(k_c * X * dK, axis=0)[None, :]
    diagonal = tl.load(dA + slot * C * C + ic * C + ic).to(tl.float32)[:, None]
    dQ, dK = P * dQ + diagonal * k_c, X * dK + diagonal * q_c
    dA_c = tl.load(dA + slot * C * C + i * C + j)
    for level in tl.range(0, LEVELS, num_stages=1, disable_licm=True):  # unrolled, it would spill
        # q, k, L and c are loaded or decoded again: kept, they would not fit in the registers
        L_c, c = decoded(L_and_c)
        second, W_whole, W = level_decay(L_c, L + base, ic, ik, rows, H * K, level, K, BK)
        row = tl.where(second, q + base + ic * (H * K), k + base + ic * (H * K))
        x = tl.load(row[:, None] + ik[None, :], mask=valid[:, None] & (ik < K)[None, :], other=0.0)
        x = x.to(tl.float32) * (c * tl.where(second, scale, 1.0)[:, None])
        M = tl.where(((i >> level) ^ (j >> level)) == 1, dA_c, 0.0).to(dA_c.dtype)
        Z = dot_out(M, x * W, None, BF16, OUT)
        dQ += tl.where(second[:, None], W * Z, 0.0)
        dK += tl.where(second[:, None], 0.0, W * Z)
        if EXACT:
            between = ((i >> level) == (j >> level)) & (((i >> level) & 1 == 1) == (j >= i))
            dl = dot_out(tl.where(between, 1.0, 0.0), x * W_whole * Z, dl, BF16, OUT)
    _, c = decoded(L_and_c)
    if not EXACT:
        q_c = load_tile(q + base, ic * (H * K), ik, valid, K, BK, False) * (c * scale)
        k_c = load_tile(k + base, ic * (H * K), ik, valid, K, BK, False) * c
        after = tl.where(j >= i, 1.0, 0.0)
        if BF16:
            after = after.to(tl.bfloat16)
        dl = dot_input(after, q_c * dQ - k_c * dK, None, BF16) + whole_chunk
    store_tile(dq + base, dQ * (c * scale), ic * (H * K), ik, valid, K, BK)
    store_tile(dk + base, dK * c, ic * (H * K), ik, valid, K, BK)
    offsets = base + ic[:, None] * (H * K) + ik[None, :]
    l, negative = load_gates(gate, sign, offsets, valid[:, None] & (ik < K)[None, :], GATE)
    store_tile(dgate + base, gate_gradient(dl, l, negative, GATE), ic * (H * K), ik, valid, K, BK)
