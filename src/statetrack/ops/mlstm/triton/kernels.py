"""The mLSTM of short sequences in one Triton kernel each way: a program takes one sequence of one head.

With F_t the sum of log sigmoid(f) up to t, and no state that enters (equations: `mlstm_chunked`),

    log D_ts = F_t - F_s + i_s  (s <= t)          m_t = max_s log D_ts          D = exp(log D - m)
    A = Q K^T / sqrt(K) o D                       d_t = max(|sum_s A_ts|, exp(-m_t)) + EPS
    h = A V / d                                   C = sum_s D_Ts k_s v_s^T / sqrt(K), n likewise, at the end

Backward, from what went in: dN = dh / d, dn_t = -sign(A 1) (dh . h) / d where |A 1| is the larger, else 0;

    dA = dN V^T + dn        dV = A^T dN        dQ = (dA o D) K / sqrt(K)        dK = (dA o D)^T Q / sqrt(K)
    dlog D = dA o A, and -(dh . h) EPS / d at the largest of each row: m cancels in h but for EPS
    di_s = sum_t dlog D_ts                        dlog sigmoid(f)_r = sum_{t >= r, s < r} dlog D_ts

F is summed in float64: where forget gates close it is in the thousands, and its differences are of order 1.
Products of bfloat16 inputs are exact, of one with a float32 tile good to sixteen bits; of float32 inputs they
are float32 (`delta_rule.triton.tiles`).
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.tiles import dot_bf16x3, dot_state, dot_tf32x3
from statetrack.ops.mlstm import reference
from statetrack.ops.slstm.triton.kernels import log_sigmoid, sigmoid

LOWEST_LOG = tl.constexpr(reference.LOWEST_LOG)


@triton.jit
def _load_rows(x, b, head, t, T, H, W: tl.constexpr, BW: tl.constexpr, PARTS: tl.constexpr):
    """The steps of one sequence and head of x (B, T, H, W); zero past the end and the width.

    x may be one of PARTS parts of wider rows, (B, T, PARTS, H, W).
    """
    w = tl.arange(0, BW)[None, :]
    at = ((b * T + t[:, None].to(tl.int64)) * H * PARTS + head) * W + w
    return tl.load(x + at, mask=(t[:, None] < T) & (w < W), other=0.0)


@triton.jit
def _store_rows(x, values, b, head, t, T, H, W: tl.constexpr, BW: tl.constexpr, PARTS: tl.constexpr):
    w = tl.arange(0, BW)[None, :]
    at = ((b * T + t[:, None].to(tl.int64)) * H * PARTS + head) * W + w
    tl.store(x + at, values.to(x.dtype.element_ty), mask=(t[:, None] < T) & (w < W))


@triton.jit
def _decays(i, f, first, t, T, H):
    """f; m and the step s that it comes from; D in float32, zero where s > t and past the end."""
    inside = t < T
    at = first + t.to(tl.int64) * H
    write = tl.load(i + at, mask=inside, other=0.0).to(tl.float64)
    forget = tl.load(f + at, mask=inside, other=0.0).to(tl.float32)
    log_f = log_sigmoid(forget)
    log_f = tl.where(log_f < LOWEST_LOG, LOWEST_LOG, log_f)  # NaN stays
    F = tl.cumsum(log_f.to(tl.float64), 0)
    reaches = (t[None, :] <= t[:, None]) & inside[:, None]
    log_D = tl.where(reaches, F[:, None] - F[None, :] + write[None, :], -float("inf"))
    m = tl.where(inside, tl.max(log_D, 1), 0.0)
    return forget, m.to(tl.float32), tl.argmax(log_D, 1), tl.exp((log_D - m[:, None]).to(tl.float32))


@triton.jit
def _normaliser(A, m, EPS: tl.constexpr):
    """A 1, and max(|A 1|, exp(-m)) + EPS; below exp(-80) outputs vanish anyway."""
    n = tl.sum(A, 1)
    least = tl.exp(-tl.maximum(m, -80.0))
    return n, least, tl.maximum(tl.abs(n), least) + EPS


@triton.jit
def _decayed_scores(queries, keys, D, scale, BF16: tl.constexpr):
    """A = Q K^T / sqrt(K) o D."""
    if BF16:
        products = tl.dot(queries, tl.trans(keys))
    else:
        products = dot_tf32x3(queries, tl.trans(keys), None)
    return products * scale * D


@triton.jit
def forward_kernel(
    q, k, v, i, f, h, C, n, m, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PARTS: tl.constexpr, EPS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """h (B, T, H, V) and the last C (B, H, K, V), n (B, H, K), m (B, H). Grid: (B H,)."""
    pair = tl.program_id(0).to(tl.int64)
    b, head = pair // H, pair % H
    first = b * T * H + head
    t = tl.arange(0, BT)
    _, m_t, _, D = _decays(i, f, first, t, T, H)
    queries = _load_rows(q, b, head, t, T, H, K, BK, PARTS)
    keys = _load_rows(k, b, head, t, T, H, K, BK, PARTS)
    values = _load_rows(v, b, head, t, T, H, V, BV, PARTS)
    A = _decayed_scores(queries, keys, D, scale, BF16)
    _, _, d = _normaliser(A, m_t, EPS)
    _store_rows(h, dot_state(A, values, None, BF16) / d[:, None], b, head, t, T, H, V, BV, 1)
    last = t == T - 1
    left = keys.to(tl.float32) * (scale * tl.sum(tl.where(last[:, None], D, 0.0), 0))[:, None]
    memory = dot_state(tl.trans(left), values, None, BF16)
    row, column = tl.arange(0, BK)[:, None], tl.arange(0, BV)[None, :]
    tl.store(C + (pair * K + row) * V + column, memory, mask=(row < K) & (column < V))
    w = tl.arange(0, BK)
    tl.store(n + pair * K + w, tl.sum(left, 0), mask=w < K)
    tl.store(m + pair, tl.sum(tl.where(last, m_t, 0.0), 0))


@triton.jit
def backward_kernel(
    q, k, v, i, f, dh, dq, dk, dv, di, df, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PARTS: tl.constexpr, EPS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """The gradients of q, k, v (B, T, H, .) and i, f (B, T, H). Grid: (B H,)."""
    pair = tl.program_id(0).to(tl.int64)
    b, head = pair // H, pair % H
    first = b * T * H + head
    t = tl.arange(0, BT)
    forget, m_t, largest, D = _decays(i, f, first, t, T, H)
    queries = _load_rows(q, b, head, t, T, H, K, BK, PARTS)
    keys = _load_rows(k, b, head, t, T, H, K, BK, PARTS)
    A = _decayed_scores(queries, keys, D, scale, BF16)
    n, least, d = _normaliser(A, m_t, EPS)
    g = _load_rows(dh, b, head, t, T, H, V, BV, 1).to(tl.float32) / d[:, None]
    if BF16:
        _store_rows(dv, dot_bf16x3(tl.trans(A), g, None), b, head, t, T, H, V, BV, PARTS)
    else:
        _store_rows(dv, dot_tf32x3(tl.trans(A), g, None), b, head, t, T, H, V, BV, PARTS)
    dA = dot_state(g, tl.trans(_load_rows(v, b, head, t, T, H, V, BV, PARTS)), None, BF16)
    along = tl.sum(dA * A, 1)  # (dh . h), as sum_s A_ts (g_t . v_s) is g_t . (d_t h_t)
    dn = tl.where(tl.abs(n) > least, tl.where(n < 0.0, along, -along), 0.0) / d
    dA += tl.where((t[:, None] < T) & (t[None, :] < T), dn[:, None], 0.0)
    dscores = dA * D * scale
    _store_rows(dq, dot_state(dscores, keys, None, BF16), b, head, t, T, H, K, BK, PARTS)
    _store_rows(dk, dot_state(tl.trans(dscores), queries, None, BF16), b, head, t, T, H, K, BK, PARTS)
    dlog_D = dA * A - tl.where(t[None, :] == largest[:, None], (along * EPS / d)[:, None], 0.0)
    at = first + t.to(tl.int64) * H
    tl.store(di + at, tl.sum(dlog_D, 0), mask=t < T)
    before = tl.cumsum(dlog_D, 1) - dlog_D  # sum over s < r
    dlog_f = tl.sum(tl.where(t[:, None] >= t[None, :], before, 0.0), 0)
    tl.store(df + at, dlog_f * sigmoid(-forget), mask=t < T)
