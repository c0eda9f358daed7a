"""The sweeps over few long sequences, two chunks at a step.

Where a sweep is alone on its multiprocessor it waits for its own results: a product with S, one with the
inverse, one with K, each needing the one before. Two chunks share these waits if the second needs nothing of
the first but the state before both. So `join` makes, for all pairs at once, what the first chunk's right side
R_1 adds to the second's errors, the corner of the inverse of both together,

    corner = -A_2 N_21 A_1        N_21 = k_in K_2 (k_out K_1)^T diag(b_1)
    E_1 = A_1 R_1                 E_2 = A_2 R_2 + corner R_1

with R_2 taken of the state before both. Backwards likewise, Z_1 = A_1^T b_1 dU_1 + corner^T b_2 dU_2. Outputs
and gradients are made by chunks and find the same A, states and errors as without pairs. After an odd number
of chunks comes one of no rows. Letters and row factors: triton_chunk_kernels.py.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.chunk_state import _factors, _program, _state
from statetrack.ops.delta_rule.triton.tiles import (
    _cut,
    _dot_float32,
    _dot_input,
    _dot_inverse,
    _dot_out,
    _dot_state,
    _load_inverse,
    _load_tile,
    _span,
    _steps,
    _store_inverse,
    _store_tile,
)


@triton.jit
def _pair(sequence, pair, chunks, h, H, C: tl.constexpr):
    """Rows of the two chunks of a pair, their places among all chunks and heads, and that of the pair.

    After an odd number of chunks the second has no rows, and the place of the first.
    """
    c, pairs, ic = 2 * pair, tl.cdiv(chunks, 2), tl.arange(0, C)
    second = tl.minimum(c + 1, chunks - 1)
    place_1 = ((sequence * chunks + c) * H + h).to(tl.int64)
    place_2 = ((sequence * chunks + second) * H + h).to(tl.int64)
    return c * C + ic, c * C + C + ic, place_1, place_2, ((sequence * pairs + pair) * H + h).to(tl.int64)


@triton.jit
def join_kernel(
    k, beta, g, A, norms, corner, T, H,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, n: tl.constexpr, GATED: tl.constexpr,
    LOGITS: tl.constexpr, SIGMOID: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = k.dtype.element_ty
    chunks = tl.cdiv(T * n, C)
    pairs = tl.cdiv(chunks, 2)
    h = tl.program_id(1)
    sequence, pair = tl.program_id(0) // pairs, tl.program_id(0) % pairs
    first, rows = _span(k, sequence, T, n, False)
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    k += (first * H + h) * K
    beta += first * H + h
    if GATED:
        g += first // n * H + h
    row_1, row_2, saved_1, saved_2, joined = _pair(sequence, pair, chunks, h, H, C)
    valid_1, token_1, _ = _steps(row_1, row_1, rows, n)
    valid_2, token_2, _ = _steps(row_2, row_2, rows, n)
    b, _, k_out, _, _ = _factors(
        beta, g, norms, saved_1, row_1, valid_1, token_1, H, C, n, GATED, LOGITS, SIGMOID
    )
    _, k_in, _, _, _ = _factors(
        beta, g, norms, saved_2, row_2, valid_2, token_2, H, C, n, GATED, LOGITS, SIGMOID
    )
    N = tl.zeros((C, C), tl.float32)
    for slice in tl.static_range(0, (K + BK - 1) // BK):
        column = slice * BK + ik
        k_1 = _load_tile(k, row_1 * (H * K), column, valid_1, K, BK, SPLIT)
        k_2 = _load_tile(k, row_2 * (H * K), column, valid_2, K, BK, SPLIT)
        if SPLIT:  # exact products
            N = tl.dot(k_2, tl.trans(k_1), N)
        else:
            N = _dot_input(k_2, tl.trans(k_1), N, False)
    N *= k_in[:, None] * (k_out * b)[None, :]
    high, low = _load_inverse(A + saved_1 * C * C, i, j, C, half, SPLIT)
    N = _dot_inverse(N, high, low, half, SPLIT)
    high, low = _load_inverse(A + saved_2 * C * C, i, j, C, half, SPLIT)
    corner += joined * C * C
    if SPLIT:
        BITS: tl.constexpr = 16 if half == tl.bfloat16 else 13
        N_high, N_low = _cut(N, BITS)
        X = tl.dot(high, N_low.to(half), tl.dot(low, N_high.to(half)))
        X = tl.dot(high, N_high.to(half), X)
    else:
        X = _dot_float32(high, N, None)
    _store_inverse(corner, -X, i, j, C, half, SPLIT)


@triton.jit
def sweep_pairs_kernel(
    k, v, beta, g, state, A, corner, norms, E, states, final, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    GATED: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr, STATE: tl.constexpr,
    FINAL: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # everything stands on its side, as in `sweep_kernel`
    half: tl.constexpr = k.dtype.element_ty
    sequence, h, iv = _program(H, V, BV)
    first, rows = _span(k, sequence, T, n, False)
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    S, inside, given = _state(state, sequence, h, iv, H, K, V, BK, STATE)
    k += (first * H + h) * K
    v += (first * H + h) * V
    E += (first * H + h) * V
    beta += first * H + h
    if GATED:
        g += first // n * H + h
    chunks = tl.cdiv(rows, C)
    pairs = tl.cdiv(chunks, 2)
    cell = iv[:, None] * K + ik[None, :]
    for pair in tl.range(0, pairs, num_stages=STAGES, disable_licm=True):
        row_1, row_2, saved_1, saved_2, joined = _pair(sequence, pair, chunks, h, H, C)
        valid_1, token_1, _ = _steps(row_1, row_1, rows, n)
        valid_2, token_2, _ = _steps(row_2, row_2, rows, n)
        b_1, in_1, out_1, _, end_1 = _factors(
            beta, g, norms, saved_1, row_1, valid_1, token_1, H, C, n, GATED, LOGITS, SIGMOID
        )
        b_2, in_2, out_2, _, end_2 = _factors(
            beta, g, norms, saved_2, row_2, valid_2, token_2, H, C, n, GATED, LOGITS, SIGMOID
        )
        k_1 = _load_tile(k, row_1 * (H * K), ik, valid_1, K, BK, SPLIT)
        k_2 = _load_tile(k, row_2 * (H * K), ik, valid_2, K, BK, SPLIT)
        v_1 = _load_tile(v, row_1 * (H * V), iv, valid_1, V, BV, SPLIT)
        v_2 = _load_tile(v, row_2 * (H * V), iv, valid_2, V, BV, SPLIT)
        high_1, low_1 = _load_inverse(A + saved_1 * C * C, i, j, C, half, SPLIT)
        high_2, low_2 = _load_inverse(A + saved_2 * C * C, i, j, C, half, SPLIT)
        high, low = _load_inverse(corner + joined * C * C, i, j, C, half, SPLIT)
        tl.store(states + saved_1 * K * V + cell, S.to(states.dtype.element_ty), mask=inside)
        R_1 = tl.trans(v_1.to(tl.float32)) - in_1[None, :] * _dot_state(S, tl.trans(k_1), None, SPLIT)
        if GATED:
            in_2 *= tl.exp(end_1)
        R_2 = tl.trans(v_2.to(tl.float32)) - in_2[None, :] * _dot_state(S, tl.trans(k_2), None, SPLIT)
        E_1 = _dot_inverse(R_1, tl.trans(high_1), tl.trans(low_1), half, SPLIT)
        E_2 = _dot_inverse(R_2, tl.trans(high_2), tl.trans(low_2), half, SPLIT)
        E_2 += _dot_inverse(R_1, tl.trans(high), tl.trans(low), half, SPLIT)
        _store_tile(E, tl.trans(E_1), row_1 * (H * V), iv, valid_1, V, BV)
        _store_tile(E, tl.trans(E_2), row_2 * (H * V), iv, valid_2, V, BV)
        if GATED:
            S *= tl.exp(end_1)
        S = _dot_state((out_1 * b_1)[None, :] * E_1, k_1, S, SPLIT)
        there = inside & (2 * pair + 1 < chunks)
        tl.store(states + saved_2 * K * V + cell, S.to(states.dtype.element_ty), mask=there)
        if GATED:
            S *= tl.exp(end_2)
        S = _dot_state((out_2 * b_2)[None, :] * E_2, k_2, S, SPLIT)
    if FINAL:
        tl.store(final + given, S, mask=inside)


@triton.jit
def sweep_pairs_back_kernel(
    k, beta, g, A, corner, norms, dfinal, dv, dstates, dstate, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    GATED: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr, FINAL: tl.constexpr,
    DSTATE: tl.constexpr, SPLIT: tl.constexpr, OUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # dv and dstates hold what `prepare_back` left there
    half: tl.constexpr = k.dtype.element_ty
    sequence, h, iv = _program(H, V, BV)
    first, rows = _span(k, sequence, T, n, False)
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    D, inside, given = _state(dfinal, sequence, h, iv, H, K, V, BK, FINAL)
    k += (first * H + h) * K
    dv += (first * H + h) * V
    beta += first * H + h
    if GATED:
        g += first // n * H + h
    chunks = tl.cdiv(rows, C)
    pairs = tl.cdiv(chunks, 2)
    cell = iv[:, None] * K + ik[None, :]
    for back in tl.range(0, pairs, num_stages=STAGES, disable_licm=True):
        pair = pairs - 1 - back
        row_1, row_2, saved_1, saved_2, joined = _pair(sequence, pair, chunks, h, H, C)
        there = inside & (2 * pair + 1 < chunks)
        valid_1, token_1, _ = _steps(row_1, row_1, rows, n)
        valid_2, token_2, _ = _steps(row_2, row_2, rows, n)
        b_1, in_1, out_1, _, end_1 = _factors(
            beta, g, norms, saved_1, row_1, valid_1, token_1, H, C, n, GATED, LOGITS, SIGMOID
        )
        b_2, in_2, out_2, _, end_2 = _factors(
            beta, g, norms, saved_2, row_2, valid_2, token_2, H, C, n, GATED, LOGITS, SIGMOID
        )
        sent_1 = tl.load(dstates + saved_1 * K * V + cell, mask=inside, other=0.0)
        sent_2 = tl.load(dstates + saved_2 * K * V + cell, mask=there, other=0.0)
        dU_1 = tl.trans(_load_tile(dv, row_1 * (H * V), iv, valid_1, V, BV, False))
        dU_2 = tl.trans(_load_tile(dv, row_2 * (H * V), iv, valid_2, V, BV, False))
        k_1 = _load_tile(k, row_1 * (H * K), ik, valid_1, K, BK, SPLIT)
        k_2 = _load_tile(k, row_2 * (H * K), ik, valid_2, K, BK, SPLIT)
        high_1, low_1 = _load_inverse(A + saved_1 * C * C, i, j, C, half, SPLIT)
        high_2, low_2 = _load_inverse(A + saved_2 * C * C, i, j, C, half, SPLIT)
        high, low = _load_inverse(corner + joined * C * C, i, j, C, half, SPLIT)
        tl.store(dstates + saved_2 * K * V + cell, D.to(dstates.dtype.element_ty), mask=there)
        dU_2 += out_2[None, :] * _dot_state(D, tl.trans(k_2), None, SPLIT)
        DK_1 = _dot_state(D, tl.trans(k_1), None, SPLIT)
        if GATED:
            DK_1 *= tl.exp(end_2)
            D *= tl.exp(end_2)
        dU_1 += out_1[None, :] * _dot_out(sent_2, tl.trans(k_1), DK_1, half, SPLIT, OUT)
        D += sent_2.to(tl.float32)
        Z_2 = _dot_inverse(b_2[None, :] * dU_2, high_2, low_2, half, SPLIT)
        Z_1 = _dot_inverse(b_1[None, :] * dU_1, high_1, low_1, half, SPLIT)
        Z_1 += _dot_inverse(b_2[None, :] * dU_2, high, low, half, SPLIT)
        _store_tile(dv, tl.trans(Z_2), row_2 * (H * V), iv, valid_2, V, BV)
        _store_tile(dv, tl.trans(Z_1), row_1 * (H * V), iv, valid_1, V, BV)
        D = _dot_state(-in_2[None, :] * Z_2, k_2, D, SPLIT)
        tl.store(dstates + saved_1 * K * V + cell, D.to(dstates.dtype.element_ty), mask=inside)
        if GATED:
            D *= tl.exp(end_1)
        D += sent_1.to(tl.float32)
        D = _dot_state(-in_1[None, :] * Z_1, k_1, D, SPLIT)
    if DSTATE:
        tl.store(dstate + given, D, mask=inside)
