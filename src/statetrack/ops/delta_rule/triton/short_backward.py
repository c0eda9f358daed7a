"""The delta rule over sequences of up to 128 steps, backward: one Triton kernel, see `triton_kernels.py`.

With D the gradient of the state that leaves a chunk, B = I - diag(b) G as the forward kept it, and Q' = s Q,

    dU = lower(Q' K^T)^T dO + K D                 Z = b B^T (r dU)           Y = -r Z
    dM = lower(dO U^T)                            W = strictly_lower(Y U^T)
    dQ' = dM K + dO S^T                           dK = dM^T Q' + (W + W^T) K + Y S^T + U D^T
    D <- D + Q'^T dO + K^T Y                      dV = Z

and db = rowsum(Z o E) / b = rowsum(B^T (r dU) o U) / (r b). The state S that entered a chunk is the sum of
K^T U over the chunks before, made again: that is less work than to read it.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.split_bf16 import _digits, _hold, _product, _transposed
from statetrack.ops.delta_rule.triton.tiles import (
    _betas,
    _load_tile,
    _span,
    _steps,
    _store_tile,
)


@triton.jit(do_not_specialize=["T"])
def fused_back_kernel(
    q, k, beta, X, norms, U, dout, dfinal, dq, dk, dv, dbeta, cu_seqlens, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    PACKED: tl.constexpr, L2NORM: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr,
    FINAL: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr, CHUNKS: tl.constexpr, LEAD: tl.constexpr,
):  # fmt: skip
    sequence, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, rows = _span(cu_seqlens, sequence, T, n, PACKED)
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
    ik, iv = tl.arange(0, BK), tl.arange(0, BV)
    D = tl.zeros((BV, BK), tl.float32)
    if FINAL:
        dfinal += (sequence * H + h).to(tl.int64) * K * V
        inside = (iv < V)[:, None] & (ik < K)[None, :]
        D = tl.load(dfinal + ik[None, :] * V + iv[:, None], mask=inside, other=0.0).to(tl.float32)
    tensors, gradients = (q, k, beta, dout, X, norms, U), (dq, dk, dv, dbeta)
    numbers = rows, H, scale
    if CHUNKS > 0:
        for c in tl.static_range(CHUNKS - 1, -1, -1):
            D = _backward_chunk(
                D, LEAD + c * C, tensors, gradients, numbers, K, V, BK, BV, C, n, L2NORM, LOGITS, SIGMOID,
                SPLIT, WHOLE, LEAD + c > 0, FINAL or c < CHUNKS - 1, c, LEAD,
            )  # fmt: skip
    else:
        chunks = tl.cdiv(rows, C)
        for back in tl.range(0, chunks, num_stages=1, disable_licm=True):
            D = _backward_chunk(
                D, (chunks - 1 - back) * C, tensors, gradients, numbers, K, V, BK, BV, C, n, L2NORM, LOGITS,
                SIGMOID, SPLIT, WHOLE, True, True, -1, 0,
            )  # fmt: skip
    if LEAD:
        _first_step_back(D, tensors, gradients, scale, K, V, BK, BV, L2NORM, LOGITS, SIGMOID)


@triton.jit
def _backward_chunk(
    D, start, tensors, gradients, numbers,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    L2NORM: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr, SPLIT: tl.constexpr,
    WHOLE: tl.constexpr, ENTERS: tl.constexpr, LEAVES: tl.constexpr, BEFORE: tl.constexpr, LEAD: tl.constexpr,
):  # fmt: skip
    """One chunk. ENTERS if a state entered it, LEAVES if D may be other than zero.

    BEFORE is the number of chunks before it, without the first step if that is on its own (LEAD), or -1.
    """
    q, k, beta, dout, X, norms, U = tensors
    dq, dk, dv, dbeta = gradients
    rows, H, scale = numbers
    CARRIED: tl.constexpr = 2 if SPLIT else 3
    OUT: tl.constexpr = CARRIED - 1
    ic, ik, iv = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    i, j = ic[:, None], ic[None, :]
    row = start + ic
    valid, token, read = _steps(row, row, rows, n)
    r = tl.load(norms + row * (H * 2), mask=valid, other=1.0)
    unit = tl.load(norms + row * (H * 2) + 1, mask=valid, other=1.0)
    b = _betas(beta, row * H, valid, LOGITS, SIGMOID)
    k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, SPLIT)
    q_c = _load_tile(q, token * (H * K), ik, read, K, BK, SPLIT)
    dO = _load_tile(dout, token * (H * V), iv, read, V, BV, SPLIT)
    U_c = _load_tile(U, row * (H * V), iv, valid, V, BV, SPLIT)
    inverse = _load_kept_inverse(X, row * (H * C), valid, C, SPLIT, WHOLE)
    k_c, q_c = _hold(k_c, q_c, WHOLE)
    dO, U_c = _hold(dO, U_c, WHOLE)
    # of output gradient and queries the latter can take s without another rounding
    q_c = q_c.to(tl.float32) * (scale * unit)[:, None]
    k_digits, U_digits = _digits(k_c, CARRIED, WHOLE), _digits(U_c, OUT, WHOLE)
    q_digits, dO_digits = _digits(q_c, OUT, WHOLE), _digits(dO, OUT, WHOLE)

    M = tl.where(i <= j, _product(k_digits, _transposed(q_digits), None, OUT), 0.0)  # on its side
    dU = _product(_transposed(dO_digits), _digits(tl.trans(M), OUT, WHOLE), None, OUT)
    dk_c, dq_c = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
    if LEAVES:
        dU = _product(_digits(D, CARRIED, WHOLE), _transposed(k_digits), dU, CARRIED)
        dk_c = _product(U_digits, _digits(D, OUT, WHOLE), dk_c, OUT)
    dU *= r[None, :]
    if not SPLIT:
        inverse = _digits(inverse[0], CARRIED, WHOLE)
    # Z / b twice, upright and on its side: both are wanted as left factors
    upright = _product(_transposed(inverse), _digits(tl.trans(dU), CARRIED, WHOLE), None, CARRIED)
    _store_tile(dv, upright * b[:, None], row * (H * V), iv, valid, V, BV)
    db = tl.sum(upright * U_c.to(tl.float32), axis=1) / (r * b)
    if LOGITS:
        db *= b * (1.0 - b / SIGMOID)
    tl.store(dbeta + row * H, db.to(dbeta.dtype.element_ty), mask=valid)
    upright *= -(r * b)[:, None]
    if ENTERS:
        Y = _product(_digits(dU, CARRIED, WHOLE), inverse, None, CARRIED) * -(r * b)[None, :]
        D = _product(_transposed(dO_digits), q_digits, D, OUT)
        D = _product(_digits(Y, CARRIED, WHOLE), k_digits, D, CARRIED)

    Y_digits = _digits(upright, OUT, WHOLE)
    if ENTERS:
        S = tl.zeros((BK, BV), tl.float32)
        if BEFORE >= 0:
            for earlier in tl.static_range(-LEAD, BEFORE):
                S = _add_state(S, LEAD + earlier * C + ic, k, U, H, K, V, BK, BV, SPLIT, WHOLE)
        else:
            for earlier in tl.range(0, start, C, num_stages=1, disable_licm=True):
                S = _add_state(S, earlier + ic, k, U, H, K, V, BK, BV, SPLIT, WHOLE)
        S_digits = _digits(tl.trans(S), OUT, WHOLE)
        dk_c = _product(Y_digits, S_digits, dk_c, OUT)
        dq_c = _product(dO_digits, S_digits, dq_c, OUT)
    if L2NORM:  # read again: kept since above, they would not fit the registers
        k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, SPLIT)
        q_c = _load_tile(q, token * (H * K), ik, read, K, BK, SPLIT)
        k_c, q_c = _hold(k_c, q_c, WHOLE)
    W = tl.where(i > j, _product(Y_digits, _transposed(U_digits), None, OUT), 0.0)
    transposed = _product(U_digits, _digits(tl.trans(upright), OUT, WHOLE), None, OUT)
    W += tl.where(i < j, transposed, 0.0)
    dk_c = _product(_digits(W, OUT, WHOLE), k_digits, dk_c, OUT)
    dM = tl.where(i <= j, _product(U_digits, _transposed(dO_digits), None, OUT), 0.0)
    dk_c = _product(_digits(dM, OUT, WHOLE), q_digits, dk_c, OUT)
    dM = tl.where(i >= j, _product(dO_digits, _transposed(U_digits), None, OUT), 0.0)
    dq_c = _product(_digits(dM, OUT, WHOLE), k_digits, dq_c, OUT)

    if L2NORM:
        k_c, q_c = k_c.to(tl.float32), q_c.to(tl.float32)
        dk_c -= k_c * (tl.sum(k_c * dk_c, axis=1) * r * r)[:, None]
        dq_c -= q_c * (tl.sum(q_c * dq_c, axis=1) * unit * unit)[:, None]
    _store_tile(dk, dk_c, row * (H * K), ik, valid, K, BK)
    _store_tile(dq, dq_c * (scale * unit)[:, None], token * (H * K), ik, read, K, BK)
    return D


@triton.jit
def _add_state(
    S, row, k, U, H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SPLIT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """S + K^T U over these rows, those from zero on."""
    OUT: tl.constexpr = 1 if SPLIT else 2
    valid = row >= 0
    k_c = _load_tile(k, row * (H * K), tl.arange(0, BK), valid, K, BK, SPLIT)
    U_c = _load_tile(U, row * (H * V), tl.arange(0, BV), valid, V, BV, SPLIT)
    k_c, U_c = _hold(k_c, U_c, WHOLE)
    return _product(_transposed(_digits(k_c, OUT, WHOLE)), _digits(U_c, OUT, WHOLE), S, OUT)


@triton.jit
def _first_step_back(
    D, tensors, gradients, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L2NORM: tl.constexpr,
    LOGITS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """The gradients of a first step that was on its own, no state before it: X = 1 and W = 0."""
    q, k, beta, dout, _, norms, U = tensors
    dq, dk, dv, dbeta = gradients
    ik, iv = tl.arange(0, BK), tl.arange(0, BV)
    k_1 = tl.load(k + ik, mask=ik < K, other=0.0).to(tl.float32)
    q_1 = tl.load(q + ik, mask=ik < K, other=0.0).to(tl.float32)
    dO = tl.load(dout + iv, mask=iv < V, other=0.0).to(tl.float32)
    u = tl.load(U + iv, mask=iv < V, other=0.0).to(tl.float32)
    r, unit, b = tl.load(norms), tl.load(norms + 1), _betas(beta, 0, True, LOGITS, SIGMOID)
    s = scale * unit
    slope = r * (s * tl.sum(q_1 * k_1, axis=0) * dO + tl.sum(D * k_1[None, :], axis=1))
    tl.store(dv + iv, (b * slope).to(dv.dtype.element_ty), mask=iv < V)
    db = tl.sum(slope * u, axis=0) / (r * b)
    if LOGITS:
        db *= b * (1.0 - b / SIGMOID)
    tl.store(dbeta, db.to(dbeta.dtype.element_ty))
    dM = tl.sum(dO * u, axis=0) * s
    dk_1 = dM * q_1 + tl.sum(D * u[:, None], axis=0)
    dq_1 = dM * k_1
    if L2NORM:
        dk_1 -= k_1 * (tl.sum(k_1 * dk_1, axis=0) * r * r)
        dq_1 -= q_1 * (tl.sum(q_1 * dq_1, axis=0) * unit * unit)
    tl.store(dk + ik, dk_1.to(dk.dtype.element_ty), mask=ik < K)
    tl.store(dq + ik, dq_1.to(dq.dtype.element_ty), mask=ik < K)


@triton.jit
def _load_kept_inverse(X, rows, valid, C: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr):
    """As `_store_inverse` (triton_kernels.py) left it: two tiles of digits, or twice the same of floats."""
    j = tl.arange(0, C)[None, :]
    if SPLIT:
        X = X.to(tl.pointer_type(tl.bfloat16)) + 2 * rows[:, None] + j
        first = tl.load(X, mask=valid[:, None], other=0.0)
        second = tl.load(X + C, mask=valid[:, None], other=0.0)
    else:
        first = tl.load(X + rows[:, None] + j, mask=valid[:, None], other=0.0)
        second = first
    return _hold(first, second, WHOLE)
