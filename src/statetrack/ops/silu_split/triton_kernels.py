"""The split and its SiLU in two Triton kernels, each one pass over its tensors. Arithmetic is float32.

A program has a tile of ROWS rows and BN columns of x, whose rows are N long: Q, K, V and R columns of the
four parts, then some that nobody reads.
"""

import triton
import triton.language as tl


@triton.jit
def forward_kernel(
    x, q, k, v, r, rows,
    N: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    here = (row < rows)[:, None]
    raw = tl.load(x + row[:, None] * N + n[None, :], mask=here & (n < N)[None, :], other=0.0)
    value = raw.to(tl.float32)
    active = (value / (1.0 + tl.exp(-value))).to(q.dtype.element_ty)
    tl.store(q + row[:, None] * Q + n[None, :], active, mask=here & (n < Q)[None, :])
    n -= Q
    tl.store(k + row[:, None] * K + n[None, :], active, mask=here & ((n >= 0) & (n < K))[None, :])
    n -= K
    tl.store(v + row[:, None] * V + n[None, :], active, mask=here & ((n >= 0) & (n < V))[None, :])
    n -= V
    tl.store(r + row[:, None] * R + n[None, :], raw, mask=here & ((n >= 0) & (n < R))[None, :])


@triton.jit
def backward_kernel(
    x, dq, dk, dv, dr, dx, rows,
    N: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    here = (row < rows)[:, None]
    where = row[:, None] * N + n[None, :]
    value = tl.load(x + where, mask=here & (n < Q + K + V)[None, :], other=0.0).to(tl.float32)
    g = tl.load(dq + row[:, None] * Q + n[None, :], mask=here & (n < Q)[None, :], other=0.0)
    m = n - Q
    g += tl.load(dk + row[:, None] * K + m[None, :], mask=here & ((m >= 0) & (m < K))[None, :], other=0.0)
    m -= K
    g += tl.load(dv + row[:, None] * V + m[None, :], mask=here & ((m >= 0) & (m < V))[None, :], other=0.0)
    m -= V
    rest = tl.load(dr + row[:, None] * R + m[None, :], mask=here & ((m >= 0) & (m < R))[None, :], other=0.0)
    s = 1.0 / (1.0 + tl.exp(-value))
    total = g.to(tl.float32) * s * (1.0 + value * (1.0 - s)) + rest.to(tl.float32)
    tl.store(dx + where, total.to(dx.dtype.element_ty), mask=here & (n < N)[None, :])
