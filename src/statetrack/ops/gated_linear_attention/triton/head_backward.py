"""One gate per head, backward. With Dn the gradient of the state that leaves a chunk, S the one that enters:

    prepare    W = (P o Q)^T dO                                         then the sweep, see states.py
    gradients  dA = lower(dO V^T)             dQ = P o (dO S^T) + (dA o D) K
               dV = (A o D)^T dO + (X o K) Dn     dK = X o (V Dn^T) + (dA o D)^T Q

The gradient of log |a_j| sums every product of gates that contains a_j, times what it multiplies: the pairs
of steps s < j <= t of dA o A, rows t >= j of q . dq and s < j of k . dk by the states, and Dn . S.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.tiles import chunk_rows, dot_input, dot_out, load_tile, store_tile
from statetrack.ops.gated_linear_attention.triton.channel_forward import dot_added
from statetrack.ops.gated_linear_attention.triton.gates import gate_gradient, product
from statetrack.ops.gated_linear_attention.triton.head_forward import row_decays


@triton.jit
def head_prepare_kernel(
    q, gate, sign, dout, dstates, chunk_table, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GATE: tl.constexpr, PACKED: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:
        return
    ic = tl.arange(0, C)
    valid, slot = ic < rows, (chunk * H + h).to(tl.int64)
    _, _, L, c, _, _ = row_decays(gate + first * H + h, sign + first * H + h, rows, H, C, GATE)
    _, P = product(L)
    for slice in tl.range(0, (K + BK - 1) // BK, num_stages=1):
        ik = slice * BK + tl.arange(0, BK)
        q_c = load_tile(q + (first * H + h) * K, ic * (H * K), ik, valid, K, BK, False)
        q_c *= (P * c * scale)[:, None]
        for columns in tl.range(0, (V + BV - 1) // BV, num_stages=1):
            iv = columns * BV + tl.arange(0, BV)
            dO = load_tile(dout + (first * H + h) * V, ic * (H * V), iv, valid, V, BV, BF16)
            W = dot_added(tl.trans(q_c), dO, BF16)
            cell = slot * K * V + ik[:, None] * V + iv[None, :]
            inside = (ik < K)[:, None] & (iv < V)[None, :]
            tl.store(dstates + cell, W.to(dstates.dtype.element_ty), mask=inside)


@triton.jit
def head_gradients_kernel(
    q, k, v, gate, sign, states, dstates, dout, dq, dk, dv, dgate, chunk_table, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GATE: tl.constexpr, PACKED: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """BK holds all of K."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:
        return
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j, valid, slot = ic[:, None], ic[None, :], ic < rows, (chunk * H + h).to(tl.int64)
    base, base_v = (first * H + h) * K, (first * H + h) * V
    dQ, dK = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
    dA, dP_C = tl.zeros((C, C), tl.float32), 0.0
    for columns in tl.range(0, (V + BV - 1) // BV, num_stages=1):
        iv = columns * BV + tl.arange(0, BV)
        cell = slot * K * V + ik[:, None] * V + iv[None, :]
        inside = (ik < K)[:, None] & (iv < V)[None, :]
        S = tl.load(states + cell, mask=inside, other=0.0)
        D_out = tl.load(dstates + cell, mask=inside, other=0.0)
        dO = load_tile(dout + base_v, ic * (H * V), iv, valid, V, BV, BF16)
        v_c = load_tile(v + base_v, ic * (H * V), iv, valid, V, BV, BF16)
        dA = dot_out(dO, tl.trans(v_c), dA, BF16, OUT)
        dQ = dot_out(dO, tl.trans(S), dQ, BF16, OUT)
        dK = dot_out(v_c, tl.trans(D_out), dK, BF16, OUT)
        dP_C += tl.sum(tl.sum(S.to(tl.float32) * D_out.to(tl.float32), axis=1), axis=0)
    q_c = load_tile(q + base, ic * (H * K), ik, valid, K, BK, BF16)
    k_c = load_tile(k + base, ic * (H * K), ik, valid, K, BK, BF16)
    QK = dot_out(q_c, tl.trans(k_c), None, BF16, OUT)
    l, negative, L, c, L_end, c_end = row_decays(gate + first * H + h, sign + first * H + h, rows, H, C, GATE)
    P_whole, P = product(L)
    X_whole, X = product(L_end - L)
    D_whole, D = product(tl.where(i >= j, L[:, None] - L[None, :], 0.0))
    signs = tl.where(i >= j, scale * (c[:, None] * c[None, :]), 0.0)
    N = tl.where(i > j, QK * dA * D_whole * signs, 0.0)
    q_dq = P_whole * c * scale * tl.sum(q_c.to(tl.float32) * dQ, axis=1)
    k_dk = X_whole * c * c_end * tl.sum(k_c.to(tl.float32) * dK, axis=1)
    after = tl.where(j >= i, 1.0, 0.0).to(q_c.dtype)
    pairs = dot_input(after, N, None, BF16)  # summed over the steps t >= i
    dl = tl.sum(tl.where(i > j, pairs + k_dk[None, :], q_dq[None, :]), axis=1)
    dl += tl.exp2(-L_end) * c_end * dP_C
    gradient = gate_gradient(dl, l, negative, GATE)
    tl.store(dgate + (first + ic) * H + h, gradient.to(dgate.dtype.element_ty), mask=valid)
    M, A = dA * D * signs, QK * D * signs
    k_factor = X * c * c_end
    dQ = dot_out(M, k_c, dQ * (P * c * scale)[:, None], BF16, OUT)
    store_tile(dq + base, dQ, ic * (H * K), ik, valid, K, BK)
    dK = dot_out(tl.trans(M), q_c, dK * k_factor[:, None], BF16, OUT)
    store_tile(dk + base, dK, ic * (H * K), ik, valid, K, BK)
    k_out = k_c.to(tl.float32) * k_factor[:, None]
    for columns in tl.range(0, (V + BV - 1) // BV, num_stages=1):
        iv = columns * BV + tl.arange(0, BV)
        cell = slot * K * V + ik[:, None] * V + iv[None, :]
        D_out = tl.load(dstates + cell, mask=(ik < K)[:, None] & (iv < V)[None, :], other=0.0)
        dO = load_tile(dout + base_v, ic * (H * V), iv, valid, V, BV, BF16)
        dV = dot_out(tl.trans(A), dO, None, BF16, OUT)
        dV = dot_out(k_out, D_out, dV, BF16, OUT)
        store_tile(dv + base_v, dV, ic * (H * V), iv, valid, V, BV)
