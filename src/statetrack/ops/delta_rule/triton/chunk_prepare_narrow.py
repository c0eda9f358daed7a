"""`prepare` for chunks of 32 rows of float32 heads up to 32 wide, without a gate (triton_chunk_kernels.py).

One warp, two halves of 16 rows, and products of bfloat16 digits (`triton_digits.py`), so that no result but
the last leaves the registers. With raw q and k, r = 1 / ||k|| and s = scale / ||q|| by row,

    P = strictly_lower(r K K^T r)     G = P (I + diag(b) P)^-1     A = I - G diag(b)     M = lower(s Q K^T r)

and with P = [[P_0, 0], [C, P_1]] the corner of G is (I - G_1 diag(b_1)) C (I - diag(b_0) G_0).
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
    _chunk,
    _inverse_norms,
    _load_tile,
    _squares,
    _steps,
)


@triton.jit
def prepare_narrow_kernel(
    q, k, beta, g, A, M, norms, table, T, H, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, n: tl.constexpr, PACKED: tl.constexpr,
    L2NORM: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Called as `prepare_kernel` is, with a g that there is none of."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = _chunk(table, chunk, T, C, n, PACKED)
    if rows <= 0:  # packed sequences may have fewer chunks than the grid
        return
    ic = tl.arange(0, 16)
    i, j = ic[:, None], ic[None, :]
    one = tl.where(i == j, 1.0, 0.0)
    place = (chunk * H + h).to(tl.int64)
    start = (first % n).to(tl.int32)
    inputs = q + (first // n * H + h) * K, k + (first * H + h) * K, beta + first * H + h
    A += place * C * C + i * C + j
    M += place * C * C + i * C + j
    norms += place * 2 * C + ic
    k_0, q_0, b_0 = _load_half(inputs, ic, start, rows, H, K, BK, n, LOGITS, SIGMOID)
    k_1, q_1, b_1 = _load_half(inputs, 16 + ic, start, rows, H, K, BK, n, LOGITS, SIGMOID)
    k_0, q_0 = _hold(k_0, q_0, WHOLE)
    k_1, q_1 = _hold(k_1, q_1, WHOLE)
    r_0, r_1 = _inverse_norms(_squares(k_0), L2NORM), _inverse_norms(_squares(k_1), L2NORM)
    s_0 = scale * _inverse_norms(_squares(q_0), L2NORM)
    s_1 = scale * _inverse_norms(_squares(q_1), L2NORM)
    tl.store(norms, r_0)
    tl.store(norms + 16, r_1)
    tl.store(norms + C, s_0)
    tl.store(norms + C + 16, s_1)
    k_0, k_1 = _digits(k_0, 3, WHOLE), _digits(k_1, 3, WHOLE)
    q_0, q_1 = _digits(q_0, 2, WHOLE), _digits(q_1, 2, WHOLE)
    right_0, right_1 = _transposed(k_0), _transposed(k_1)
    zero = tl.zeros((16, 16), tl.float32)
    M_0 = _product(q_0, right_0, None, 2) * (s_0[:, None] * r_0[None, :])
    M_1 = _product(q_1, right_1, None, 2) * (s_1[:, None] * r_1[None, :])
    tl.store(M, tl.where(i >= j, M_0, 0.0))
    tl.store(M + 16, zero)
    tl.store(M + 16 * C, _product(q_1, right_0, None, 2) * (s_1[:, None] * r_0[None, :]))
    tl.store(M + 16 * C + 16, tl.where(i >= j, M_1, 0.0))

    P_0 = _product(k_0, right_0, None, 3) * (r_0[:, None] * r_0[None, :])
    P_1 = _product(k_1, right_1, None, 3) * (r_1[:, None] * r_1[None, :])
    corner = _product(k_0, right_1, None, 3) * (r_0[:, None] * r_1[None, :])  # on its side
    G_0 = _resolvent_of_16(tl.where(i > j, P_0, 0.0), tl.where(i < j, P_0, 0.0), b_0, 3, WHOLE)
    G_1 = _resolvent_of_16(tl.where(i > j, P_1, 0.0), tl.where(i < j, P_1, 0.0), b_1, 3, WHOLE)
    A_1 = one - G_1 * b_1[None, :]
    tl.store(A, one - G_0 * b_0[None, :])
    tl.store(A + 16, zero)
    tl.store(A + 16 * C + 16, A_1)
    left = _product(_digits(A_1, 3, WHOLE), _digits(tl.trans(corner), 3, WHOLE), None, 3)
    right = _digits(one - b_0[:, None] * G_0, 3, WHOLE)
    tl.store(A + 16 * C, -b_0[None, :] * _product(_digits(left, 3, WHOLE), right, None, 3))


@triton.jit
def _load_half(
    inputs, row, start, rows, H,
    K: tl.constexpr, BK: tl.constexpr, n: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """The tiles of k and q, and b."""
    q, k, beta = inputs
    ik = tl.arange(0, BK)
    valid, token, read = _steps(row, start + row, rows, n)
    k_c = _load_tile(k, row * (H * K), ik, valid, K, BK, False)
    q_c = _load_tile(q, token * (H * K), ik, read, K, BK, False)
    return k_c, q_c, _betas(beta, row * H, valid, LOGITS, SIGMOID)
