"""Chunks of float32 heads up to 32 wide: many sequences, normalised keys, no gate.

Three kernels in place of `prepare`, `sweep` and `sweep_back` (triton_chunk_kernels.py and
triton_chunk_back_kernels.py), in chunks of 32 rows and with products of digits (`triton_digits.py`), so that
results stay in the registers of their threads. In the letters of docs/delta_rule.md, with unit keys and
scaled unit queries as rows of K and Q,

    G = P (I + diag(b) P)^-1,  P = strictly_lower(K K^T)          M = lower(Q K^T)
    R = V - K S            E = R - G diag(b) R                    U = diag(b) E
    dU = M^T dO + K D      Z = diag(b) (dU - G^T diag(b) dU)

`prepare` leaves G and M as float16 digits in the place of floats. Values and gradients are shrunk by a power
of two, anew in every chunk: for what enters with the chunk, and for what the state was a chunk before.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton_chunk_kernels import _sequence
from statetrack.ops.delta_rule.triton_digits import (
    _digits,
    _powers,
    _product,
    _resolvent_of_16,
    _transposed,
)
from statetrack.ops.delta_rule.triton_parts import _betas, _chunk, _load_tile, _squares, _store_tile

HALF = tl.constexpr(tl.float16)


@triton.jit
def prepare_narrow_kernel(
    q, k, beta, G, M, norms, table, T, H, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, n: tl.constexpr, PACKED: tl.constexpr,
    LOGITS: tl.constexpr, SIGMOID: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = _chunk(table, chunk, T, C, n, PACKED)
    if rows <= 0:  # packed sequences may have fewer chunks than the grid
        return
    ic = tl.arange(0, 16)
    i, j = ic[:, None], ic[None, :]
    place = (chunk * H + h).to(tl.int64)
    k += (first * H + h) * K
    q += (first // n * H + h) * K
    beta += first * H + h
    G += place * C * C
    M += place * C * C
    norms += place * 2 * C
    start = (first % n).to(tl.int32)
    k_0, q_0, b_0 = _prepare_half(
        q, k, beta, norms, 0, start, rows, H, scale, K, BK, C, n, LOGITS, SIGMOID, WHOLE
    )
    k_1, q_1, b_1 = _prepare_half(
        q, k, beta, norms, 16, start, rows, H, scale, K, BK, C, n, LOGITS, SIGMOID, WHOLE
    )
    right_0, right_1 = _transposed(k_0), _transposed(k_1)
    P_0, P_1 = _product(k_0, right_0, None, 2), _product(k_1, right_1, None, 2)
    corner, zero = _product(k_1, right_0, None, 2), tl.zeros((16, 16), tl.float32)
    M_0 = tl.where(i >= j, _product(q_0, right_0, None, 2), 0.0)
    M_1 = tl.where(i >= j, _product(q_1, right_1, None, 2), 0.0)
    _keep_blocks(M, M_0, zero, _product(q_1, right_0, None, 2), M_1, C, WHOLE)

    G_0, T_0 = _resolvent_of_16(tl.where(i > j, P_0, 0.0), tl.where(i < j, P_0, 0.0), b_0, HALF, WHOLE, True)
    G_1, _ = _resolvent_of_16(tl.where(i > j, P_1, 0.0), tl.where(i < j, P_1, 0.0), b_1, HALF, WHOLE, False)
    one = tl.where(i == j, 1.0, 0.0)
    right = _digits(one - T_0 * b_0[None, :], 2, HALF, WHOLE)
    right = _product(right, _digits(tl.trans(corner), 2, HALF, WHOLE), None, 2)  # on its side
    left = _digits(one - G_1 * b_1[None, :], 2, HALF, WHOLE)
    corner = _product(left, _digits(tl.trans(right), 2, HALF, WHOLE), None, 2)
    _keep_blocks(G, G_0, zero, corner, G_1, C, WHOLE)


@triton.jit
def _prepare_half(
    q, k, beta, norms, first: tl.constexpr, start, rows, H, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, n: tl.constexpr, LOGITS: tl.constexpr,
    SIGMOID: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The digits of unit keys and scaled unit queries of 16 rows, and b. Their inverse lengths are kept."""
    row, ik = first + tl.arange(0, 16), tl.arange(0, BK)
    valid = row < rows
    read = valid & ((start + row) % n == n - 1)
    k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, False)
    q_c = _load_tile(q, (start + row) // n * (H * K), ik, read, K, BK, False)
    b = _betas(beta, row * H, valid, LOGITS, SIGMOID)
    k_norm, q_norm = tl.rsqrt(_squares(k_c) + 1e-6), scale * tl.rsqrt(_squares(q_c) + 1e-6)
    tl.store(norms + row, k_norm)
    tl.store(norms + C + row, q_norm)
    return _unit_digits(k_c, k_norm, WHOLE), _unit_digits(q_c, q_norm, WHOLE), b


@triton.jit
def _unit_digits(x, norms, WHOLE: tl.constexpr):
    """The digits of rows times `norms`, their inverse lengths."""
    return _digits(x * norms[:, None], 2, HALF, WHOLE)


@triton.jit
def _keep_blocks(buffer, upper, right, lower, last, C: tl.constexpr, WHOLE: tl.constexpr):
    """The tile [[upper, right], [lower, last]]: first its first digits, then its second ones."""
    at = tl.arange(0, 16)[:, None] * C + tl.arange(0, 16)[None, :]
    _keep(buffer, at, upper, C, WHOLE)
    _keep(buffer, at + 16, right, C, WHOLE)
    _keep(buffer, at + 16 * C, lower, C, WHOLE)
    _keep(buffer, at + 16 * C + 16, last, C, WHOLE)


@triton.jit
def _keep(buffer, at, tile, C: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(buffer + at, tile)
    else:
        first, second = _digits(tile, 2, HALF, False)
        buffer = buffer.to(tl.pointer_type(tl.float16)) + at
        tl.store(buffer, first)
        tl.store(buffer + C * C, second)


@triton.jit
def _kept(buffer, C: tl.constexpr, WHOLE: tl.constexpr):
    """The digits of a tile that `_keep_blocks` left."""
    at = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    if WHOLE:
        digits = (tl.load(buffer + at),)
    else:
        buffer = buffer.to(tl.pointer_type(tl.float16)) + at
        digits = (tl.load(buffer), tl.load(buffer + C * C))
    return digits


@triton.jit
def sweep_narrow_kernel(
    q, k, v, beta, state, G, M, norms, out, E, states, final, cu_seqlens, first_chunk, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    PACKED: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr, STATE: tl.constexpr,
    SAVE: tl.constexpr, FINAL: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    slices: tl.constexpr = tl.cdiv(V, BV)
    pair = tl.program_id(0) // slices
    sequence, h = pair // H, pair % H
    first, rows, chunk = _sequence(cu_seqlens, first_chunk, sequence, T, C, n, PACKED)
    ic, ik, iv = tl.arange(0, C), tl.arange(0, BK), (tl.program_id(0) % slices) * BV + tl.arange(0, BV)
    inside = (iv < V)[:, None] & (ik < K)[None, :]
    given = (sequence * H + h).to(tl.int64) * K * V + ik[None, :] * V + iv[:, None]
    S, peak = tl.zeros((BV, BK), tl.float32), 0.0
    if STATE:
        S = tl.load(state + given, mask=inside, other=0.0).to(tl.float32)
        peak = tl.max(tl.abs(S))
    k += (first * H + h) * K
    v += (first * H + h) * V
    E += (first * H + h) * V
    beta += first * H + h
    q += (first // n * H + h) * K
    out += (first // n * H + h) * V
    for c in tl.range(0, tl.cdiv(rows, C), num_stages=STAGES, disable_licm=True):
        row = c * C + ic
        valid = row < rows
        token = row // n
        read = valid & (row % n == n - 1)
        saved = ((chunk + c) * H + h).to(tl.int64)
        k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, False)
        v_c = _load_tile(v, row * (H * V), iv, valid, V, BV, False)
        q_c = _load_tile(q, token * (H * K), ik, read, K, BK, False)
        b = _betas(beta, row * H, valid, LOGITS, SIGMOID)
        k_norm = tl.load(norms + saved * 2 * C + ic)
        q_norm = tl.load(norms + saved * 2 * C + C + ic)
        G_c, M_c = _kept(G + saved * C * C, C, WHOLE), _kept(M + saved * C * C, C, WHOLE)
        shrink, grow = _powers(tl.maximum(peak, tl.max(tl.abs(v_c))))
        peak = tl.max(tl.abs(S))
        if SAVE:
            tl.store(states + saved * K * V + iv[:, None] * K + ik[None, :], S, mask=inside)
        k_digits, q_digits = _unit_digits(k_c, k_norm, WHOLE), _unit_digits(q_c, q_norm, WHOLE)
        S *= shrink
        S_digits = _digits(S, 2, HALF, WHOLE)
        R = tl.trans(v_c) * shrink - _product(S_digits, _transposed(k_digits), None, 2)
        E_c = _product(_digits(-b[None, :] * R, 2, HALF, WHOLE), _transposed(G_c), R, 2)
        _store_tile(E, tl.trans(E_c * grow), row * (H * V), iv, valid, V, BV)
        U = _digits(b[None, :] * E_c, 2, HALF, WHOLE)
        o = _product(U, _transposed(M_c), None, 2)
        o = _product(S_digits, _transposed(q_digits), o, 2)
        _store_tile(out, tl.trans(o * grow), token * (H * V), iv, read, V, BV)
        S = _product(U, k_digits, S, 2) * grow
    if FINAL:
        tl.store(final + given, S, mask=inside)


@triton.jit
def sweep_back_narrow_kernel(
    q, k, beta, G, M, norms, dout, dfinal, dv, dstates, dstate, cu_seqlens, first_chunk, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    PACKED: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr, FINAL: tl.constexpr,
    DSTATE: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    slices: tl.constexpr = tl.cdiv(V, BV)
    pair = tl.program_id(0) // slices
    sequence, h = pair // H, pair % H
    first, rows, chunk = _sequence(cu_seqlens, first_chunk, sequence, T, C, n, PACKED)
    ic, ik, iv = tl.arange(0, C), tl.arange(0, BK), (tl.program_id(0) % slices) * BV + tl.arange(0, BV)
    inside = (iv < V)[:, None] & (ik < K)[None, :]
    given = (sequence * H + h).to(tl.int64) * K * V + ik[None, :] * V + iv[:, None]
    D, peak = tl.zeros((BV, BK), tl.float32), 0.0
    if FINAL:
        D = tl.load(dfinal + given, mask=inside, other=0.0).to(tl.float32)
        peak = tl.max(tl.abs(D))
    k += (first * H + h) * K
    dv += (first * H + h) * V
    beta += first * H + h
    q += (first // n * H + h) * K
    dout += (first // n * H + h) * V
    chunks = tl.cdiv(rows, C)
    for back in tl.range(0, chunks, num_stages=STAGES, disable_licm=True):
        c = chunks - 1 - back
        row = c * C + ic
        valid = row < rows
        token = row // n
        read = valid & (row % n == n - 1)
        saved = ((chunk + c) * H + h).to(tl.int64)
        k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, False)
        dO = _load_tile(dout, token * (H * V), iv, read, V, BV, False)
        q_c = _load_tile(q, token * (H * K), ik, read, K, BK, False)
        b = _betas(beta, row * H, valid, LOGITS, SIGMOID)
        k_norm = tl.load(norms + saved * 2 * C + ic)
        q_norm = tl.load(norms + saved * 2 * C + C + ic)
        G_c, M_c = _kept(G + saved * C * C, C, WHOLE), _kept(M + saved * C * C, C, WHOLE)
        shrink, grow = _powers(tl.maximum(peak, tl.max(tl.abs(dO))))
        peak = tl.max(tl.abs(D))
        tl.store(dstates + saved * K * V + iv[:, None] * K + ik[None, :], D, mask=inside)
        k_digits, q_digits = _unit_digits(k_c, k_norm, WHOLE), _unit_digits(q_c, q_norm, WHOLE)
        dO_digits = _digits(tl.trans(dO * shrink), 2, HALF, WHOLE)
        D *= shrink
        dU = _product(dO_digits, M_c, None, 2)
        dU = _product(_digits(D, 2, HALF, WHOLE), _transposed(k_digits), dU, 2)
        Z = b[None, :] * _product(_digits(-b[None, :] * dU, 2, HALF, WHOLE), G_c, dU, 2)
        _store_tile(dv, tl.trans(Z * grow), row * (H * V), iv, valid, V, BV)
        D = _product(dO_digits, q_digits, D, 2)
        D = _product(_digits(-Z, 2, HALF, WHOLE), k_digits, D, 2) * grow
    if DSTATE:
        tl.store(dstate + given, D, mask=inside)
