"""`prepare` (chunk_forward.py) for chunks of 32 rows of float32 heads up to 32 wide, without a gate.

With r = 1 / ||k|| and s = scale / ||q|| of every row (docs/internals/delta_rule.md, "Chunks"):

    P = strictly_lower(r K K^T r)     G = P (I + diag(b) P)^-1     inverse = I - G diag(b)
    A = lower(s Q K^T r)

and with P = [[P_0, 0], [C, P_1]] the corner of G is (I - G_1 diag(b_1)) C (I - diag(b_0) G_0).

Grid: (chunks, heads), one warp each. All tiles stay in registers, as two halves of 16 rows (0 and 1) and
products of bfloat16 terms (split_bf16.py): nothing but the results goes to device memory, while
`unit_lower_inverse` passes parts of the inverse through it.
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
    chunk_rows,
    inverse_norm,
    load_beta,
    load_tile,
    row_tokens,
    squared_norm,
)


@triton.jit
def prepare_narrow_kernel(
    q, k, beta, g, inverse, A, inverse_norms, chunk_table, T, H, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, HOUSEHOLDERS: tl.constexpr, PACKED: tl.constexpr,
    L2NORM: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Same arguments as `prepare_kernel`; g is not read."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, HOUSEHOLDERS, PACKED)
    if rows <= 0:  # packed sequences may have fewer chunks than the grid
        return
    ic = tl.arange(0, 16)
    i, j = ic[:, None], ic[None, :]
    one = tl.where(i == j, 1.0, 0.0)
    slot = (chunk * H + h).to(tl.int64)
    start = (first % HOUSEHOLDERS).to(tl.int32)
    inputs = q + (first // HOUSEHOLDERS * H + h) * K, k + (first * H + h) * K, beta + first * H + h
    inverse += slot * C * C + i * C + j
    A += slot * C * C + i * C + j
    inverse_norms += slot * 2 * C + ic
    k_0, q_0, b_0 = _load_half(inputs, ic, start, rows, H, K, BK, HOUSEHOLDERS, BETA_FROM_LOGITS, HARD_BETA)
    k_1, q_1, b_1 = _load_half(
        inputs, 16 + ic, start, rows, H, K, BK, HOUSEHOLDERS, BETA_FROM_LOGITS, HARD_BETA
    )
    k_0, q_0 = loads_first(k_0, q_0, SPLIT)
    k_1, q_1 = loads_first(k_1, q_1, SPLIT)
    r_0, r_1 = inverse_norm(squared_norm(k_0), L2NORM), inverse_norm(squared_norm(k_1), L2NORM)
    s_0 = scale * inverse_norm(squared_norm(q_0), L2NORM)
    s_1 = scale * inverse_norm(squared_norm(q_1), L2NORM)
    tl.store(inverse_norms, r_0)
    tl.store(inverse_norms + 16, r_1)
    tl.store(inverse_norms + C, s_0)
    tl.store(inverse_norms + C + 16, s_1)
    k_0, k_1 = split(k_0, 3, SPLIT), split(k_1, 3, SPLIT)
    q_0, q_1 = split(q_0, 2, SPLIT), split(q_1, 2, SPLIT)
    k_0_t, k_1_t = transpose_terms(k_0), transpose_terms(k_1)
    zero = tl.zeros((16, 16), tl.float32)
    A_0 = dot_terms(q_0, k_0_t, None, 2) * (s_0[:, None] * r_0[None, :])
    A_1 = dot_terms(q_1, k_1_t, None, 2) * (s_1[:, None] * r_1[None, :])
    tl.store(A, tl.where(i >= j, A_0, 0.0))
    tl.store(A + 16, zero)
    tl.store(A + 16 * C, dot_terms(q_1, k_0_t, None, 2) * (s_1[:, None] * r_0[None, :]))
    tl.store(A + 16 * C + 16, tl.where(i >= j, A_1, 0.0))

    P_0 = dot_terms(k_0, k_0_t, None, 3) * (r_0[:, None] * r_0[None, :])
    P_1 = dot_terms(k_1, k_1_t, None, 3) * (r_1[:, None] * r_1[None, :])
    corner_t = dot_terms(k_0, k_1_t, None, 3) * (r_0[:, None] * r_1[None, :])
    G_0 = resolvent_16x16(tl.where(i > j, P_0, 0.0), tl.where(i < j, P_0, 0.0), b_0, 3, SPLIT)
    G_1 = resolvent_16x16(tl.where(i > j, P_1, 0.0), tl.where(i < j, P_1, 0.0), b_1, 3, SPLIT)
    inverse_1 = one - G_1 * b_1[None, :]
    tl.store(inverse, one - G_0 * b_0[None, :])
    tl.store(inverse + 16, zero)
    tl.store(inverse + 16 * C + 16, inverse_1)
    inverse_1_terms = split(inverse_1, 3, SPLIT)
    left = dot_terms(inverse_1_terms, split(tl.trans(corner_t), 3, SPLIT), None, 3)
    right = split(one - b_0[:, None] * G_0, 3, SPLIT)
    tl.store(inverse + 16 * C, -b_0[None, :] * dot_terms(split(left, 3, SPLIT), right, None, 3))


@triton.jit
def _load_half(
    inputs, row, start, rows, H,
    K: tl.constexpr, BK: tl.constexpr, HOUSEHOLDERS: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr,
    HARD_BETA: tl.constexpr,
):  # fmt: skip
    """The tiles of k and q, and b."""
    q, k, beta = inputs
    ik = tl.arange(0, BK)
    valid, token, read = row_tokens(row, start + row, rows, HOUSEHOLDERS)
    k_c = load_tile(k, row * (H * K), ik, valid, K, BK, False)
    q_c = load_tile(q, token * (H * K), ik, read, K, BK, False)
    return k_c, q_c, load_beta(beta, row * H, valid, BETA_FROM_LOGITS, HARD_BETA)
