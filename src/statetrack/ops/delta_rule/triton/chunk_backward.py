"""The backward of the delta rule over any length, in chunks, in two to four Triton kernels.

    prepare_back  every chunk at once: what outputs send to dU and D, where sequences are few
    sweep_back    backwards over the chunks: the gradient D of S, and Z, the gradient of V
    gradients     every chunk at once: dq, dk, dbeta, dg

Chunks, slices and row factors: triton_chunk_kernels.py. Letters and equations: docs/delta_rule.md.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.chunk_state import _factors, _program, _sequence, _state
from statetrack.ops.delta_rule.triton.tiles import (
    _betas,
    _chunk,
    _decays,
    _dot_input,
    _dot_inverse,
    _dot_out,
    _dot_state,
    _inverse_norms,
    _load_inverse,
    _load_tile,
    _squares,
    _steps,
    _store_tile,
)


@triton.jit
def prepare_back_kernel(
    q, g, M, norms, dout, dv, dstates, table, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """What `sweep_back` adds to dU and D in every chunk, M^T dO and Q^T dO, where its results will be."""
    half: tl.constexpr = q.dtype.element_ty
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = _chunk(table, chunk, T, C, n, PACKED)
    if rows <= 0:
        return
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    step = (first % n).to(tl.int32) + ic
    valid, token, read = _steps(ic, step, rows, n)
    saved = (chunk * H + h).to(tl.int64)
    dv += (first * H + h) * V
    dout += (first // n * H + h) * V
    q_in = tl.load(norms + saved * 2 * C + C + ic)
    if GATED:
        G, _ = _decays(g + first // n * H + h, token * H, valid & (step % n == 0))
        q_in *= tl.exp(G)
    q_c = _load_tile(q + (first // n * H + h) * K, token * (H * K), ik, read, K, BK, SPLIT)
    M_c = tl.load(M + saved * C * C + i * C + j)
    if not SPLIT:
        M_c = M_c.to(tl.float32)
    for slice in tl.range(0, (V + BV - 1) // BV, num_stages=1):
        iv = slice * BV + tl.arange(0, BV)
        cell, inside = iv[:, None] * K + ik[None, :], (iv < V)[:, None] & (ik < K)[None, :]
        dO = _load_tile(dout, token * (H * V), iv, read, V, BV, SPLIT)
        dU = _dot_out(tl.trans(M_c), dO, None, half, SPLIT, OUT)
        _store_tile(dv, dU, ic * (H * V), iv, valid, V, BV)
        sent = _dot_out(tl.trans(q_in[:, None] * dO.to(tl.float32)), q_c, None, half, SPLIT, OUT)
        tl.store(dstates + saved * K * V + cell, sent.to(dstates.dtype.element_ty), mask=inside)


@triton.jit
def sweep_back_kernel(
    q, k, beta, g, A, M, norms, dout, dfinal, dv, dstates, dstate, cu_seqlens, first_chunk, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr,
    FINAL: tl.constexpr, DSTATE: tl.constexpr, PREPARED: tl.constexpr, SPLIT: tl.constexpr, OUT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # on its side, as the sweep forward
    half: tl.constexpr = q.dtype.element_ty
    sequence, h, iv = _program(H, V, BV)
    first, rows, chunk = _sequence(cu_seqlens, first_chunk, sequence, T, C, n, PACKED)
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    D, inside, given = _state(dfinal, sequence, h, iv, H, K, V, BK, FINAL)
    k += (first * H + h) * K
    dv += (first * H + h) * V
    beta += first * H + h
    q += (first // n * H + h) * K
    dout += (first // n * H + h) * V
    if GATED:
        g += first // n * H + h
    chunks = tl.cdiv(rows, C)
    for back in tl.range(0, chunks, num_stages=STAGES, disable_licm=True):
        c = chunks - 1 - back
        row = c * C + ic
        valid, token, read = _steps(row, row, rows, n)
        saved = ((chunk + c) * H + h).to(tl.int64)
        cell = saved * K * V + iv[:, None] * K + ik[None, :]
        k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, SPLIT)
        A_high, A_low = _load_inverse(A + saved * C * C, i, j, C, half, SPLIT)
        b, k_in, k_out, G, end = _factors(
            beta, g, norms, saved, row, valid, token, H, C, n, GATED, LOGITS, SIGMOID
        )
        dU = k_out[None, :] * _dot_state(D, tl.trans(k_c), None, SPLIT)
        if PREPARED:  # in the very place of the results
            dU += tl.trans(_load_tile(dv, row * (H * V), iv, valid, V, BV, False))
            sent = tl.load(dstates + cell, mask=inside, other=0.0).to(tl.float32)
        else:
            dO = _load_tile(dout, token * (H * V), iv, read, V, BV, SPLIT)
            M_c = tl.load(M + saved * C * C + i * C + j)
            if not SPLIT:
                M_c = M_c.to(tl.float32)
            dU = _dot_out(tl.trans(dO), M_c, dU, half, SPLIT, OUT)
        Z = _dot_inverse(b[None, :] * dU, A_high, A_low, half, SPLIT)
        _store_tile(dv, tl.trans(Z), row * (H * V), iv, valid, V, BV)
        tl.store(dstates + cell, D.to(dstates.dtype.element_ty), mask=inside)
        if GATED:
            D *= tl.exp(end)
        if PREPARED:
            D += sent
        else:
            # read again: kept since above, it would not fit the registers
            dO = _load_tile(dout, token * (H * V), iv, read, V, BV, SPLIT)
            q_c = _load_tile(q, token * (H * K), ik, read, K, BK, SPLIT)
            q_in = tl.load(norms + saved * 2 * C + C + ic)
            if GATED:
                q_in *= tl.exp(G)
            D = _dot_out(q_in[None, :] * tl.trans(dO).to(tl.float32), q_c, D, half, SPLIT, OUT)
        D = _dot_state(-k_in[None, :] * Z, k_c, D, SPLIT)
    if DSTATE:
        tl.store(dstate + given, D, mask=inside)


@triton.jit
def gradients_kernel(
    q, k, beta, g, M, norms, E, dv, states, dstates, dout, dq, dk, dbeta, dg, dM_kept, table, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr, LOGITS: tl.constexpr,
    SIGMOID: tl.constexpr, SPLIT: tl.constexpr, OUT: tl.constexpr, STAGES: tl.constexpr, DQ: tl.constexpr,
    DK: tl.constexpr,
):  # fmt: skip
    # dq and dk in one, or in two launches of programs half the size, of which the first (DQ) keeps dM for the
    # second (DK); a gate needs both at once
    half: tl.constexpr = q.dtype.element_ty
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = _chunk(table, chunk, T, C, n, PACKED)
    if rows <= 0:  # packed sequences may have fewer chunks than the grid
        return
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    step = (first % n).to(tl.int32) + ic
    valid, token, read = _steps(ic, step, rows, n)
    saved = (chunk * H + h).to(tl.int64)
    k += (first * H + h) * K
    dk += (first * H + h) * K
    E += (first * H + h) * V
    dv += (first * H + h) * V
    q += (first // n * H + h) * K
    dq += (first // n * H + h) * K
    dout += (first // n * H + h) * V
    states += saved * K * V
    dstates += saved * K * V
    b = _betas(beta + first * H + h, ic * H, valid, LOGITS, SIGMOID)
    k_norm = tl.load(norms + saved * 2 * C + ic)
    q_norm = tl.load(norms + saved * 2 * C + C + ic)  # with the scale
    if GATED:
        G, end = _decays(g + first // n * H + h, token * H, valid & (step % n == 0))
        decay = tl.where(i >= j, tl.exp(tl.where(i >= j, G[:, None] - G[None, :], 0.0)), 0.0)

    # One pass over the columns of v. With Y = -U every sum below only adds: -dM = dO Y^T, dP = Z Y^T, and
    # what the states send to q is dO S^T, to k the negative of Z S^T + Y D^T.
    dM, dP = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    dq_c, dk_c = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
    db, crossed = tl.zeros((C,), tl.float32), 0.0
    if GATED:  # only then do the two parts of dk differ in what they owe the decay
        dk_out = tl.zeros((C, BK), tl.float32)
    for slice in tl.range(0, (V + BV - 1) // BV, num_stages=STAGES):
        iv = slice * BV + tl.arange(0, BV)
        cell, inside = iv[:, None] * K + ik[None, :], (iv < V)[:, None] & (ik < K)[None, :]
        if DQ:
            dO = _load_tile(dout, token * (H * V), iv, read, V, BV, SPLIT)
        E_c = _load_tile(E, ic * (H * V), iv, valid, V, BV, False)
        S = tl.load(states + cell, mask=inside, other=0.0)
        Y = -b[:, None] * E_c
        if DQ:
            dM = _dot_out(dO, tl.trans(Y), dM, half, SPLIT, OUT)
            dq_c = _dot_out(dO, S, dq_c, half, SPLIT, OUT)
        if DK:
            Z = _load_tile(dv, ic * (H * V), iv, valid, V, BV, SPLIT)
            D = tl.load(dstates + cell, mask=inside, other=0.0)
            db += tl.sum(E_c * Z.to(tl.float32), axis=1)
            dP = _dot_out(Z, tl.trans(Y), dP, half, SPLIT, OUT)
            dk_c = _dot_out(Z, S, dk_c, half, SPLIT, OUT)
        if GATED:
            dk_out = _dot_out(Y, D, dk_out, half, SPLIT, OUT)
            crossed += tl.sum(tl.sum(S.to(tl.float32) * D.to(tl.float32), axis=1), axis=0)
        elif DK:
            dk_c = _dot_out(Y, D, dk_c, half, SPLIT, OUT)
    if DK:
        db = db * (1.0 - b / SIGMOID) if LOGITS else db / b
        tl.store(dbeta + (first + ic) * H + h, db.to(dbeta.dtype.element_ty), mask=valid)
    dM, dP = tl.where(i >= j, -dM, 0.0), tl.where(i > j, dP, 0.0)
    dM_kept += saved * C * C + i * C + j
    if not DK:
        tl.store(dM_kept, dM.to(dM_kept.dtype.element_ty))
    if not DQ:
        dM = tl.load(dM_kept).to(tl.float32)

    k_c = _load_tile(k, ic * (H * K), ik, valid, K, BK, SPLIT)
    q_c = _load_tile(q, token * (H * K), ik, read, K, BK, SPLIT)
    if GATED:
        # a difference G_i - G_j moves both ends
        KK = tl.dot(k_c, tl.trans(k_c)) if SPLIT else _dot_input(k_c, tl.trans(k_c), None, False)
        moved_k = dP * decay * KK * k_norm[:, None] * k_norm[None, :]
        moved_q = dM * tl.load(M + saved * C * C + i * C + j).to(tl.float32)
        dG = tl.sum(moved_k, axis=1) - tl.sum(moved_k, axis=0)
        dG += tl.sum(moved_q, axis=1) - tl.sum(moved_q, axis=0)
        dP, dM = dP * decay, dM * decay
        dq_c *= tl.exp(G)[:, None]
        dk_c *= tl.exp(G)[:, None]
        dk_out *= tl.exp(end - G)[:, None]
        moved_out = -tl.sum(dk_out * k_c.to(tl.float32), axis=1) * k_norm
        dG += tl.sum(dq_c * q_c.to(tl.float32), axis=1) * q_norm - moved_out
        dG -= tl.sum(dk_c * k_c.to(tl.float32), axis=1) * k_norm
        total = tl.sum(moved_out, axis=0) + tl.exp(end) * crossed
        # g_t moves every later G of the chunk, and the decay of the state
        dg_c = tl.sum(dG, axis=0) - tl.cumsum(dG, axis=0) + dG + total
        at = (first // n + token) * H + h
        tl.store(dg + at, dg_c.to(dg.dtype.element_ty), mask=valid & (step % n == 0))
        dk_c += dk_out
    if DQ:
        dq_c = _dot_out(dM * k_norm[None, :], k_c, dq_c, half, SPLIT, OUT)
        if L2NORM:  # q_norm is scale / ||q||, and dq_c the gradient of the scaled unit query
            unit = q_c.to(tl.float32) * _inverse_norms(_squares(q_c), True)[:, None]
            dq_c -= unit * tl.sum(unit * dq_c, axis=1)[:, None]
        _store_tile(dq, dq_c * q_norm[:, None], token * (H * K), ik, read, K, BK)
    if DK:
        dk_c = _dot_out(tl.trans(dM * -q_norm[:, None]), q_c, dk_c, half, SPLIT, OUT)
        dk_c = _dot_out((dP + tl.trans(dP)) * -k_norm[None, :], k_c, dk_c, half, SPLIT, OUT)
        if L2NORM:
            unit = k_c.to(tl.float32) * k_norm[:, None]
            dk_c -= unit * tl.sum(unit * dk_c, axis=1)[:, None]
        _store_tile(dk, dk_c * -k_norm[:, None], ic * (H * K), ik, valid, K, BK)
