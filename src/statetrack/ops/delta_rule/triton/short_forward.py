"""The delta rule over sequences of up to 128 steps, forward: one Triton kernel.

Per chunk of 16 steps, with state S entering, r_k = 1 / ||k||, r_q = 1 / ||q|| and s = scale r_q of every row
(docs/internals/delta_rule.md, "Short sequences"):

    P = strictly_lower(r_k K K^T r_k)             G = P (I + diag(b) P)^-1          A = lower(Q K^T)
    E = (I - G diag(b)) (V - r_k K S)             U = r_k b E
    O = s (Q S + A U)                             S <- S + K^T U

Grid: one program of one warp per sequence and head; thousands of them fill the GPU. There is no gate and no
initial state: those take the kernels for long sequences (chunk_forward.py).

Registers hold S (BV x BK) for the whole sequence and all tiles of a chunk. R = V - r_k K S, U, O and S are
transposed, (columns of v) x (rows or columns of k): the result of one product then is the left factor of the
next as it lies in the registers (split_bf16.py). Shared memory serves transposes of loaded tiles only. Device
memory gets the outputs and what the backward reads: rows of I - diag(b) G, r_k, r_q and U.

UNROLLED chunks have no loop: no state enters the first, and the last makes none unless asked for. With
FIRST_STEP_ALONE a first step, which would make one more chunk of 16 rows out of a single one, is done apart.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.split_bf16 import (
    dot_terms,
    loads_first,
    resolvent_16x16,
    split,
    transpose_terms,
)
from statetrack.ops.delta_rule.triton.tiles import (
    inverse_norm,
    load_beta,
    load_tile,
    row_tokens,
    sequence_rows,
    squared_norm,
    store_tile,
)


@triton.jit(do_not_specialize=["T"])
def short_forward_kernel(
    q, k, v, beta, inverse_rows, inverse_norms, U, out, final_state, cu_seqlens, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HOUSEHOLDERS: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr,
    HARD_BETA: tl.constexpr,
    SAVE: tl.constexpr, OUTPUT_FINAL_STATE: tl.constexpr, BF16: tl.constexpr, SPLIT: tl.constexpr,
    UNROLLED: tl.constexpr, FIRST_STEP_ALONE: tl.constexpr,
):  # fmt: skip
    sequence, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, rows = sequence_rows(cu_seqlens, sequence, T, HOUSEHOLDERS, PACKED)
    k += (first * H + h) * K
    v += (first * H + h) * V
    U += (first * H + h) * V
    inverse_rows += (first * H + h) * C
    inverse_norms += (first * H + h) * 2
    beta += first * H + h
    q += (first // HOUSEHOLDERS * H + h) * K
    out += (first // HOUSEHOLDERS * H + h) * V
    ik, iv = tl.arange(0, BK), tl.arange(0, BV)
    S = tl.zeros((BV, BK), tl.float32)
    inputs, results, numbers = (q, k, v, beta), (inverse_rows, inverse_norms, U, out), (rows, H, scale)
    if UNROLLED > 0:
        # the loads of all chunks are issued before the first product waits for any of them
        loaded, tiles = (), ()
        for c in tl.static_range(UNROLLED):
            chunk = _load_chunk(
                FIRST_STEP_ALONE + c * C, inputs, rows, H, K, V, BK, BV, C, HOUSEHOLDERS, BETA_FROM_LOGITS,
                HARD_BETA, BF16
            )  # fmt: skip
            loaded += (chunk,)
        for c in tl.static_range(UNROLLED):
            tiles += (_loads_first(loaded[c], SPLIT),)
        if FIRST_STEP_ALONE:
            S = _first_step(
                inputs, results, scale, K, V, BK, BV, L2NORM, BETA_FROM_LOGITS, HARD_BETA, SAVE, BF16, SPLIT
            )
        for c in tl.static_range(UNROLLED):
            S = _forward_chunk(
                S, tiles[c], FIRST_STEP_ALONE + c * C, results, numbers, K, V, BK, BV, C, HOUSEHOLDERS,
                L2NORM, SAVE, BF16, SPLIT, FIRST_STEP_ALONE + c > 0, OUTPUT_FINAL_STATE or c < UNROLLED - 1,
            )  # fmt: skip
    else:
        for start in tl.range(0, rows, C, num_stages=1, disable_licm=True):
            tiles = _load_chunk(
                start, inputs, rows, H, K, V, BK, BV, C, HOUSEHOLDERS, BETA_FROM_LOGITS, HARD_BETA, BF16
            )
            tiles = _loads_first(tiles, SPLIT)
            S = _forward_chunk(
                S, tiles, start, results, numbers, K, V, BK, BV, C, HOUSEHOLDERS, L2NORM, SAVE, BF16, SPLIT,
                True, True,
            )  # fmt: skip
    if OUTPUT_FINAL_STATE:
        final_state += (sequence * H + h).to(tl.int64) * K * V
        inside = (iv < V)[:, None] & (ik < K)[None, :]
        tl.store(final_state + ik[None, :] * V + iv[:, None], S, mask=inside)


@triton.jit
def _load_chunk(
    start, inputs, rows, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HOUSEHOLDERS: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """The tiles of k, q and v, and b."""
    q, k, v, beta = inputs
    ik, iv = tl.arange(0, BK), tl.arange(0, BV)
    row = start + tl.arange(0, C)
    valid, token, read = row_tokens(row, row, rows, HOUSEHOLDERS)
    k_c = load_tile(k, row * (H * K), ik, valid, K, BK, BF16)
    q_c = load_tile(q, token * (H * K), ik, read, K, BK, BF16)
    v_c = load_tile(v, row * (H * V), iv, valid, V, BV, BF16)
    return k_c, q_c, v_c, load_beta(beta, row * H, valid, BETA_FROM_LOGITS, HARD_BETA)


@triton.jit
def _loads_first(tiles, SPLIT: tl.constexpr):
    """The same tiles, none of which is used before the loads of all are issued."""
    k_c, q_c, v_c, b = tiles
    k_c, q_c = loads_first(k_c, q_c, SPLIT)
    v_c, q_c = loads_first(v_c, q_c, SPLIT)
    return k_c, q_c, v_c, b


@triton.jit
def _forward_chunk(
    S, tiles, start, results, numbers,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HOUSEHOLDERS: tl.constexpr, L2NORM: tl.constexpr, SAVE: tl.constexpr, BF16: tl.constexpr,
    SPLIT: tl.constexpr, STATE_ENTERS: tl.constexpr, STATE_LEAVES: tl.constexpr,
):  # fmt: skip
    """One chunk: store its outputs and return the state that leaves it.

    STATE_ENTERS unless S is known to be zero, STATE_LEAVES unless nothing reads the returned state.
    """
    inverse_rows, inverse_norms, U, out = results
    rows, H, scale = numbers
    STATE_TERMS: tl.constexpr = 2 if BF16 else 3  # of everything carried along time
    OUT_TERMS: tl.constexpr = STATE_TERMS - 1  # of products whose results are not carried on
    ic, iv = tl.arange(0, C), tl.arange(0, BV)
    i, j = ic[:, None], ic[None, :]
    row = start + ic
    valid, token, read = row_tokens(row, row, rows, HOUSEHOLDERS)
    k_c, q_c, v_c, b = tiles
    r_k, r_q = inverse_norm(squared_norm(k_c), L2NORM), inverse_norm(squared_norm(q_c), L2NORM)
    k_terms, q_terms = split(k_c, STATE_TERMS, SPLIT), split(q_c, OUT_TERMS, SPLIT)
    k_t = transpose_terms(k_terms)
    QK = dot_terms(q_terms, k_t, None, OUT_TERMS)
    P = dot_terms(k_terms, k_t, None, STATE_TERMS) * (r_k[:, None] * r_k[None, :])
    G = resolvent_16x16(tl.where(i > j, P, 0.0), tl.where(i < j, P, 0.0), b, STATE_TERMS, SPLIT)

    one = tl.where(i == j, 1.0, 0.0)
    R, o = tl.trans(v_c).to(tl.float32), tl.zeros((BV, C), tl.float32)
    if STATE_ENTERS:
        S_terms = split(S, STATE_TERMS, SPLIT)
        R -= r_k[None, :] * dot_terms(S_terms, k_t, None, STATE_TERMS)
        o = dot_terms(S_terms, transpose_terms(q_terms), o, OUT_TERMS)
    inverse = split(tl.trans(one - G * b[None, :]), STATE_TERMS, SPLIT)
    U_c = (r_k * b)[None, :] * dot_terms(split(R, STATE_TERMS, SPLIT), inverse, None, STATE_TERMS)
    U_terms = split(U_c, STATE_TERMS, SPLIT)
    if SAVE:
        _store_inverse_rows(inverse_rows, one - G * b[:, None], row * (H * C), valid, C, BF16)
        tl.store(inverse_norms + row * (H * 2), r_k, mask=valid)
        tl.store(inverse_norms + row * (H * 2) + 1, r_q, mask=valid)
        U_saved = tl.trans(U_terms[0]) if BF16 else tl.trans(U_c)
        store_tile(U, U_saved, row * (H * V), iv, valid, V, BV)
    A = split(tl.trans(tl.where(i >= j, QK, 0.0)), OUT_TERMS, SPLIT)
    o = dot_terms(U_terms, A, o, OUT_TERMS) * (scale * r_q)[None, :]
    store_tile(out, tl.trans(o.to(out.dtype.element_ty)), token * (H * V), iv, read, V, BV)
    if STATE_LEAVES:
        S = dot_terms(U_terms, k_terms, S, STATE_TERMS)
    return S


@triton.jit
def _first_step(
    inputs, results, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L2NORM: tl.constexpr,
    BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr, SAVE: tl.constexpr, BF16: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """The first step alone, as the first row of tiles that are zero otherwise: U = r_k b V and S = K^T U."""
    q, k, v, beta = inputs
    _, inverse_norms, U, out = results
    STATE_TERMS: tl.constexpr = 2 if BF16 else 3
    ic, ik, iv = tl.arange(0, 16), tl.arange(0, BK), tl.arange(0, BV)
    valid = ic == 0
    k_c = load_tile(k, ic * 0, ik, valid, K, BK, BF16)
    q_c = load_tile(q, ic * 0, ik, valid, K, BK, BF16).to(tl.float32)
    v_c = load_tile(v, ic * 0, iv, valid, V, BV, BF16)
    b = load_beta(beta, ic * 0, valid, BETA_FROM_LOGITS, HARD_BETA)
    r_k, r_q = inverse_norm(squared_norm(k_c), L2NORM), inverse_norm(squared_norm(q_c), L2NORM)
    U_c = (r_k * b)[:, None] * v_c.to(tl.float32)
    o = (scale * r_q * tl.sum(q_c * k_c.to(tl.float32), axis=1))[:, None] * U_c
    store_tile(out, o, ic * 0, iv, valid, V, BV)
    if SAVE:
        store_tile(U, U_c, ic * 0, iv, valid, V, BV)
        tl.store(inverse_norms + ic * 0, r_k, mask=valid)
        tl.store(inverse_norms + ic * 0 + 1, r_q, mask=valid)
    S = tl.zeros((BV, BK), tl.float32)
    U_terms = split(tl.trans(U_c), STATE_TERMS, SPLIT)
    return dot_terms(U_terms, split(k_c, STATE_TERMS, SPLIT), S, STATE_TERMS)


@triton.jit
def _store_inverse_rows(inverse_rows, tile, rows, valid, C: tl.constexpr, BF16: tl.constexpr):
    """Per row C floats, or with BF16 their C first and then their C second terms."""
    j = tl.arange(0, C)[None, :]
    if BF16:
        inverse_rows = inverse_rows.to(tl.pointer_type(tl.bfloat16)) + 2 * rows[:, None] + j
        first, second = split(tile, 2, "bf16")
        tl.store(inverse_rows, first, mask=valid[:, None])
        tl.store(inverse_rows + C, second, mask=valid[:, None])
    else:
        tl.store(inverse_rows + rows[:, None] + j, tile, mask=valid[:, None])
