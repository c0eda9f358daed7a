"""The sLSTM in one Triton kernel each way: a program carries a few sequences of one head through all steps.

Forward, by step (equations: `slstm_reference`): gates = x_t + h_{t-1} R, four products of (BB, D) by (D, D),
then m, c, n and h. Backward, from the last step: with dG the gradient of the gates one step later,

    dh = dh_out + sum_gate dG_gate R_gate^T        dc += dh o / n        dn -= dh h / n
    di = write (tanh(z) dc + dn)                   df = forget sigmoid(-f) (c_{t-1} dc + n_{t-1} dn)
    dz = write (1 - tanh(z)^2) dc                  do = dh c / n o (1 - o)

after which dc and dn are multiplied by `forget`. The last c and n are divided by exp(m), so where any of the
last c, n, m has a gradient (THROUGH_M), that of m_T is dm - dc c - dn n; it goes back along the larger of
log sigmoid(f_t) + m_{t-1} and i_t, as in torch.maximum. The gradients of R and of the bias are sums over all
steps, in a kernel of their own (`weight_gradients`). Grid: (blocks of BB sequences, heads). In registers: h,
c, n, m or dG, dc, dn of the block; the four matrices R_gate too; and what the next step reads, so that a step
does not wait for memory. Products are float32 in three tf32 products each.

Gates lie in memory as (B, T, H, 4, D) or as (B, T, 4, H, D): SH and SG are the distances of heads and gates.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def tanh(z):
    """A series near 0, where the difference of two numbers near 1 would lose its digits."""
    z2 = z * z
    series = z * (1.0 + z2 * (-1.0 / 3 + z2 * (2.0 / 15 - z2 * (17.0 / 315))))
    e = tl.exp(-2.0 * tl.abs(z))
    size = (1.0 - e) / (1.0 + e)
    return tl.where(z2 < 0.02, series, tl.where(z < 0.0, -size, size))


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))  # at most 1
    return tl.where(x < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def log_sigmoid(f):
    return tl.minimum(f, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(f)))


@triton.jit
def load_recurrent(R, head, gate, row, column, D: tl.constexpr):
    """R_gate of a head, rows `row` and columns `column`; zero past the width."""
    at = (head * D + row) * 4 * D + gate * D + column
    return tl.load(R + at, mask=(row < D) & (column < D), other=0.0)


@triton.jit
def load_gates(x, gate, inside, SG: tl.constexpr):
    """i, f, z and o at these places, in float32."""
    i = tl.load(x + gate, mask=inside, other=0.0).to(tl.float32)
    f = tl.load(x + gate + SG, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(x + gate + 2 * SG, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(x + gate + 3 * SG, mask=inside, other=0.0).to(tl.float32)
    return i, f, z, o


@triton.jit
def store_gates(x, gate, inside, i, f, z, o, SG: tl.constexpr):
    tl.store(x + gate, i.to(x.dtype.element_ty), mask=inside)
    tl.store(x + gate + SG, f.to(x.dtype.element_ty), mask=inside)
    tl.store(x + gate + 2 * SG, z.to(x.dtype.element_ty), mask=inside)
    tl.store(x + gate + 3 * SG, o.to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_after(x, x0, at, first, inside, t):
    """x after step t, in (B, T, H, D); for t = -1 the x0 (B, H, D) that came in; 0 before."""
    return tl.load(x + at, mask=inside & (t >= 0), other=0.0) + tl.load(
        x0 + first, mask=inside & (t == -1), other=0.0
    )


@triton.jit
def forward_kernel(
    x, R, bias, h0, c0, n0, m0, gates, h, c, n, m, B, T, H,
    D: tl.constexpr, BD: tl.constexpr, BB: tl.constexpr, SH: tl.constexpr, SG: tl.constexpr,
    HAS_BIAS: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """h (B, T, H, D); with SAVE the gates, as x, and all c, n, m, else the last c, n, m (B, H, D)."""
    head = tl.program_id(1)
    b = tl.program_id(0) * BB + tl.arange(0, BB)[:, None]
    d = tl.arange(0, BD)[None, :]
    inside = (b < B) & (d < D)
    row = tl.arange(0, BD)[:, None]
    R_i, R_f = load_recurrent(R, head, 0, row, d, D), load_recurrent(R, head, 1, row, d, D)
    R_z, R_o = load_recurrent(R, head, 2, row, d, D), load_recurrent(R, head, 3, row, d, D)
    if HAS_BIAS:
        b_i, b_f, b_z, b_o = load_gates(bias, head * 4 * D + d, d < D, D)
    first = (b.to(tl.int64) * H + head) * D + d
    # a program's steps: addresses of the first sequence, and offsets of the others, in 32 bits
    steps = tl.program_id(0).to(tl.int64) * BB * T
    local = tl.arange(0, BB)[:, None] * (T * H * D)
    at, gate = local + d, 4 * local + d
    h_t, c_t = tl.load(h0 + first, mask=inside, other=0.0), tl.load(c0 + first, mask=inside, other=0.0)
    n_t, m_t = tl.load(n0 + first, mask=inside, other=0.0), tl.load(m0 + first, mask=inside, other=0.0)
    x += steps * H * 4 * D + head * SH
    gates += steps * H * 4 * D + head * SH
    own = (steps * H + head) * D
    i_next, f_next, z_next, o_next = load_gates(x, gate, inside, SG)
    t = 0
    while t < T:
        i, f, z, o = i_next, f_next, z_next, o_next
        i_next, f_next, z_next, o_next = load_gates(x + H * 4 * D, gate, inside & (t + 1 < T), SG)
        if HAS_BIAS:
            i, f, z, o = i + b_i, f + b_f, z + b_z, o + b_o
        i = tl.dot(h_t, R_i, i, input_precision="tf32x3")
        f = tl.dot(h_t, R_f, f, input_precision="tf32x3")
        z = tl.dot(h_t, R_z, z, input_precision="tf32x3")
        o = tl.dot(h_t, R_o, o, input_precision="tf32x3")
        kept = log_sigmoid(f) + m_t
        m_t = tl.maximum(kept, i)
        forget, write = tl.exp(kept - m_t), tl.exp(i - m_t)
        c_t = forget * c_t + write * tanh(z)
        n_t = forget * n_t + write
        h_t = tl.where(inside, sigmoid(o) * c_t / n_t, 0.0)
        tl.store(h + own + at, h_t, mask=inside)
        if SAVE:
            store_gates(gates, gate, inside, i, f, z, o, SG)
            tl.store(c + own + at, c_t, mask=inside)
            tl.store(n + own + at, n_t, mask=inside)
            tl.store(m + own + at, m_t, mask=inside)
        own += H * D
        x += H * 4 * D
        gates += H * 4 * D
        t += 1
    if not SAVE:
        tl.store(c + first, c_t, mask=inside)
        tl.store(n + first, n_t, mask=inside)
        tl.store(m + first, m_t, mask=inside)


@triton.jit
def backward_kernel(
    R, gates, c0, n0, m0, c, n, m, dh_out, dc_last, dn_last, dm_last, dgates, dh0, dc0, dn0, dm0, B, T, H,
    D: tl.constexpr, BD: tl.constexpr, BB: tl.constexpr, SH: tl.constexpr, SG: tl.constexpr,
    THROUGH_M: tl.constexpr,
):  # fmt: skip
    """dgates, as the gates, and the gradients of h0, c0, n0 and m0. dc, dn, dm are read with THROUGH_M."""
    head = tl.program_id(1)
    b = tl.program_id(0) * BB + tl.arange(0, BB)[:, None]
    d = tl.arange(0, BD)[None, :]
    inside = (b < B) & (d < D)
    row = tl.arange(0, BD)[:, None]
    # transposed: rows are gates, columns the outputs they read
    R_i, R_f = load_recurrent(R, head, 0, d, row, D), load_recurrent(R, head, 1, d, row, D)
    R_z, R_o = load_recurrent(R, head, 2, d, row, D), load_recurrent(R, head, 3, d, row, D)
    first = tl.arange(0, BB)[:, None] * (H * D) + d
    entered = (tl.program_id(0).to(tl.int64) * BB * H + head) * D
    c0, n0, m0 = c0 + entered, n0 + entered, m0 + entered
    # addresses of the first sequence, and offsets of the others, in 32 bits
    steps = tl.program_id(0).to(tl.int64) * BB * T + T - 1
    local = tl.arange(0, BB)[:, None] * (T * H * D)
    at, gate = local + d, 4 * local + d
    own = (steps * H + head) * D
    gates += steps * H * 4 * D + head * SH
    dgates += steps * H * 4 * D + head * SH
    c_t, n_t = tl.load(c + own + at, mask=inside, other=0.0), tl.load(n + own + at, mask=inside, other=0.0)
    m_t = tl.load(m + own + at, mask=inside, other=0.0)
    dc, dn = tl.zeros((BB, BD), tl.float32), tl.zeros((BB, BD), tl.float32)
    dm = tl.zeros((BB, BD), tl.float32)
    if THROUGH_M:
        dc += tl.load(dc_last + entered + first, mask=inside, other=0.0)
        dn += tl.load(dn_last + entered + first, mask=inside, other=0.0)
        dm += tl.load(dm_last + entered + first, mask=inside, other=0.0)
        dm -= dc * c_t + dn * n_t
    dh = tl.zeros((BB, BD), tl.float32)  # what later steps ask of h_t
    i_next, f_next, z_next, o_next = load_gates(gates, gate, inside, SG)
    dh_next = tl.load(dh_out + own + at, mask=inside, other=0.0).to(tl.float32)
    own -= H * D  # of the step before
    c_next = load_after(c + own, c0, at, first, inside, T - 2)
    n_next = load_after(n + own, n0, at, first, inside, T - 2)
    m_next = load_after(m + own, m0, at, first, inside, T - 2)
    t = T - 1
    while t >= 0:
        i, f, z, o = i_next, f_next, tanh(z_next), sigmoid(o_next)
        dh += dh_next
        c_before, n_before, m_before = c_next, n_next, m_next
        earlier = inside & (t > 0)
        i_next, f_next, z_next, o_next = load_gates(gates - H * 4 * D, gate, earlier, SG)
        dh_next = tl.load(dh_out + own + at, mask=earlier, other=0.0).to(tl.float32)
        own -= H * D
        c_next = load_after(c + own, c0, at, first, inside, t - 2)
        n_next = load_after(n + own, n0, at, first, inside, t - 2)
        m_next = load_after(m + own, m0, at, first, inside, t - 2)
        n_safe = tl.where(inside, n_t, 1.0)
        kept = log_sigmoid(f) + m_before
        write, forget = tl.exp(i - m_t), tl.exp(kept - m_t)
        y = c_t / n_safe
        dc += dh * o / n_safe
        dn -= dh * o * y / n_safe
        di = write * (z * dc + dn)
        df = forget * sigmoid(-f) * (c_before * dc + n_before * dn)
        dz = write * (1.0 - z * z) * dc
        do = y * o * (1.0 - o) * dh
        if THROUGH_M:
            stays = tl.where(kept == i, 0.5, tl.where(kept > i, 1.0, 0.0))
            di += (1.0 - stays) * dm
            df += stays * dm * sigmoid(-f)
            dm *= stays
        store_gates(dgates, gate, inside, di, df, dz, do, SG)
        dc, dn = dc * forget, dn * forget
        dh = tl.dot(tl.where(inside, di, 0.0), R_i, input_precision="tf32x3")
        dh = tl.dot(tl.where(inside, df, 0.0), R_f, dh, input_precision="tf32x3")
        dh = tl.dot(tl.where(inside, dz, 0.0), R_z, dh, input_precision="tf32x3")
        dh = tl.dot(tl.where(inside, do, 0.0), R_o, dh, input_precision="tf32x3")
        c_t, n_t, m_t = c_before, n_before, m_before
        gates -= H * 4 * D
        dgates -= H * 4 * D
        t -= 1
    tl.store(dh0 + entered + first, dh, mask=inside)
    tl.store(dc0 + entered + first, dc, mask=inside)
    tl.store(dn0 + entered + first, dn, mask=inside)
    # c and n enter as c exp(m) and n exp(m); the largest exponent may be the first one
    dm += dc * tl.load(c0 + first, mask=inside, other=0.0) + dn * tl.load(n0 + first, mask=inside, other=0.0)
    tl.store(dm0 + entered + first, dm, mask=inside)
