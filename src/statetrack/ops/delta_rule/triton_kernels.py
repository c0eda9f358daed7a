"""The delta rule over short sequences: one Triton kernel each way, one program per sequence and head.

The state stays in registers. Names and equations as in `triton_chunk_kernels.py`, which cuts the same work
into four kernels for long sequences; docs/delta_rule.md derives them. SINGLE: the sequence is one chunk, so
there is a state only where the caller gave one or asks for one.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton_parts import (
    _betas,
    _decays,
    _dot_input,
    _dot_out,
    _inverse_dot,
    _inverse_norms,
    _load_inverse,
    _load_tile,
    _squares,
    _store_tile,
    _unit_lower_inverse,
)


@triton.jit
def fused_kernel(
    q, k, v, beta, g, state, A, out, E, states, final, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    GATED: tl.constexpr, L2NORM: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr,
    STATE: tl.constexpr, SAVE: tl.constexpr, FINAL: tl.constexpr, SINGLE: tl.constexpr,
    SPLIT: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = q.dtype.element_ty
    CARRIED: tl.constexpr = STATE or not SINGLE
    sequence, h = tl.program_id(0) // H, tl.program_id(0) % H
    ic, ik, iv = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    i, j = ic[:, None], ic[None, :]
    cell, inside = ik[:, None] * V + iv[None, :], (ik < K)[:, None] & (iv < V)[None, :]
    place = (sequence * H + h).to(tl.int64) * K * V
    S = tl.zeros((BK, BV), tl.float32)
    if STATE:
        S = tl.load(state + place + cell, mask=inside, other=0.0).to(tl.float32)
    first = sequence.to(tl.int64) * T
    k += (first * n * H + h) * K
    v += (first * n * H + h) * V
    E += (first * n * H + h) * V
    beta += first * n * H + h
    q += (first * H + h) * K
    out += (first * H + h) * V
    if GATED:
        g += first * H + h
    chunks = 1 if SINGLE else tl.cdiv(T * n, C)
    for c in tl.range(0, chunks, num_stages=1, disable_licm=True):
        row = c * C + ic
        valid = row < T * n
        token = row // n
        read = valid & (row % n == n - 1)
        saved = (sequence * chunks + c).to(tl.int64) * H + h
        k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, SPLIT)
        q_c = _load_tile(q, token * (H * K), ik, read, K, BK, SPLIT)
        b = _betas(beta, row * H, valid, LOGITS, SIGMOID)
        k_norm = _inverse_norms(_squares(k_c), L2NORM)
        q_in = scale * _inverse_norms(_squares(q_c), L2NORM)
        # in half precision the products of inputs are exact as they are
        KK = tl.dot(k_c, tl.trans(k_c)) if SPLIT else _dot_input(k_c, tl.trans(k_c), None, False)
        N = KK * k_norm[:, None] * (k_norm * b)[None, :]
        M = _dot_out(q_c, tl.trans(k_c), None, half, SPLIT, OUT) * q_in[:, None] * k_norm[None, :]
        k_in, k_out = k_norm, k_norm
        if GATED:
            G, end = _decays(g, token * H, valid & (row % n == 0))
            decay = tl.exp(tl.where(i >= j, G[:, None] - G[None, :], 0.0))
            N *= decay
            M *= decay
            k_in, q_in, k_out = k_norm * tl.exp(G), q_in * tl.exp(G), k_norm * tl.exp(end - G)
        M = tl.where(i >= j, M, 0.0)
        _unit_lower_inverse(A + saved * C * C, tl.where(i > j, N, 0.0), C, half, SPLIT)

        R = _load_tile(v, row * (H * V), iv, valid, V, BV, False)
        if CARRIED:
            R -= k_in[:, None] * _dot_input(k_c, S, None, SPLIT)
            if SAVE and not SINGLE:
                tl.store(states + saved * K * V + cell, S.to(states.dtype.element_ty), mask=inside)
        A_high, A_low = _load_inverse(A + saved * C * C, i, j, C, half, SPLIT)
        E_c = _inverse_dot(A_high, A_low, R, half, SPLIT)
        if SAVE:
            _store_tile(E, E_c, row * (H * V), iv, valid, V, BV)
        U = b[:, None] * E_c
        o = _dot_out(M, U, None, half, SPLIT, OUT)
        if CARRIED:
            o += q_in[:, None] * _dot_out(q_c, S, None, half, SPLIT, OUT)
        _store_tile(out, o, token * (H * V), iv, read, V, BV)
        if FINAL or not SINGLE:
            if GATED and CARRIED:
                S *= tl.exp(end)
            S = _dot_input(tl.trans(k_c), k_out[:, None] * U, S, SPLIT)
    if FINAL:
        tl.store(final + place + cell, S, mask=inside)


@triton.jit
def fused_back_kernel(
    q, k, beta, g, state, A, E, states, dout, dfinal, dq, dk, dv, dbeta, dg, dstate, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    GATED: tl.constexpr, L2NORM: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr,
    STATE: tl.constexpr, FINAL: tl.constexpr, SINGLE: tl.constexpr, SPLIT: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = q.dtype.element_ty
    CARRIED: tl.constexpr = STATE or not SINGLE  # a state enters
    REACHED: tl.constexpr = FINAL or not SINGLE  # a gradient of the leaving state enters
    sequence, h = tl.program_id(0) // H, tl.program_id(0) % H
    ic, ik, iv = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    i, j = ic[:, None], ic[None, :]
    cell, inside = ik[:, None] * V + iv[None, :], (ik < K)[:, None] & (iv < V)[None, :]
    place = (sequence * H + h).to(tl.int64) * K * V
    D = tl.zeros((BK, BV), tl.float32)
    if FINAL:
        D = tl.load(dfinal + place + cell, mask=inside, other=0.0).to(tl.float32)
    first = sequence.to(tl.int64) * T
    k += (first * n * H + h) * K
    dk += (first * n * H + h) * K
    E += (first * n * H + h) * V
    dv += (first * n * H + h) * V
    beta += first * n * H + h
    dbeta += first * n * H + h
    q += (first * H + h) * K
    dq += (first * H + h) * K
    dout += (first * H + h) * V
    if GATED:
        g += first * H + h
        dg += first * H + h
    chunks = 1 if SINGLE else tl.cdiv(T * n, C)
    for back in tl.range(0, chunks, num_stages=1, disable_licm=True):
        c = chunks - 1 - back
        row = c * C + ic
        valid = row < T * n
        token = row // n
        read = valid & (row % n == n - 1)
        saved = (sequence * chunks + c).to(tl.int64) * H + h
        k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, SPLIT)
        q_c = _load_tile(q, token * (H * K), ik, read, K, BK, SPLIT)
        dO = _load_tile(dout, token * (H * V), iv, read, V, BV, SPLIT)
        b = _betas(beta, row * H, valid, LOGITS, SIGMOID)
        k_norm = _inverse_norms(_squares(k_c), L2NORM)
        q_norm = scale * _inverse_norms(_squares(q_c), L2NORM)
        M = _dot_out(q_c, tl.trans(k_c), None, half, SPLIT, OUT) * q_norm[:, None] * k_norm[None, :]
        k_in, q_in, k_out = k_norm, q_norm, k_norm
        if GATED:
            G, end = _decays(g, token * H, valid & (row % n == 0))
            decay = tl.exp(tl.where(i >= j, G[:, None] - G[None, :], 0.0))
            M *= decay
            k_in, q_in, k_out = k_norm * tl.exp(G), q_norm * tl.exp(G), k_norm * tl.exp(end - G)
        M = tl.where(i >= j, M, 0.0)

        dU = _dot_out(tl.trans(M), dO, None, half, SPLIT, OUT)
        if REACHED:
            dU += k_out[:, None] * _dot_input(k_c, D, None, SPLIT)
        A_high, A_low = _load_inverse(A + saved * C * C, j, i, C, half, SPLIT)  # transposed
        Z = _inverse_dot(A_high, A_low, b[:, None] * dU, half, SPLIT)
        _store_tile(dv, Z, row * (H * V), iv, valid, V, BV)
        E_c = _load_tile(E, row * (H * V), iv, valid, V, BV, False)
        db = tl.sum(E_c * Z, axis=1)
        db = db * (1.0 - b / SIGMOID) if LOGITS else db / b
        tl.store(dbeta + row * H, db.to(dbeta.dtype.element_ty), mask=valid)
        U = b[:, None] * E_c
        dM = tl.where(i >= j, _dot_out(dO, tl.trans(U), None, half, SPLIT, OUT), 0.0)
        dP = tl.where(i > j, -_dot_out(Z, tl.trans(U), None, half, SPLIT, OUT), 0.0)

        # read again: kept since above, they would not fit the registers
        k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, SPLIT)
        q_c = _load_tile(q, token * (H * K), ik, read, K, BK, SPLIT)
        if GATED:  # a difference G_i - G_j moves both ends
            KK = tl.dot(k_c, tl.trans(k_c)) if SPLIT else _dot_input(k_c, tl.trans(k_c), None, False)
            moved_k = dP * decay * KK * k_norm[:, None] * k_norm[None, :]
            moved_q = dM * M
            dG = tl.sum(moved_k, axis=1) - tl.sum(moved_k, axis=0)
            dG += tl.sum(moved_q, axis=1) - tl.sum(moved_q, axis=0)
            total = 0.0
            dP, dM = dP * decay, dM * decay
        dq_c = _dot_out(dM * k_norm[None, :], k_c, None, half, SPLIT, OUT)
        dk_c = _dot_out(tl.trans(dM * q_norm[:, None]), q_c, None, half, SPLIT, OUT)
        dk_c = _dot_out((dP + tl.trans(dP)) * k_norm[None, :], k_c, dk_c, half, SPLIT, OUT)
        if REACHED:
            dk_out = _dot_out(U, tl.trans(D), None, half, SPLIT, OUT)
            if GATED:
                dk_out *= tl.exp(end - G)[:, None]
                moved_out = tl.sum(dk_out * k_c.to(tl.float32), axis=1) * k_norm
                dG -= moved_out
                total += tl.sum(moved_out, axis=0)
            dk_c += dk_out
        if CARRIED:
            if SINGLE:
                S = tl.load(state + place + cell, mask=inside, other=0.0).to(tl.float32)
            else:
                S = tl.load(states + saved * K * V + cell, mask=inside, other=0.0).to(tl.float32)
            dq_in = _dot_out(dO, tl.trans(S), None, half, SPLIT, OUT)
            dk_in = _dot_out(Z, tl.trans(S), None, half, SPLIT, OUT)
            if GATED:
                dq_in *= tl.exp(G)[:, None]
                dk_in *= tl.exp(G)[:, None]
                dG += tl.sum(dq_in * q_c.to(tl.float32), axis=1) * q_norm
                dG -= tl.sum(dk_in * k_c.to(tl.float32), axis=1) * k_norm
                if REACHED:
                    total += tl.exp(end) * tl.sum(tl.sum(D * S, axis=1), axis=0)
            dq_c += dq_in
            dk_c -= dk_in
            if GATED:
                D *= tl.exp(end)
            D = _dot_out(tl.trans(q_c), q_in[:, None] * dO.to(tl.float32), D, half, SPLIT, OUT)
            D -= _dot_input(tl.trans(k_c), k_in[:, None] * Z, None, SPLIT)
        if GATED:
            # g_t moves every later G of the chunk, and the decay of the state
            dg_c = tl.sum(dG, axis=0) - tl.cumsum(dG, axis=0) + dG + total
            tl.store(dg + token * H, dg_c.to(dg.dtype.element_ty), mask=valid & (row % n == 0))
        if L2NORM:
            unit = q_c.to(tl.float32) * _inverse_norms(_squares(q_c), True)[:, None]
            dq_c -= unit * tl.sum(unit * dq_c, axis=1)[:, None]
            unit = k_c.to(tl.float32) * k_norm[:, None]
            dk_c -= unit * tl.sum(unit * dk_c, axis=1)[:, None]
        _store_tile(dq, dq_c * q_norm[:, None], token * (H * K), ik, read, K, BK)
        _store_tile(dk, dk_c * k_norm[:, None], row * (H * K), ik, valid, K, BK)
    if STATE:
        tl.store(dstate + place + cell, D, mask=inside)
