"""The delta rule with a gate per key channel, in chunks: what goes from chunk to chunk, and its gradients.

With k_in = e^G k, q_in = e^G q, k_out = e^(G_C - G) k per channel, and S entering a chunk, D the gradient of
the state that leaves it (docs/gates.md, "Delta rule"):

    sweep            E = inverse (V - k_in S),  U = b E,  O = q_in S + A U,  S <- e^(G_C) S + k_out^T U
    sweep_backward   dU = A^T dO + k_out D,  Z = inverse^T b dU = dV,  D <- e^(G_C) D + q_in^T dO - k_in^T Z
    gradients        dA = dO U^T,  dN = -Z U^T,  dbeta, and dq, dk, dg as far as they come through the states

Grids: the sweeps have a program per sequence, head and slice of BV columns of v, and hold a transposed slice of
S or D for the whole sequence; gradients has one per (chunk, head). Tiles are those of chunk_forward.py.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.channel_pairs import dot_floats
from statetrack.ops.delta_rule.triton.chunk_state import load_state, sweep_program, sweep_sequence
from statetrack.ops.delta_rule.triton.tiles import (
    chunk_rows,
    dot_inverse,
    dot_out,
    load_beta,
    load_inverse,
    load_tile,
    store_tile,
)


@triton.jit
def _factors(G, norms, at, ik, valid, last, stride, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """Of a chunk: e^G / ||k||, e^(G_C - G) / ||k|| and scale e^G / ||q|| (C x K), and e^(G_C) (K)."""
    ic = tl.arange(0, C)
    G_c = load_tile(G, at, ik, valid, K, BK, False)
    G_C = tl.load(G + last * stride + ik, mask=ik < K, other=0.0)
    r_k, s = tl.load(norms + ic)[:, None], tl.load(norms + C + ic)[:, None]
    entering = tl.where(valid[:, None], tl.exp(G_c), 0.0)
    leaving = tl.where(valid[:, None], tl.exp(G_C[None, :] - G_c), 0.0)
    return r_k * entering, r_k * leaving, s * entering, tl.exp(G_C)


@triton.jit
def sweep_kernel(
    q, k, v, beta, G, initial_state, inverse, A, inverse_norms, out, E, states, final_state, cu_seqlens,
    first_chunk, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr, HAS_INITIAL_STATE: tl.constexpr,
    SAVE_STATES: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    sequence, h, iv = sweep_program(H, V, BV)
    first, rows, chunk = sweep_sequence(cu_seqlens, first_chunk, sequence, T, C, 1, PACKED)
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    S, inside, state_offsets = load_state(initial_state, sequence, h, iv, H, K, V, BK, HAS_INITIAL_STATE)
    keys, values = (first * H + h) * K, (first * H + h) * V
    q, k, G = q + keys, k + keys, G + keys
    v, E, out = v + values, E + values, out + values
    beta += first * H + h
    for c in tl.range(0, tl.cdiv(rows, C), disable_licm=True):
        row = c * C + ic
        valid, slot = row < rows, ((chunk + c) * H + h).to(tl.int64)
        at, last = row * (H * K), tl.minimum(c * C + C, rows) - 1
        k_in, k_out, q_in, end = _factors(
            G, inverse_norms + slot * 2 * C, at, ik, valid, last, H * K, K, BK, C
        )
        k_c = load_tile(k, at, ik, valid, K, BK, False)
        v_c = load_tile(v, row * (H * V), iv, valid, V, BV, False)
        b = load_beta(beta, row * H, valid, BETA_FROM_LOGITS)
        inverse_high, inverse_low = load_inverse(inverse + slot * C * C, i, j, C, BF16)
        if SAVE_STATES:
            cell = slot * K * V + iv[:, None] * K + ik[None, :]
            tl.store(states + cell, S.to(states.dtype.element_ty), mask=inside)
        R = tl.trans(v_c) - dot_floats(S, tl.trans(k_in * k_c), None, BF16)
        E_c = dot_inverse(R, tl.trans(inverse_high), tl.trans(inverse_low), BF16)
        store_tile(E, tl.trans(E_c), row * (H * V), iv, valid, V, BV)
        U = b[None, :] * E_c
        q_c = load_tile(q, at, ik, valid, K, BK, False)
        A_c = tl.load(A + slot * C * C + i * C + j).to(tl.float32)
        o = dot_out(S, tl.trans(q_in * q_c), None, BF16, OUT)
        o = dot_out(U, tl.trans(A_c), o, BF16, OUT)
        store_tile(out, tl.trans(o), row * (H * V), iv, valid, V, BV)
        S = dot_floats(U, k_out * k_c, S * end[None, :], BF16)
    tl.store(final_state + state_offsets, S, mask=inside)


@triton.jit
def sweep_backward_kernel(
    q, k, beta, G, inverse, A, inverse_norms, dout, dfinal_state, dv, dstates, dinitial_state, cu_seqlens,
    first_chunk, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr, HAS_DFINAL_STATE: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    sequence, h, iv = sweep_program(H, V, BV)
    first, rows, chunk = sweep_sequence(cu_seqlens, first_chunk, sequence, T, C, 1, PACKED)
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    D, inside, state_offsets = load_state(dfinal_state, sequence, h, iv, H, K, V, BK, HAS_DFINAL_STATE)
    keys, values = (first * H + h) * K, (first * H + h) * V
    q, k, G = q + keys, k + keys, G + keys
    dout, dv = dout + values, dv + values
    beta += first * H + h
    chunks = tl.cdiv(rows, C)
    for back in tl.range(0, chunks, disable_licm=True):
        c = chunks - 1 - back
        row = c * C + ic
        valid, slot = row < rows, ((chunk + c) * H + h).to(tl.int64)
        at, last = row * (H * K), tl.minimum(c * C + C, rows) - 1
        k_in, k_out, q_in, end = _factors(
            G, inverse_norms + slot * 2 * C, at, ik, valid, last, H * K, K, BK, C
        )
        k_c = load_tile(k, at, ik, valid, K, BK, False)
        b = load_beta(beta, row * H, valid, BETA_FROM_LOGITS)
        inverse_high, inverse_low = load_inverse(inverse + slot * C * C, i, j, C, BF16)
        dO = tl.trans(load_tile(dout, row * (H * V), iv, valid, V, BV, False))
        A_c = tl.load(A + slot * C * C + i * C + j).to(tl.float32)
        dU = dot_floats(D, tl.trans(k_out * k_c), None, BF16)
        dU = dot_out(dO, A_c, dU, BF16, OUT)
        Z = dot_inverse(b[None, :] * dU, inverse_high, inverse_low, BF16)
        store_tile(dv, tl.trans(Z), row * (H * V), iv, valid, V, BV)
        cell = slot * K * V + iv[:, None] * K + ik[None, :]
        tl.store(dstates + cell, D.to(dstates.dtype.element_ty), mask=inside)
        q_c = load_tile(q, at, ik, valid, K, BK, False)
        D = dot_out(dO, q_in * q_c, D * end[None, :], BF16, OUT)
        D = dot_floats(-Z, k_in * k_c, D, BF16)
    if HAS_INITIAL_STATE:
        tl.store(dinitial_state + state_offsets, D, mask=inside)


@triton.jit
def gradients_kernel(
    q, k, beta, G, inverse_norms, E, dv, states, dstates, dout, dA, dN, dq_states, dk_states, dg, dbeta,
    chunk_table, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:
        return
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    valid, slot = ic < rows, (chunk * H + h).to(tl.int64)
    keys, values, at = (first * H + h) * K, (first * H + h) * V, ic * (H * K)
    dv, E, dout = dv + values, E + values, dout + values
    b = load_beta(beta + first * H + h, ic * H, valid, BETA_FROM_LOGITS)
    dA_c, dN_c = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    dq_c, dk_in = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
    dk_out, db, SD = tl.zeros((C, BK), tl.float32), tl.zeros((C,), tl.float32), tl.zeros((BK,), tl.float32)
    for slice in tl.range(0, (V + BV - 1) // BV, num_stages=1):
        iv = slice * BV + tl.arange(0, BV)
        cell, inside = iv[:, None] * K + ik[None, :], (iv < V)[:, None] & (ik < K)[None, :]
        dO = load_tile(dout, ic * (H * V), iv, valid, V, BV, False)
        Z = load_tile(dv, ic * (H * V), iv, valid, V, BV, False)
        E_c = load_tile(E, ic * (H * V), iv, valid, V, BV, False)
        S = tl.load(states + slot * K * V + cell, mask=inside, other=0.0).to(tl.float32)
        D = tl.load(dstates + slot * K * V + cell, mask=inside, other=0.0).to(tl.float32)
        U = b[:, None] * E_c
        db += tl.sum(E_c * Z, axis=1)
        dA_c = dot_out(dO, tl.trans(U), dA_c, BF16, OUT)
        dN_c = dot_out(-Z, tl.trans(U), dN_c, BF16, OUT)
        dq_c = dot_out(dO, S, dq_c, BF16, OUT)
        dk_in = dot_out(-Z, S, dk_in, BF16, OUT)
        dk_out = dot_out(U, D, dk_out, BF16, OUT)
        SD += tl.sum(S * D, axis=0)
    db = db * (1.0 - b / BETA_FROM_LOGITS) if BETA_FROM_LOGITS is not None else db / b
    tl.store(dbeta + (first + ic) * H + h, db.to(dbeta.dtype.element_ty), mask=valid)
    square = slot * C * C + i * C + j
    tl.store(dA + square, tl.where(i >= j, dA_c, 0.0))
    tl.store(dN + square, tl.where(i > j, dN_c, 0.0))

    G_c = load_tile(G + keys, at, ik, valid, K, BK, False)
    G_C = tl.load(G + keys + (tl.minimum(rows, C) - 1) * (H * K) + ik, mask=ik < K, other=0.0)
    r_k = tl.load(inverse_norms + slot * 2 * C + ic)[:, None]
    s = tl.load(inverse_norms + slot * 2 * C + C + ic)[:, None]
    entering = tl.where(valid[:, None], tl.exp(G_c), 0.0)
    dq_c, dk_in = entering * dq_c, entering * dk_in
    dk_out *= tl.where(valid[:, None], tl.exp(G_C[None, :] - G_c), 0.0)
    k_c = r_k * load_tile(k + keys, at, ik, valid, K, BK, False)
    q_c = s * load_tile(q + keys, at, ik, valid, K, BK, False)
    # what rows from t on take from the entering state, what rows before t leave, and what passes through
    dg_c = dot_floats(tl.where(i <= j, 1.0, 0.0), q_c * dq_c + k_c * dk_in, None, BF16)
    dg_c = dot_floats(tl.where(i > j, 1.0, 0.0), k_c * dk_out, dg_c, BF16)
    dg_c += (tl.exp(G_C) * SD)[None, :]
    store_tile(dg + keys, dg_c, at, ik, valid, K, BK)
    store_tile(dq_states + keys, dq_c, at, ik, valid, K, BK)
    store_tile(dk_states + keys, dk_in + dk_out, at, ik, valid, K, BK)
