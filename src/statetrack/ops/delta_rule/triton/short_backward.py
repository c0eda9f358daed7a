"""The delta rule over sequences of up to 128 steps, backward: one Triton kernel.

Per chunk of 16 steps, last chunk first, with D the gradient of the state that leaves it, B = I - diag(b) G as
the forward (short_forward.py) saved it, s = scale / ||q|| and Q' = s Q (docs/internals/delta_rule.md, "Short
sequences"):

    dU = lower(Q' K^T)^T dO + K D                 X = B^T (r_k dU)          dV = b X          Y = -r_k b X
    dA = lower(dO U^T)                            W = strictly_lower(Y U^T)
    dQ' = dA K + dO S^T                           dK = dA^T Q' + (W + W^T) K + Y S^T + U D^T
    D <- D + Q'^T dO + K^T Y                      db = rowsum(X o U) / (r_k b)

Grid: one program of one warp per sequence and head. Registers hold D (transposed, BV x BK) for the whole
sequence. The state S that entered a chunk is recomputed, as the sum of K^T U over the chunks before: with
so few chunks that takes less time than to save and load it. Shared memory serves transposes of loaded tiles
only.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.split_bf16 import dot_terms, loads_first, split, transpose_terms
from statetrack.ops.delta_rule.triton.tiles import (
    load_beta,
    load_tile,
    relative_slope,
    row_tokens,
    sequence_rows,
    store_tile,
)


@triton.jit(do_not_specialize=["T"])
def short_backward_kernel(
    q, k, beta, inverse_rows, inverse_norms, U, dout, dfinal_state, dq, dk, dv, dbeta, cu_seqlens,
    T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HOUSEHOLDERS: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr,
    HARD_BETA: tl.constexpr,
    HAS_DFINAL_STATE: tl.constexpr, BF16: tl.constexpr, SPLIT: tl.constexpr, UNROLLED: tl.constexpr,
    FIRST_STEP_ALONE: tl.constexpr,
):  # fmt: skip
    sequence, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, rows = sequence_rows(cu_seqlens, sequence, T, HOUSEHOLDERS, PACKED)
    k += (first * H + h) * K
    dk += (first * H + h) * K
    U += (first * H + h) * V
    dv += (first * H + h) * V
    inverse_rows += (first * H + h) * C
    inverse_norms += (first * H + h) * 2
    beta += first * H + h
    dbeta += first * H + h
    q += (first // HOUSEHOLDERS * H + h) * K
    dq += (first // HOUSEHOLDERS * H + h) * K
    dout += (first // HOUSEHOLDERS * H + h) * V
    ik, iv = tl.arange(0, BK), tl.arange(0, BV)
    D = tl.zeros((BV, BK), tl.float32)
    if HAS_DFINAL_STATE:
        dfinal_state += (sequence * H + h).to(tl.int64) * K * V
        inside = (iv < V)[:, None] & (ik < K)[None, :]
        D = tl.load(dfinal_state + ik[None, :] * V + iv[:, None], mask=inside, other=0.0).to(tl.float32)
    tensors, gradients = (q, k, beta, dout, inverse_rows, inverse_norms, U), (dq, dk, dv, dbeta)
    numbers = rows, H, scale
    if UNROLLED > 0:
        for c in tl.static_range(UNROLLED - 1, -1, -1):
            D = _backward_chunk(
                D, FIRST_STEP_ALONE + c * C, tensors, gradients, numbers, K, V, BK, BV, C, HOUSEHOLDERS,
                L2NORM, BETA_FROM_LOGITS, HARD_BETA, BF16, SPLIT, FIRST_STEP_ALONE + c > 0,
                HAS_DFINAL_STATE or c < UNROLLED - 1, c, FIRST_STEP_ALONE,
            )  # fmt: skip
    else:
        chunks = tl.cdiv(rows, C)
        for back in tl.range(0, chunks, num_stages=1, disable_licm=True):
            D = _backward_chunk(
                D, (chunks - 1 - back) * C, tensors, gradients, numbers, K, V, BK, BV, C, HOUSEHOLDERS,
                L2NORM, BETA_FROM_LOGITS, HARD_BETA, BF16, SPLIT, True, True, -1, 0,
            )  # fmt: skip
    if FIRST_STEP_ALONE:
        _first_step_backward(D, tensors, gradients, scale, K, V, BK, BV, L2NORM, BETA_FROM_LOGITS, HARD_BETA)


@triton.jit
def _backward_chunk(
    D, start, tensors, gradients, numbers,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HOUSEHOLDERS: tl.constexpr, L2NORM: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr,
    HARD_BETA: tl.constexpr, BF16: tl.constexpr,
    SPLIT: tl.constexpr, STATE_ENTERS: tl.constexpr, STATE_LEAVES: tl.constexpr,
    CHUNKS_BEFORE: tl.constexpr, FIRST_STEP_ALONE: tl.constexpr,
):  # fmt: skip
    """One chunk: store the gradients of its inputs and return D of the state that entered it.

    STATE_ENTERS unless no state entered it, STATE_LEAVES unless D is known to be zero. CHUNKS_BEFORE is the
    number of chunks before it, not counting a FIRST_STEP_ALONE; -1 where it is not known at compile time.
    """
    q, k, beta, dout, inverse_rows, inverse_norms, U = tensors
    dq, dk, dv, dbeta = gradients
    rows, H, scale = numbers
    STATE_TERMS: tl.constexpr = 2 if BF16 else 3
    OUT_TERMS: tl.constexpr = STATE_TERMS - 1
    ic, ik, iv = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    i, j = ic[:, None], ic[None, :]
    row = start + ic
    valid, token, read = row_tokens(row, row, rows, HOUSEHOLDERS)
    r_k = tl.load(inverse_norms + row * (H * 2), mask=valid, other=1.0)
    r_q = tl.load(inverse_norms + row * (H * 2) + 1, mask=valid, other=1.0)
    b = load_beta(beta, row * H, valid, BETA_FROM_LOGITS, HARD_BETA)
    k_c = load_tile(k, row * (H * K), ik, valid, K, BK, BF16)
    q_c = load_tile(q, token * (H * K), ik, read, K, BK, BF16)
    dO = load_tile(dout, token * (H * V), iv, read, V, BV, BF16)
    U_c = load_tile(U, row * (H * V), iv, valid, V, BV, BF16)
    inverse = _load_inverse_rows(inverse_rows, row * (H * C), valid, C, BF16, SPLIT)
    k_c, q_c = loads_first(k_c, q_c, SPLIT)
    dO, U_c = loads_first(dO, U_c, SPLIT)
    # s goes to the queries, not to dO: they are split into terms after it, dO is an exact bfloat16 tile
    q_c = q_c.to(tl.float32) * (scale * r_q)[:, None]
    k_terms, U_terms = split(k_c, STATE_TERMS, SPLIT), split(U_c, OUT_TERMS, SPLIT)
    q_terms, dO_terms = split(q_c, OUT_TERMS, SPLIT), split(dO, OUT_TERMS, SPLIT)

    # dU, like D, is transposed until X: (columns of v) x (rows)
    A_t = tl.where(i <= j, dot_terms(k_terms, transpose_terms(q_terms), None, OUT_TERMS), 0.0)
    dU = dot_terms(transpose_terms(dO_terms), split(tl.trans(A_t), OUT_TERMS, SPLIT), None, OUT_TERMS)
    dk_c, dq_c = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
    if STATE_LEAVES:
        dU = dot_terms(split(D, STATE_TERMS, SPLIT), transpose_terms(k_terms), dU, STATE_TERMS)
        dk_c = dot_terms(U_terms, split(D, OUT_TERMS, SPLIT), dk_c, OUT_TERMS)
    dU *= r_k[None, :]
    if not BF16:
        inverse = split(inverse[0], STATE_TERMS, SPLIT)
    # X and, further down, Y are computed twice, as they are and transposed: both serve as left factors, and
    # to transpose a result would send it through shared memory
    inverse_t = transpose_terms(inverse)
    X = dot_terms(inverse_t, split(tl.trans(dU), STATE_TERMS, SPLIT), None, STATE_TERMS)
    store_tile(dv, X * b[:, None], row * (H * V), iv, valid, V, BV)
    db = tl.sum(X * U_c.to(tl.float32), axis=1) / (r_k * b)
    if BETA_FROM_LOGITS is not None:
        db *= b * relative_slope(b, BETA_FROM_LOGITS, HARD_BETA)
    tl.store(dbeta + row * H, db.to(dbeta.dtype.element_ty), mask=valid)
    Y = X * -(r_k * b)[:, None]
    if STATE_ENTERS:
        Y_t = dot_terms(split(dU, STATE_TERMS, SPLIT), inverse, None, STATE_TERMS) * -(r_k * b)[None, :]
        D = dot_terms(transpose_terms(dO_terms), q_terms, D, OUT_TERMS)
        D = dot_terms(split(Y_t, STATE_TERMS, SPLIT), k_terms, D, STATE_TERMS)

    Y_terms = split(Y, OUT_TERMS, SPLIT)
    if STATE_ENTERS:
        S = tl.zeros((BK, BV), tl.float32)
        if CHUNKS_BEFORE >= 0:
            for earlier in tl.static_range(-FIRST_STEP_ALONE, CHUNKS_BEFORE):
                earlier_row = FIRST_STEP_ALONE + earlier * C + ic  # negative rows do not count
                S = _add_state(S, earlier_row, k, U, H, K, V, BK, BV, BF16, SPLIT)
        else:
            for earlier in tl.range(0, start, C, num_stages=1, disable_licm=True):
                S = _add_state(S, earlier + ic, k, U, H, K, V, BK, BV, BF16, SPLIT)
        S_terms = split(tl.trans(S), OUT_TERMS, SPLIT)
        dk_c = dot_terms(Y_terms, S_terms, dk_c, OUT_TERMS)
        dq_c = dot_terms(dO_terms, S_terms, dq_c, OUT_TERMS)
    if L2NORM:  # loaded again: kept from above, they would not fit in the registers
        k_c = load_tile(k, row * (H * K), ik, valid, K, BK, BF16)
        q_c = load_tile(q, token * (H * K), ik, read, K, BK, BF16)
        k_c, q_c = loads_first(k_c, q_c, SPLIT)
    # W + W^T, then dA^T and dA, each triangle by a product of its own: again no result is transposed
    W = tl.where(i > j, dot_terms(Y_terms, transpose_terms(U_terms), None, OUT_TERMS), 0.0)
    W_t = dot_terms(U_terms, split(tl.trans(Y), OUT_TERMS, SPLIT), None, OUT_TERMS)
    W += tl.where(i < j, W_t, 0.0)
    dk_c = dot_terms(split(W, OUT_TERMS, SPLIT), k_terms, dk_c, OUT_TERMS)
    dA_t = tl.where(i <= j, dot_terms(U_terms, transpose_terms(dO_terms), None, OUT_TERMS), 0.0)
    dk_c = dot_terms(split(dA_t, OUT_TERMS, SPLIT), q_terms, dk_c, OUT_TERMS)
    dA = tl.where(i >= j, dot_terms(dO_terms, transpose_terms(U_terms), None, OUT_TERMS), 0.0)
    dq_c = dot_terms(split(dA, OUT_TERMS, SPLIT), k_terms, dq_c, OUT_TERMS)

    if L2NORM:
        k_c, q_c = k_c.to(tl.float32), q_c.to(tl.float32)
        dk_c -= k_c * (tl.sum(k_c * dk_c, axis=1) * r_k * r_k)[:, None]
        dq_c -= q_c * (tl.sum(q_c * dq_c, axis=1) * r_q * r_q)[:, None]
    store_tile(dk, dk_c, row * (H * K), ik, valid, K, BK)
    store_tile(dq, dq_c * (scale * r_q)[:, None], token * (H * K), ik, read, K, BK)
    return D


@triton.jit
def _add_state(
    S, row, k, U, H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BF16: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """S + K^T U over these rows, without negative ones."""
    OUT_TERMS: tl.constexpr = 1 if BF16 else 2
    valid = row >= 0
    k_c = load_tile(k, row * (H * K), tl.arange(0, BK), valid, K, BK, BF16)
    U_c = load_tile(U, row * (H * V), tl.arange(0, BV), valid, V, BV, BF16)
    k_c, U_c = loads_first(k_c, U_c, SPLIT)
    k_t = transpose_terms(split(k_c, OUT_TERMS, SPLIT))
    return dot_terms(k_t, split(U_c, OUT_TERMS, SPLIT), S, OUT_TERMS)


@triton.jit
def _first_step_backward(
    D, tensors, gradients, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L2NORM: tl.constexpr,
    BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr,
):  # fmt: skip
    """The gradients of a first step done apart: no state before it, B = 1 and W = 0."""
    q, k, beta, dout, _, inverse_norms, U = tensors
    dq, dk, dv, dbeta = gradients
    ik, iv = tl.arange(0, BK), tl.arange(0, BV)
    k_1 = tl.load(k + ik, mask=ik < K, other=0.0).to(tl.float32)
    q_1 = tl.load(q + ik, mask=ik < K, other=0.0).to(tl.float32)
    dO = tl.load(dout + iv, mask=iv < V, other=0.0).to(tl.float32)
    u = tl.load(U + iv, mask=iv < V, other=0.0).to(tl.float32)
    r_k, r_q = tl.load(inverse_norms), tl.load(inverse_norms + 1)
    b = load_beta(beta, 0, True, BETA_FROM_LOGITS, HARD_BETA)
    s = scale * r_q
    X = r_k * (s * tl.sum(q_1 * k_1, axis=0) * dO + tl.sum(D * k_1[None, :], axis=1))
    tl.store(dv + iv, (b * X).to(dv.dtype.element_ty), mask=iv < V)
    db = tl.sum(X * u, axis=0) / (r_k * b)
    if BETA_FROM_LOGITS is not None:
        db *= b * relative_slope(b, BETA_FROM_LOGITS, HARD_BETA)
    tl.store(dbeta, db.to(dbeta.dtype.element_ty))
    dA = tl.sum(dO * u, axis=0) * s
    dk_1 = dA * q_1 + tl.sum(D * u[:, None], axis=0)
    dq_1 = dA * k_1
    if L2NORM:
        dk_1 -= k_1 * (tl.sum(k_1 * dk_1, axis=0) * r_k * r_k)
        dq_1 -= q_1 * (tl.sum(q_1 * dq_1, axis=0) * r_q * r_q)
    tl.store(dk + ik, dk_1.to(dk.dtype.element_ty), mask=ik < K)
    tl.store(dq + ik, dq_1.to(dq.dtype.element_ty), mask=ik < K)


@triton.jit
def _load_inverse_rows(inverse_rows, rows, valid, C: tl.constexpr, BF16: tl.constexpr, SPLIT: tl.constexpr):
    """What `_store_inverse_rows` (short_forward.py) stored: two bfloat16 terms, or twice the same floats."""
    j = tl.arange(0, C)[None, :]
    if BF16:
        inverse_rows = inverse_rows.to(tl.pointer_type(tl.bfloat16)) + 2 * rows[:, None] + j
        first = tl.load(inverse_rows, mask=valid[:, None], other=0.0)
        second = tl.load(inverse_rows + C, mask=valid[:, None], other=0.0)
    else:
        first = tl.load(inverse_rows + rows[:, None] + j, mask=valid[:, None], other=0.0)
        second = first
    return loads_first(first, second, SPLIT)
