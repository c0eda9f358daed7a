"""The delta rule over any length, in chunks: the forward in two or three Triton kernels.

    prepare   every chunk at once: the triangular inverse A and M = lower(Q K^T), which need no state
    sweep     one program per sequence, head and slice of V walks the chunks: S, E, and outputs
    outputs   every chunk at once: outputs, where few sequences leave the sweep alone with its latencies

The backward: triton_chunk_back_kernels.py. A chunk has C rows; a row is one step, and with n Householders a
token has n rows, decays at its first and is read at its last. Columns of S are independent, so a slice of V
needs no other. In docs/delta_rule.md's letters, with E the errors (U = b E). q and k enter as they came;
norms, decays and scale are row factors: k_in = e^G / ||k||, k_out = e^{G_C - G} / ||k||,
q_in = scale e^G / ||q||.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.chunk_state import _factors, _program, _sequence, _state
from statetrack.ops.delta_rule.triton.tiles import (
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
    _steps,
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
    step = (first % n).to(tl.int32) + ic
    valid, token, read = _steps(ic, step, rows, n)
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
    sequence, h, iv = _program(H, V, BV)
    first, rows, chunk = _sequence(cu_seqlens, first_chunk, sequence, T, C, n, PACKED)
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    S, inside, given = _state(state, sequence, h, iv, H, K, V, BK, STATE)
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
        valid, token, read = _steps(row, row, rows, n)
        saved = ((chunk + c) * H + h).to(tl.int64)
        k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, SPLIT)
        v_c = _load_tile(v, row * (H * V), iv, valid, V, BV, SPLIT)
        A_high, A_low = _load_inverse(A + saved * C * C, i, j, C, half, SPLIT)
        b, k_in, k_out, G, end = _factors(
            beta, g, norms, saved, row, valid, token, H, C, n, GATED, LOGITS, SIGMOID
        )
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
    step = (first % n).to(tl.int32) + ic
    valid, token, read = _steps(ic, step, rows, n)
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
