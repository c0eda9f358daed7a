"""The delta rule over sequences of up to 128 steps, forward: one Triton kernel.

One warp does a whole sequence and head, in chunks of 16 steps, with the state in its registers. Thousands of
them fill the GPU, and nothing but the results and what the backward reads goes to memory. No gate and no
first state: those take the kernels for long sequences, `triton_chunk_kernels.py`.

In the letters of docs/delta_rule.md, with raw q and k, r = 1 / ||k|| and s = scale / ||q|| by row:

    G = P (I + diag(b) P)^-1,  P = strictly_lower(r K K^T r)
    E = (I - G diag(b)) (V - r K S)               U = r b E
    O = s (Q S + lower(Q K^T) U)                  S <- S + K^T U

What is carried along is on its side, (columns of v, rows) and (columns of v, columns of k), which makes it
the left factor of the next product as it lies in the registers: see `triton_digits.py`. The backward,
triton_back_kernels.py, reads I - diag(b) G, 1 / ||k||, 1 / ||q|| and U.

A sequence of few chunks is unrolled (CHUNKS of them): no state enters the first, and nobody reads the one
that leaves the last. A first step (LEAD) that would make a chunk of 16 out of one row is done on its own.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.split_bf16 import (
    _digits,
    _hold,
    _product,
    _resolvent_of_16,
    _transposed,
)
from statetrack.ops.delta_rule.triton.tiles import (
    _betas,
    _inverse_norms,
    _load_tile,
    _span,
    _squares,
    _steps,
    _store_tile,
)


@triton.jit(do_not_specialize=["T"])
def fused_kernel(
    q, k, v, beta, X, norms, U, out, final, cu_seqlens, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    PACKED: tl.constexpr, L2NORM: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr,
    SAVE: tl.constexpr, FINAL: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
    CHUNKS: tl.constexpr, LEAD: tl.constexpr,
):  # fmt: skip
    sequence, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, rows = _span(cu_seqlens, sequence, T, n, PACKED)
    k += (first * H + h) * K
    v += (first * H + h) * V
    U += (first * H + h) * V
    X += (first * H + h) * C
    norms += (first * H + h) * 2
    beta += first * H + h
    q += (first // n * H + h) * K
    out += (first // n * H + h) * V
    ik, iv = tl.arange(0, BK), tl.arange(0, BV)
    S = tl.zeros((BV, BK), tl.float32)
    inputs, results, numbers = (q, k, v, beta), (X, norms, U, out), (rows, H, scale)
    if CHUNKS > 0:
        tiles, held = (), ()
        for c in tl.static_range(CHUNKS):
            loaded = _load_chunk(LEAD + c * C, inputs, rows, H, K, V, BK, BV, C, n, LOGITS, SIGMOID, SPLIT)
            tiles += (loaded,)
        for c in tl.static_range(CHUNKS):
            held += (_hold_chunk(tiles[c], WHOLE),)
        if LEAD:
            S = _first_step(inputs, results, scale, K, V, BK, BV, L2NORM, LOGITS, SIGMOID, SAVE, SPLIT, WHOLE)
        for c in tl.static_range(CHUNKS):
            S = _forward_chunk(
                S, held[c], LEAD + c * C, results, numbers, K, V, BK, BV, C, n, L2NORM, SAVE, SPLIT, WHOLE,
                LEAD + c > 0, FINAL or c < CHUNKS - 1,
            )  # fmt: skip
    else:
        for start in tl.range(0, rows, C, num_stages=1, disable_licm=True):
            tiles = _load_chunk(start, inputs, rows, H, K, V, BK, BV, C, n, LOGITS, SIGMOID, SPLIT)
            tiles = _hold_chunk(tiles, WHOLE)
            S = _forward_chunk(
                S, tiles, start, results, numbers, K, V, BK, BV, C, n, L2NORM, SAVE, SPLIT, WHOLE, True, True
            )
    if FINAL:
        final += (sequence * H + h).to(tl.int64) * K * V
        inside = (iv < V)[:, None] & (ik < K)[None, :]
        tl.store(final + ik[None, :] * V + iv[:, None], S, mask=inside)


@triton.jit
def _load_chunk(
    start, inputs, rows, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    LOGITS: tl.constexpr, SIGMOID: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The tiles of k, q and v, and b."""
    q, k, v, beta = inputs
    ik, iv = tl.arange(0, BK), tl.arange(0, BV)
    row = start + tl.arange(0, C)
    valid, token, read = _steps(row, row, rows, n)
    k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, SPLIT)
    q_c = _load_tile(q, token * (H * K), ik, read, K, BK, SPLIT)
    v_c = _load_tile(v, row * (H * V), iv, valid, V, BV, SPLIT)
    return k_c, q_c, v_c, _betas(beta, row * H, valid, LOGITS, SIGMOID)


@triton.jit
def _hold_chunk(tiles, WHOLE: tl.constexpr):
    k_c, q_c, v_c, b = tiles
    k_c, q_c = _hold(k_c, q_c, WHOLE)
    v_c, q_c = _hold(v_c, q_c, WHOLE)
    return k_c, q_c, v_c, b


@triton.jit
def _forward_chunk(
    S, tiles, start, results, numbers,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, n: tl.constexpr,
    L2NORM: tl.constexpr, SAVE: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
    ENTERS: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """One chunk; ENTERS if S may be other than zero, LEAVES if someone wants the next."""
    X, norms, U, out = results
    rows, H, scale = numbers
    CARRIED: tl.constexpr = 2 if SPLIT else 3  # digits of what is carried along time
    OUT: tl.constexpr = CARRIED - 1  # and of products whose results are not
    ic, iv = tl.arange(0, C), tl.arange(0, BV)
    i, j = ic[:, None], ic[None, :]
    row = start + ic
    valid, token, read = _steps(row, row, rows, n)
    k_c, q_c, v_c, b = tiles
    r, unit = _inverse_norms(_squares(k_c), L2NORM), _inverse_norms(_squares(q_c), L2NORM)
    k_digits, q_digits = _digits(k_c, CARRIED, WHOLE), _digits(q_c, OUT, WHOLE)
    k_right = _transposed(k_digits)
    QK = _product(q_digits, k_right, None, OUT)
    P = _product(k_digits, k_right, None, CARRIED) * (r[:, None] * r[None, :])
    G = _resolvent_of_16(tl.where(i > j, P, 0.0), tl.where(i < j, P, 0.0), b, CARRIED, WHOLE)

    one = tl.where(i == j, 1.0, 0.0)
    R, o = tl.trans(v_c).to(tl.float32), tl.zeros((BV, C), tl.float32)
    if ENTERS:
        S_digits = _digits(S, CARRIED, WHOLE)
        R -= r[None, :] * _product(S_digits, k_right, None, CARRIED)
        o = _product(S_digits, _transposed(q_digits), o, OUT)
    inverse = _digits(tl.trans(one - G * b[None, :]), CARRIED, WHOLE)
    U_c = (r * b)[None, :] * _product(_digits(R, CARRIED, WHOLE), inverse, None, CARRIED)
    U_digits = _digits(U_c, CARRIED, WHOLE)
    if SAVE:
        _store_inverse(X, one - G * b[:, None], row * (H * C), valid, C, SPLIT)
        tl.store(norms + row * (H * 2), r, mask=valid)
        tl.store(norms + row * (H * 2) + 1, unit, mask=valid)
        kept = tl.trans(U_digits[0]) if SPLIT else tl.trans(U_c)
        _store_tile(U, kept, row * (H * V), iv, valid, V, BV)
    M = _digits(tl.trans(tl.where(i >= j, QK, 0.0)), OUT, WHOLE)
    o = _product(U_digits, M, o, OUT) * (scale * unit)[None, :]
    _store_tile(out, tl.trans(o.to(out.dtype.element_ty)), token * (H * V), iv, read, V, BV)
    if LEAVES:
        S = _product(U_digits, k_digits, S, CARRIED)
    return S


@triton.jit
def _first_step(
    inputs, results, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L2NORM: tl.constexpr,
    LOGITS: tl.constexpr, SIGMOID: tl.constexpr, SAVE: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The first step on its own, as the first row of tiles that are else zero: U = r b V and S = U K^T."""
    q, k, v, beta = inputs
    _, norms, U, out = results
    CARRIED: tl.constexpr = 2 if SPLIT else 3
    ic, ik, iv = tl.arange(0, 16), tl.arange(0, BK), tl.arange(0, BV)
    valid = ic == 0
    k_c = _load_tile(k, ic * 0, ik, valid, K, BK, SPLIT)
    q_c = _load_tile(q, ic * 0, ik, valid, K, BK, SPLIT).to(tl.float32)
    v_c = _load_tile(v, ic * 0, iv, valid, V, BV, SPLIT)
    b = _betas(beta, ic * 0, valid, LOGITS, SIGMOID)
    r, unit = _inverse_norms(_squares(k_c), L2NORM), _inverse_norms(_squares(q_c), L2NORM)
    U_c = (r * b)[:, None] * v_c.to(tl.float32)
    o = (scale * unit * tl.sum(q_c * k_c.to(tl.float32), axis=1))[:, None] * U_c
    _store_tile(out, o, ic * 0, iv, valid, V, BV)
    if SAVE:
        _store_tile(U, U_c, ic * 0, iv, valid, V, BV)
        tl.store(norms + ic * 0, r, mask=valid)
        tl.store(norms + ic * 0 + 1, unit, mask=valid)
    S = tl.zeros((BV, BK), tl.float32)
    return _product(_digits(tl.trans(U_c), CARRIED, WHOLE), _digits(k_c, CARRIED, WHOLE), S, CARRIED)


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
