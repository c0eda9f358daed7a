"""The delta rule in two Triton kernels: one program per sequence and head walks over its chunks.

The state stays in registers for the whole sequence; the forward stores it once per chunk, and the backward
walks back from there. Names and equations are those of `chunked.py`; docs/delta_rule.md derives them. Every
product is float32 in effect (three tf32 products on tensor cores), whatever the dtype of the inputs.

A chunk has C rows. A row is one step; with n Householders a token has n rows, decays at its first and is
read at its last.
"""

import triton
import triton.language as tl


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _unit_lower_inverse(L, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 for strictly lower L: rows one after the other inside blocks of 16, then blocks by doubling.

        x_i = e_i - sum_{j<i} L_ij x_j          [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]

    All blocks of a size are done at once. No power of L is formed, so nothing grows near reflections.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    X = tl.where(i == j, 1.0, 0.0)
    row = 1
    while row < 16:
        # row `row` of every block: L's coefficients in that row, against the rows of X already done
        weights = tl.where((i % 16 == row) & (i // 16 == j // 16) & (i > j), L, 0.0)
        coefficients = tl.sum(weights, axis=0)
        update = tl.sum(tl.where(i // 16 == j // 16, coefficients[:, None] * X, 0.0), axis=0)
        X = tl.where((i % 16 == row) & (i // 16 == j // 16) & (i > j), -update[None, :], X)
        row += 1
    for level in tl.static_range(4, 8):
        if 2**level < C:
            between = (i // (2 * 2**level) == j // (2 * 2**level)) & (i // 2**level > j // 2**level)
            X -= _dot(X, _dot(tl.where(between, L, 0.0), X, PRECISION), PRECISION)
    return X


@triton.jit
def _load_rows(pointer, row, width: tl.constexpr, column, mask):
    """Rows of a contiguous matrix, as float32, zero where masked: (C, columns)."""
    inside = mask[:, None] & (column < width)[None, :]
    return tl.load(pointer + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(pointer, value, row, width: tl.constexpr, column, mask):
    inside = mask[:, None] & (column < width)[None, :]
    address = pointer + row[:, None] * width + column[None, :]
    tl.store(address, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _sequence(cu_seqlens, chunk_of, sequence, T, C: tl.constexpr, n: tl.constexpr, PACKED: tl.constexpr):
    """First token, number of tokens, and index of the first stored state of a sequence."""
    if PACKED:
        first = tl.load(cu_seqlens + sequence).to(tl.int64)
        length = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - first
        chunk = tl.load(chunk_of + sequence).to(tl.int64)
    else:
        first = sequence.to(tl.int64) * T
        length = T.to(tl.int64)
        chunk = sequence.to(tl.int64) * tl.cdiv(T * n, C)
    return first, length, chunk


@triton.jit
def _inverse_norms(x, L2NORM: tl.constexpr):
    """1 / sqrt(||x||^2 + eps) per row, or one."""
    if L2NORM:
        return tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)
    return tl.sum(x, axis=1) * 0.0 + 1.0


@triton.jit
def _decays(g, row, token_row, valid, n: tl.constexpr, H, h):
    """G, the log-decay summed from the chunk's start, and its last value."""
    step = tl.load(g + token_row * H + h, mask=valid & (row % n == 0), other=0.0).to(tl.float32)
    return tl.cumsum(step, axis=0), tl.sum(step, axis=0)


@triton.jit
def forward_kernel(
    q, k, v, beta, g, state, out, final, states, cu_seqlens, chunk_of, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    GATED: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr,
    SAVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, length, chunk = _sequence(cu_seqlens, chunk_of, sequence, T, C, n, PACKED)
    ik, iv, ic = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    i, j = ic[:, None], ic[None, :]
    place = (sequence * H + h).to(tl.int64) * K * V
    inside = (ik < K)[:, None] & (iv < V)[None, :]
    cell = ik[:, None] * V + iv[None, :]
    if STATE:
        S = tl.load(state + place + cell, mask=inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BK, BV), tl.float32)

    start = length * 0
    while start < length * n:
        row = start + ic
        valid = row < length * n
        read = valid & (row % n == n - 1)
        token_row, step_row = first + row // n, first * n + row
        k_c = _load_rows(k, step_row * H + h, K, ik, valid)
        q_c = _load_rows(q, token_row * H + h, K, ik, read)
        v_c = _load_rows(v, step_row * H + h, V, iv, valid)
        b = tl.load(beta + step_row * H + h, mask=valid, other=0.0).to(tl.float32)
        k_c *= _inverse_norms(k_c, L2NORM)[:, None]
        q_c *= (scale * _inverse_norms(q_c, L2NORM))[:, None]
        if GATED:
            G, end = _decays(g, row, token_row, valid, n, H, h)
            decay = tl.where(i >= j, tl.exp(tl.where(i >= j, G[:, None] - G[None, :], 0.0)), 0.0)

        if SAVE:
            saved = (chunk * H + h) * K * V
            tl.store(states + saved + cell, S, mask=inside)
        KK = _dot(k_c, tl.trans(k_c), PRECISION)
        QK = tl.where(i >= j, _dot(q_c, tl.trans(k_c), PRECISION), 0.0)
        k_in, q_in, k_out = k_c, q_c, k_c
        if GATED:
            KK *= decay
            QK *= decay
            k_in, q_in = k_c * tl.exp(G)[:, None], q_c * tl.exp(G)[:, None]
            k_out = k_c * tl.exp(end - G)[:, None]
        inverse = _unit_lower_inverse(b[:, None] * KK, C, PRECISION)
        U = _dot(inverse, b[:, None] * (v_c - _dot(k_in, S, PRECISION)), PRECISION)
        o = _dot(q_in, S, PRECISION) + _dot(QK, U, PRECISION)
        _store_rows(out, o, token_row * H + h, V, iv, read)
        if GATED:
            S *= tl.exp(end)
        S += _dot(tl.trans(k_out), U, PRECISION)
        start += C
        chunk += 1
    tl.store(final + place + cell, S, mask=inside)


@triton.jit
def backward_kernel(
    q, k, v, beta, g, states, dout, dfinal, dq, dk, dv, dbeta, dg, dstate, cu_seqlens, chunk_of, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    GATED: tl.constexpr, FINAL: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, length, chunk = _sequence(cu_seqlens, chunk_of, sequence, T, C, n, PACKED)
    ik, iv, ic = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    i, j = ic[:, None], ic[None, :]
    place = (sequence * H + h).to(tl.int64) * K * V
    inside = (ik < K)[:, None] & (iv < V)[None, :]
    cell = ik[:, None] * V + iv[None, :]
    if FINAL:
        dS = tl.load(dfinal + place + cell, mask=inside, other=0.0).to(tl.float32)
    else:
        dS = tl.zeros((BK, BV), tl.float32)

    remaining = tl.cdiv(length * n, C)
    while remaining > 0:
        remaining -= 1
        row = remaining * C + ic
        valid = row < length * n
        read = valid & (row % n == n - 1)
        token_row, step_row = first + row // n, first * n + row
        k_raw = _load_rows(k, step_row * H + h, K, ik, valid)
        q_raw = _load_rows(q, token_row * H + h, K, ik, read)
        v_c = _load_rows(v, step_row * H + h, V, iv, valid)
        dO = _load_rows(dout, token_row * H + h, V, iv, read)
        b = tl.load(beta + step_row * H + h, mask=valid, other=0.0).to(tl.float32)
        S = tl.load(states + ((chunk + remaining) * H + h) * K * V + cell, mask=inside, other=0.0)
        k_norm, q_norm = _inverse_norms(k_raw, L2NORM), _inverse_norms(q_raw, L2NORM)
        k_c, q_c = k_raw * k_norm[:, None], q_raw * (scale * q_norm)[:, None]
        KK = _dot(k_c, tl.trans(k_c), PRECISION)
        QK = tl.where(i >= j, _dot(q_c, tl.trans(k_c), PRECISION), 0.0)
        k_in, q_in, k_out = k_c, q_c, k_c
        if GATED:
            G, end = _decays(g, row, token_row, valid, n, H, h)
            decay = tl.where(i >= j, tl.exp(tl.where(i >= j, G[:, None] - G[None, :], 0.0)), 0.0)
            into, out_of = tl.exp(G)[:, None], tl.exp(end - G)[:, None]
            KK *= decay
            QK *= decay
            k_in, q_in, k_out = k_c * into, q_c * into, k_c * out_of

        inverse = _unit_lower_inverse(b[:, None] * KK, C, PRECISION)
        residual = v_c - _dot(k_in, S, PRECISION)
        U = _dot(inverse, b[:, None] * residual, PRECISION)
        X = _dot(tl.trans(QK), dO, PRECISION) + _dot(k_out, dS, PRECISION)  # the gradient of U
        X = _dot(tl.trans(inverse), X, PRECISION)
        dL = tl.where(i > j, -_dot(X, tl.trans(U), PRECISION), 0.0)
        db = tl.sum(X * residual, axis=1) + tl.sum(dL * KK, axis=1)
        dv_c = b[:, None] * X
        _store_rows(dv, dv_c, step_row * H + h, V, iv, valid)
        tl.store(dbeta + step_row * H + h, db.to(dbeta.dtype.element_ty), mask=valid)

        dKK = b[:, None] * dL
        dQK = tl.where(i >= j, _dot(dO, tl.trans(U), PRECISION), 0.0)
        dq_in, dk_in = _dot(dO, tl.trans(S), PRECISION), _dot(dv_c, tl.trans(S), PRECISION)
        dk_out = _dot(U, tl.trans(dS), PRECISION)
        if GATED:
            moved_k, moved_q = dKK * KK, dQK * QK  # a difference G_i - G_j moves both ends
            moved_out = tl.sum(dk_out * k_out, axis=1)
            dG = tl.sum(moved_k, axis=1) - tl.sum(moved_k, axis=0) + tl.sum(moved_q, axis=1)
            dG += tl.sum(dq_in * q_in, axis=1) - tl.sum(dk_in * k_in, axis=1)
            dG -= tl.sum(moved_q, axis=0) + moved_out
            total = tl.sum(moved_out, axis=0) + tl.exp(end) * tl.sum(tl.sum(dS * S, axis=1), axis=0)
            # g_t moves every later G of the chunk, and the decay of the state
            dg_c = tl.sum(dG, axis=0) - tl.cumsum(dG, axis=0) + dG + total
            tl.store(dg + token_row * H + h, dg_c.to(dg.dtype.element_ty), mask=valid & (row % n == 0))
            dKK, dQK = dKK * decay, dQK * decay
            dq_in, dk_in, dk_out = dq_in * into, dk_in * into, dk_out * out_of
            dS *= tl.exp(end)
        dS += _dot(tl.trans(q_in), dO, PRECISION) - _dot(tl.trans(k_in), dv_c, PRECISION)
        dq_c = scale * (_dot(dQK, k_c, PRECISION) + dq_in)
        dk_c = _dot(dKK + tl.trans(dKK), k_c, PRECISION) + _dot(tl.trans(dQK), q_c, PRECISION)
        dk_c += dk_out - dk_in
        if L2NORM:
            unit = q_raw * q_norm[:, None]
            dq_c = q_norm[:, None] * (dq_c - unit * tl.sum(unit * dq_c, axis=1)[:, None])
            dk_c = k_norm[:, None] * (dk_c - k_c * tl.sum(k_c * dk_c, axis=1)[:, None])
        _store_rows(dq, dq_c, token_row * H + h, K, ik, read)
        _store_rows(dk, dk_c, step_row * H + h, K, ik, valid)
    tl.store(dstate + place + cell, dS, mask=inside)
