"""The delta rule over sequences of up to 128 steps: one Triton kernel each way.

One warp does a whole sequence and head, in chunks of 16 steps, with the state in its registers. Thousands of
them fill the GPU, and nothing but the results and what the backward reads goes to memory. No gate and no
first state: those take the kernels for long sequences, `triton_chunk_kernels.py`.

In the letters of docs/delta_rule.md, with raw q and k, r = 1 / ||k|| and s = scale / ||q|| by row:

    X = (I + strictly_lower(r K K^T r b))^-1      E = X (V - r K S)          U = r b E
    O = s (Q S + lower(Q K^T) U)                  S <- S + K^T U

The backward reads X, U, r and s again. With D the gradient of the leaving state and Q' = s Q,

    dU = lower(Q' K^T)^T dO + K D                 Z = X^T (r b dU)           Y = -r Z
    dM = lower(dO U^T)                            W = strictly_lower(Y U^T)
    dQ' = dM K + dO S^T                           dK = dM^T Q' + (W + W^T) K + Y S^T + U D^T
    D <- D + Q'^T dO + K^T Y                      dV = Z

and db = rowsum(Z o E) / b, where rowsum(Z o E) is the diagonal of Y U^T divided by -r^2 b. The state S that
entered a chunk is the sum of K^T U over the chunks before, made again: that is less work than to read it.

What is carried along is on its side, (columns of v, rows) and (columns of v, columns of k), which makes it
the left factor of the next product as it lies in the registers: see `triton_digits.py`.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton_digits import _digits, _inverse_of_16, _product, _transposed
from statetrack.ops.delta_rule.triton_parts import (
    _betas,
    _inverse_norms,
    _load_tile,
    _span,
    _squares,
    _store_tile,
)


@triton.jit(do_not_specialize=["T"])
def fused_kernel(
    q, k, v, beta, X, norms, U, out, final, cu_seqlens, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    PACKED: tl.constexpr, L2NORM: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr,
    SAVE: tl.constexpr, FINAL: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    CARRIED: tl.constexpr = 2 if SPLIT else 3  # digits of what is carried along time
    OUT: tl.constexpr = CARRIED - 1  # and of products whose results are not
    sequence, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, rows = _span(cu_seqlens, sequence, T, n, PACKED)
    ic, ik, iv = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    i, j = ic[:, None], ic[None, :]
    k += (first * H + h) * K
    v += (first * H + h) * V
    U += (first * H + h) * V
    X += (first * H + h) * C
    norms += (first * H + h) * 2
    beta += first * H + h
    q += (first // n * H + h) * K
    out += (first // n * H + h) * V
    S = tl.zeros((BV, BK), tl.float32)
    for c in tl.range(0, tl.cdiv(rows, C), num_stages=1, disable_licm=True):
        row = c * C + ic
        valid = row < rows
        token = row // n
        read = valid & (row % n == n - 1)
        k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, SPLIT)
        q_c = _load_tile(q, token * (H * K), ik, read, K, BK, SPLIT)
        v_c = _load_tile(v, row * (H * V), iv, valid, V, BV, SPLIT)
        b = _betas(beta, row * H, valid, LOGITS, SIGMOID)
        k_digits, q_digits = _digits(k_c, CARRIED, WHOLE), _digits(q_c, OUT, WHOLE)
        k_right = _transposed(k_digits)
        KK = _product(k_digits, k_right, None, CARRIED)
        QK = _product(q_digits, k_right, None, OUT)
        squares = tl.where(i == j, KK, 0.0)
        r = _inverse_norms(tl.sum(squares, axis=0), L2NORM)
        s = scale * _inverse_norms(_squares(q_c), L2NORM)
        KK *= _inverse_norms(tl.sum(squares, axis=1), L2NORM)[:, None] * r[None, :]
        lower, upper = tl.where(i > j, KK * b[None, :], 0.0), tl.where(i < j, KK * b[:, None], 0.0)
        X_c = _inverse_of_16(lower, upper, CARRIED, WHOLE)

        R, o = tl.trans(v_c).to(tl.float32), tl.zeros((BV, C), tl.float32)
        if SPLIT or c > 0:  # no state enters the first; for bfloat16 a branch costs what it saves
            S_digits = _digits(S, CARRIED, WHOLE)
            R -= r[None, :] * _product(S_digits, k_right, None, CARRIED)
            o = _product(S_digits, _transposed(q_digits), o, OUT)
        E = _product(_digits(R, CARRIED, WHOLE), _digits(tl.trans(X_c), CARRIED, WHOLE), None, CARRIED)
        U_c = (r * b)[None, :] * E
        U_digits = _digits(U_c, CARRIED, WHOLE)
        if SAVE:
            _store_inverse(X, X_c, row * (H * C), valid, C, SPLIT)
            tl.store(norms + row * (H * 2), r, mask=valid)
            tl.store(norms + row * (H * 2) + 1, s, mask=valid)
            kept = tl.trans(U_digits[0]) if SPLIT else tl.trans(U_c)
            _store_tile(U, kept, row * (H * V), iv, valid, V, BV)
        M = _digits(tl.trans(tl.where(i >= j, QK, 0.0)), OUT, WHOLE)
        o = _product(U_digits, M, o, OUT) * s[None, :]
        _store_tile(out, tl.trans(o.to(out.dtype.element_ty)), token * (H * V), iv, read, V, BV)
        S = _product(U_digits, k_digits, S, CARRIED)
    if FINAL:
        final += (sequence * H + h).to(tl.int64) * K * V
        tl.store(final + ik[None, :] * V + iv[:, None], S, mask=(iv < V)[:, None] & (ik < K)[None, :])


@triton.jit
def _store_inverse(X, tile, rows, valid, C: tl.constexpr, SPLIT: tl.constexpr):
    """C floats a row, or when SPLIT their C first and then C second digits."""
    j = tl.arange(0, C)[None, :]
    if SPLIT:
        X = X.to(tl.pointer_type(tl.bfloat16)) + 2 * rows[:, None] + j
        first, second = _digits(tile, 2, False)
        tl.store(X, first, mask=valid[:, None])
        tl.store(X + C, second, mask=valid[:, None])
    else:
        tl.store(X + rows[:, None] + j, tile, mask=valid[:, None])


@triton.jit
def _load_inverse_digits(X, rows, valid, C: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr):
    j = tl.arange(0, C)[None, :]
    if SPLIT:
        X = X.to(tl.pointer_type(tl.bfloat16)) + 2 * rows[:, None] + j
        first = tl.load(X, mask=valid[:, None], other=0.0)
        digits = (first, tl.load(X + C, mask=valid[:, None], other=0.0))
    else:
        digits = _digits(tl.load(X + rows[:, None] + j, mask=valid[:, None], other=0.0), 3, WHOLE)
    return digits


@triton.jit(do_not_specialize=["T"])
def fused_back_kernel(
    q, k, beta, X, norms, U, dout, dfinal, dq, dk, dv, dbeta, cu_seqlens, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    PACKED: tl.constexpr, L2NORM: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr,
    FINAL: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    CARRIED: tl.constexpr = 2 if SPLIT else 3
    OUT: tl.constexpr = CARRIED - 1
    sequence, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, rows = _span(cu_seqlens, sequence, T, n, PACKED)
    ic, ik, iv = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    i, j = ic[:, None], ic[None, :]
    k += (first * H + h) * K
    dk += (first * H + h) * K
    U += (first * H + h) * V
    dv += (first * H + h) * V
    X += (first * H + h) * C
    norms += (first * H + h) * 2
    beta += first * H + h
    dbeta += first * H + h
    q += (first // n * H + h) * K
    dq += (first // n * H + h) * K
    dout += (first // n * H + h) * V
    D = tl.zeros((BV, BK), tl.float32)
    if FINAL:
        dfinal += (sequence * H + h).to(tl.int64) * K * V
        inside = (iv < V)[:, None] & (ik < K)[None, :]
        D = tl.load(dfinal + ik[None, :] * V + iv[:, None], mask=inside, other=0.0).to(tl.float32)
    chunks = tl.cdiv(rows, C)
    for back in tl.range(0, chunks, num_stages=1, disable_licm=True):
        c = chunks - 1 - back
        row = c * C + ic
        valid = row < rows
        token = row // n
        read = valid & (row % n == n - 1)
        r = tl.load(norms + row * (H * 2), mask=valid, other=1.0)
        s = tl.load(norms + row * (H * 2) + 1, mask=valid, other=1.0)
        b = _betas(beta, row * H, valid, LOGITS, SIGMOID)
        k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, SPLIT)
        q_c = _load_tile(q, token * (H * K), ik, read, K, BK, SPLIT)
        dO = _load_tile(dout, token * (H * V), iv, read, V, BV, SPLIT)
        U_c = _load_tile(U, row * (H * V), iv, valid, V, BV, SPLIT)
        k_digits, U_digits = _digits(k_c, CARRIED, WHOLE), _digits(U_c, OUT, WHOLE)
        q_digits = _digits(q_c.to(tl.float32) * s[:, None], OUT, WHOLE)
        dO_digits = _digits(dO, OUT, WHOLE)

        M = tl.where(i <= j, _product(k_digits, _transposed(q_digits), None, OUT), 0.0)  # on its side
        dU = _product(_transposed(dO_digits), _digits(tl.trans(M), OUT, WHOLE), None, OUT)
        dU = _product(_digits(D, CARRIED, WHOLE), _transposed(k_digits), dU, CARRIED)
        dk_c = _product(U_digits, _digits(D, OUT, WHOLE), None, OUT)
        dU *= (r * b)[None, :]
        X_digits = _load_inverse_digits(X, row * (H * C), valid, C, SPLIT, WHOLE)
        # Z twice, upright and on its side: both are wanted as left factors
        upright = _product(_transposed(X_digits), _digits(tl.trans(dU), CARRIED, WHOLE), None, CARRIED)
        _store_tile(dv, upright, row * (H * V), iv, valid, V, BV)
        upright *= -r[:, None]
        Y = _product(_digits(dU, CARRIED, WHOLE), X_digits, None, CARRIED) * -r[None, :]
        D = _product(_transposed(dO_digits), q_digits, D, OUT)
        D = _product(_digits(Y, CARRIED, WHOLE), k_digits, D, CARRIED)

        Y_digits = _digits(upright, OUT, WHOLE)
        S = tl.zeros((BK, BV), tl.float32)
        for earlier in tl.range(0, c, num_stages=1, disable_licm=True):
            past = earlier * C + ic
            k_past = _load_tile(k, past * (H * K), ik, past < rows, K, BK, SPLIT)
            U_past = _load_tile(U, past * (H * V), iv, past < rows, V, BV, SPLIT)
            S = _product(_transposed(_digits(k_past, OUT, WHOLE)), _digits(U_past, OUT, WHOLE), S, OUT)
        S_digits = _digits(tl.trans(S), OUT, WHOLE)
        dk_c = _product(Y_digits, S_digits, dk_c, OUT)
        dq_c = _product(dO_digits, S_digits, None, OUT)
        W = _product(Y_digits, _transposed(U_digits), None, OUT)
        W_transposed = _product(U_digits, _digits(tl.trans(upright), OUT, WHOLE), None, OUT)
        ZE = -tl.sum(tl.where(i == j, W, 0.0), axis=1) / (r * r * b)
        db = ZE * (1.0 - b / SIGMOID) if LOGITS else ZE / b
        tl.store(dbeta + row * H, db.to(dbeta.dtype.element_ty), mask=valid)
        W = tl.where(i > j, W, 0.0) + tl.where(i < j, W_transposed, 0.0)
        dk_c = _product(_digits(W, OUT, WHOLE), k_digits, dk_c, OUT)
        dM = tl.where(i <= j, _product(U_digits, _transposed(dO_digits), None, OUT), 0.0)
        dk_c = _product(_digits(dM, OUT, WHOLE), q_digits, dk_c, OUT)
        dM = tl.where(i >= j, _product(dO_digits, _transposed(U_digits), None, OUT), 0.0)
        dq_c = _product(_digits(dM, OUT, WHOLE), k_digits, dq_c, OUT)

        if L2NORM:
            # read again: kept since above, they would not fit the registers
            k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, SPLIT).to(tl.float32)
            q_c = _load_tile(q, token * (H * K), ik, read, K, BK, SPLIT).to(tl.float32)
            dk_c -= k_c * (tl.sum(k_c * dk_c, axis=1) * r * r)[:, None]
            unit = s / scale
            dq_c -= q_c * (tl.sum(q_c * dq_c, axis=1) * unit * unit)[:, None]
        _store_tile(dk, dk_c, row * (H * K), ik, valid, K, BK)
        _store_tile(dq, dq_c * s[:, None], token * (H * K), ik, read, K, BK)
