"""The delta rule over any length, in chunks, in four to six Triton kernels.

    prepare       every chunk at once: the triangular inverse A and M = lower(Q K^T), which need no state
    sweep         one program per sequence, head and slice of V walks the chunks: S, E, and outputs
    outputs       every chunk at once: outputs, where few sequences leave the sweep alone with its latencies
    prepare_back  every chunk at once: what outputs send to dU and D, in the same case
    sweep_back    backwards over the chunks: the gradient D of S, and Z
    gradients     every chunk at once: dq, dk, dbeta, dg

A chunk has C rows; a row is one step, and with n Householders a token has n rows, decays at its first and is
read at its last. Columns of S are independent, so a slice of V needs no other. In docs/delta_rule.md's
letters, with E the errors (U = b E) and Z the gradient of V. q and k enter as they came; norms, decays and
scale are row factors: k_in = e^G / ||k||, k_out = e^{G_C - G} / ||k||, q_in = scale e^G / ||q||.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton_parts import (
    _betas,
    _chunk,
    _cut,
    _decays,
    _dot_input,
    _dot_inverse,
    _dot_out,
    _dot_state,
    _inverse_norms,
    _load_inverse,
    _load_tile,
    _squares,
    _store_tile,
    _unit_lower_inverse,
)


@triton.jit
def prepare_kernel(
    q, k, beta, g, A, M, norms, table, T, H, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, n: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, L2NORM: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr,
    SPLIT: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = q.dtype.element_ty
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = _chunk(table, chunk, T, C, n, PACKED)
    if rows <= 0:  # packed sequences may have fewer chunks than the grid
        return
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    valid = ic < rows
    step = (first % n).to(tl.int32) + ic
    token = step // n
    read = valid & (step % n == n - 1)
    k += (first * H + h) * K
    q += (first // n * H + h) * K
    KK, QK = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    kk, qq = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for slice in tl.static_range(0, (K + BK - 1) // BK):
        column = slice * BK + ik
        k_c = _load_tile(k, ic * H * K, column, valid, K, BK, SPLIT)
        q_c = _load_tile(q, token * H * K, column, read, K, BK, SPLIT)
        if SPLIT:  # exact products
            KK = tl.dot(k_c, tl.trans(k_c), KK)
            QK = tl.dot(q_c, tl.trans(k_c), QK)
        else:
            KK = _dot_input(k_c, tl.trans(k_c), KK, False)
            QK = _dot_out(q_c, tl.trans(k_c), QK, half, False, OUT)
        kk += _squares(k_c)
        qq += _squares(q_c)
    k_norm, q_norm = _inverse_norms(kk, L2NORM), _inverse_norms(qq, L2NORM)
    b = _betas(beta + first * H + h, ic * H, valid, LOGITS, SIGMOID)
    N = KK * k_norm[:, None] * (k_norm * b)[None, :]
    QK = QK * (scale * q_norm)[:, None] * k_norm[None, :]
    if GATED:
        G, _ = _decays(g + first // n * H + h, token * H, valid & (step % n == 0))
        decay = tl.exp(tl.where(i >= j, G[:, None] - G[None, :], 0.0))
        N *= decay
        QK *= decay
    place = (chunk * H + h).to(tl.int64)
    M += place * C * C
    tl.store(M + i * C + j, tl.where(i >= j, QK, 0.0).to(M.dtype.element_ty))
    tl.store(norms + place * 2 * C + ic, k_norm)
    tl.store(norms + place * 2 * C + C + ic, scale * q_norm)
    _unit_lower_inverse(A + place * C * C, tl.where(i > j, N, 0.0), C, half, SPLIT)


@triton.jit
def _sequence(cu_seqlens, first_chunk, sequence, T, C: tl.constexpr, n: tl.constexpr, PACKED: tl.constexpr):
    """First row, number of rows, and first chunk of a sequence."""
    if PACKED:
        first = tl.load(cu_seqlens + sequence).to(tl.int64) * n
        rows = (tl.load(cu_seqlens + sequence + 1).to(tl.int64) * n - first).to(tl.int32)
        chunk = tl.load(first_chunk + sequence).to(tl.int32)
    else:
        first = sequence.to(tl.int64) * T * n
        rows = T * n
        chunk = sequence * tl.cdiv(T * n, C)
    return first, rows, chunk


@triton.jit
def sweep_kernel(
    q, k, v, beta, g, state, A, M, norms, out, E, states, final, cu_seqlens, first_chunk, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr,
    STATE: tl.constexpr, SAVE: tl.constexpr, FINAL: tl.constexpr, READ: tl.constexpr, SPLIT: tl.constexpr,
    OUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Everything stands on its side, (columns of v, rows or k): a result then is the left factor of the next
    # product as it lies in the registers.
    half: tl.constexpr = q.dtype.element_ty
    sequence, h = tl.program_id(1) // H, tl.program_id(1) % H
    first, rows, chunk = _sequence(cu_seqlens, first_chunk, sequence, T, C, n, PACKED)
    ic, ik, iv = tl.arange(0, C), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    i, j = ic[:, None], ic[None, :]
    inside = (iv < V)[:, None] & (ik < K)[None, :]
    given = (sequence * H + h).to(tl.int64) * K * V + ik[None, :] * V + iv[:, None]
    S = tl.zeros((BV, BK), tl.float32)
    if STATE:
        S = tl.load(state + given, mask=inside, other=0.0).to(tl.float32)
    k += (first * H + h) * K
    v += (first * H + h) * V
    E += (first * H + h) * V
    beta += first * H + h
    q += (first // n * H + h) * K
    out += (first // n * H + h) * V
    if GATED:
        g += first // n * H + h
    chunks = tl.cdiv(rows, C)
    for c in tl.range(0, chunks, num_stages=STAGES, disable_licm=True):
        row = c * C + ic
        valid = row < rows
        token = row // n
        read = valid & (row % n == n - 1)
        saved = ((chunk + c) * H + h).to(tl.int64)
        k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, SPLIT)
        v_c = _load_tile(v, row * (H * V), iv, valid, V, BV, SPLIT)
        A_high, A_low = _load_inverse(A + saved * C * C, i, j, C, half, SPLIT)
        b = _betas(beta, row * H, valid, LOGITS, SIGMOID)
        k_norm = tl.load(norms + saved * 2 * C + ic)
        k_in, k_out = k_norm, k_norm
        if GATED:
            G, end = _decays(g, token * H, valid & (row % n == 0))
            k_in, k_out = k_norm * tl.exp(G), k_norm * tl.exp(end - G)
        if SAVE:
            cell = saved * K * V + iv[:, None] * K + ik[None, :]
            tl.store(states + cell, S.to(states.dtype.element_ty), mask=inside)
        R = tl.trans(v_c.to(tl.float32)) - k_in[None, :] * _dot_state(S, tl.trans(k_c), None, SPLIT)
        E_c = _dot_inverse(R, tl.trans(A_high), tl.trans(A_low), half, SPLIT)
        _store_tile(E, tl.trans(E_c), row * (H * V), iv, valid, V, BV)
        U = b[None, :] * E_c
        if READ:
            q_c = _load_tile(q, token * (H * K), ik, read, K, BK, SPLIT)
            q_in = tl.load(norms + saved * 2 * C + C + ic)
            if GATED:
                q_in *= tl.exp(G)
            M_c = tl.load(M + saved * C * C + i * C + j)
            if not SPLIT:
                M_c = M_c.to(tl.float32)
            seen = S
            if SPLIT:
                seen, _ = _cut(S, 16 if half == tl.bfloat16 else 13)  # the half that k met
            o = q_in[None, :] * _dot_out(seen, tl.trans(q_c), None, half, SPLIT, OUT)
            o = _dot_out(U, tl.trans(M_c), o, half, SPLIT, OUT)
            _store_tile(out, tl.trans(o), token * (H * V), iv, read, V, BV)
        if GATED:
            S *= tl.exp(end)
        S = _dot_state(k_out[None, :] * U, k_c, S, SPLIT)
    if FINAL:
        tl.store(final + given, S, mask=inside)


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
    sequence, h = tl.program_id(1) // H, tl.program_id(1) % H
    first, rows, chunk = _sequence(cu_seqlens, first_chunk, sequence, T, C, n, PACKED)
    ic, ik, iv = tl.arange(0, C), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    i, j = ic[:, None], ic[None, :]
    inside = (iv < V)[:, None] & (ik < K)[None, :]
    given = (sequence * H + h).to(tl.int64) * K * V + ik[None, :] * V + iv[:, None]
    D = tl.zeros((BV, BK), tl.float32)
    if FINAL:
        D = tl.load(dfinal + given, mask=inside, other=0.0).to(tl.float32)
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
        valid = row < rows
        token = row // n
        read = valid & (row % n == n - 1)
        saved = ((chunk + c) * H + h).to(tl.int64)
        cell = saved * K * V + iv[:, None] * K + ik[None, :]
        k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, SPLIT)
        A_high, A_low = _load_inverse(A + saved * C * C, i, j, C, half, SPLIT)
        b = _betas(beta, row * H, valid, LOGITS, SIGMOID)
        k_norm = tl.load(norms + saved * 2 * C + ic)
        k_in, k_out = k_norm, k_norm
        if GATED:
            G, end = _decays(g, token * H, valid & (row % n == 0))
            k_in, k_out = k_norm * tl.exp(G), k_norm * tl.exp(end - G)
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
def outputs_kernel(
    q, beta, g, M, norms, E, states, out, table, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr,
    SPLIT: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = q.dtype.element_ty
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = _chunk(table, chunk, T, C, n, PACKED)
    if rows <= 0:
        return
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    valid = ic < rows
    step = (first % n).to(tl.int32) + ic
    token = step // n
    read = valid & (step % n == n - 1)
    saved = (chunk * H + h).to(tl.int64)
    E += (first * H + h) * V
    out += (first // n * H + h) * V
    b = _betas(beta + first * H + h, ic * H, valid, LOGITS, SIGMOID)
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
        S = tl.load(states + saved * K * V + cell, mask=inside, other=0.0)
        U = b[:, None] * _load_tile(E, ic * (H * V), iv, valid, V, BV, False)
        o = q_in[:, None] * _dot_out(q_c, tl.trans(S), None, half, SPLIT, OUT)
        o = _dot_out(M_c, U, o, half, SPLIT, OUT)
        _store_tile(out, o, token * (H * V), iv, read, V, BV)


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
    valid = ic < rows
    step = (first % n).to(tl.int32) + ic
    token = step // n
    read = valid & (step % n == n - 1)
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
def gradients_kernel(
    q, k, beta, g, M, norms, E, dv, states, dstates, dout, dq, dk, dbeta, dg, table, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr, LOGITS: tl.constexpr,
    SIGMOID: tl.constexpr, SPLIT: tl.constexpr, OUT: tl.constexpr, STAGES: tl.constexpr, DQ: tl.constexpr,
    DK: tl.constexpr,
):  # fmt: skip
    # dq and dk in one, or (DQ, DK) in two launches of programs half the size; a gate needs both at once
    half: tl.constexpr = q.dtype.element_ty
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = _chunk(table, chunk, T, C, n, PACKED)
    if rows <= 0:  # packed sequences may have fewer chunks than the grid
        return
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    valid = ic < rows
    step = (first % n).to(tl.int32) + ic
    token = step // n
    read = valid & (step % n == n - 1)
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
        dO = _load_tile(dout, token * (H * V), iv, read, V, BV, SPLIT)
        E_c = _load_tile(E, ic * (H * V), iv, valid, V, BV, False)
        S = tl.load(states + cell, mask=inside, other=0.0)
        Y = -b[:, None] * E_c
        dM = _dot_out(dO, tl.trans(Y), dM, half, SPLIT, OUT)
        if DQ:
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
