"""The sLSTM in one Triton kernel each way: a program carries a few sequences of one head through all steps.

Forward, by step (equations: `slstm_reference`): gates = x_t + h_{t-1} R, four products of (BB, D) by (D, D),
then m, c, n and h. Backward, from the last step: with dG the gradient of the gates one step later,

    dh = dh_out + sum_gate dG_gate R_gate^T        dc += dh o / n        dn -= dh h / n
    di = write (tanh(z) dc + dn)                   df = forget sigmoid(-f) (c_{t-1} dc + n_{t-1} dn)
    dz = write (1 - tanh(z)^2) dc                  do = dh c / n o (1 - o)

after which dc and dn are multiplied by `forget`. The last c and n are divided by exp(m), so where any of the
last c, n, m has a gradient (THROUGH_M), that of m_T is dm - dc c - dn n; it goes back along the larger of
log sigmoid(f_t) + m_{t-1} and i_t, as in torch.maximum. The gradient of R is a product of all h_{t-1} with
all dG, made outside. Grid: (blocks of BB sequences, heads). In registers: h, c, n, m or dG, dc, dn of the
block; the four matrices R_gate too. Products are float32 in three tf32 products each.
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
def forward_kernel(
    x, R, h0, c0, n0, m0, gates, h, c, n, m, B, T, H,
    D: tl.constexpr, BD: tl.constexpr, BB: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """h (B, T, H, D); with SAVE gates (B, T, H, 4, D) and all c, n, m, else the last c, n, m (B, H, D)."""
    head = tl.program_id(1)
    b = tl.program_id(0) * BB + tl.arange(0, BB)[:, None]
    d = tl.arange(0, BD)[None, :]
    inside = (b < B) & (d < D)
    row = tl.arange(0, BD)[:, None]
    R_i, R_f = load_recurrent(R, head, 0, row, d, D), load_recurrent(R, head, 1, row, d, D)
    R_z, R_o = load_recurrent(R, head, 2, row, d, D), load_recurrent(R, head, 3, row, d, D)
    first = (b.to(tl.int64) * H + head) * D + d
    h_t, c_t = tl.load(h0 + first, mask=inside, other=0.0), tl.load(c0 + first, mask=inside, other=0.0)
    n_t, m_t = tl.load(n0 + first, mask=inside, other=0.0), tl.load(m0 + first, mask=inside, other=0.0)
    t = 0
    while t < T:
        at = ((b.to(tl.int64) * T + t) * H + head) * D + d
        gate = ((b.to(tl.int64) * T + t) * H + head) * 4 * D + d
        i = tl.load(x + gate, mask=inside, other=0.0)
        f = tl.load(x + gate + D, mask=inside, other=0.0)
        z = tl.load(x + gate + 2 * D, mask=inside, other=0.0)
        o = tl.load(x + gate + 3 * D, mask=inside, other=0.0)
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
        tl.store(h + at, h_t, mask=inside)
        if SAVE:
            tl.store(gates + gate, i, mask=inside)
            tl.store(gates + gate + D, f, mask=inside)
            tl.store(gates + gate + 2 * D, z, mask=inside)
            tl.store(gates + gate + 3 * D, o, mask=inside)
            tl.store(c + at, c_t, mask=inside)
            tl.store(n + at, n_t, mask=inside)
            tl.store(m + at, m_t, mask=inside)
        t += 1
    if not SAVE:
        tl.store(c + first, c_t, mask=inside)
        tl.store(n + first, n_t, mask=inside)
        tl.store(m + first, m_t, mask=inside)


@triton.jit
def backward_kernel(
    R, gates, c0, n0, m0, c, n, m, dh_out, dc_last, dn_last, dm_last, dgates, dh0, dc0, dn0, dm0, B, T, H,
    D: tl.constexpr, BD: tl.constexpr, BB: tl.constexpr, THROUGH_M: tl.constexpr,
):  # fmt: skip
    """dgates (B, T, H, 4, D), and the gradients of h0, c0, n0 and m0. dc, dn, dm are read with THROUGH_M."""
    head = tl.program_id(1)
    b = tl.program_id(0) * BB + tl.arange(0, BB)[:, None]
    d = tl.arange(0, BD)[None, :]
    inside = (b < B) & (d < D)
    row = tl.arange(0, BD)[:, None]
    # transposed: rows are gates, columns the outputs they read
    R_i, R_f = load_recurrent(R, head, 0, d, row, D), load_recurrent(R, head, 1, d, row, D)
    R_z, R_o = load_recurrent(R, head, 2, d, row, D), load_recurrent(R, head, 3, d, row, D)
    first = (b.to(tl.int64) * H + head) * D + d
    dc, dn = tl.zeros((BB, BD), tl.float32), tl.zeros((BB, BD), tl.float32)
    dm = tl.zeros((BB, BD), tl.float32)
    if THROUGH_M:
        last = ((b.to(tl.int64) * T + T - 1) * H + head) * D + d
        dc += tl.load(dc_last + first, mask=inside, other=0.0)
        dn += tl.load(dn_last + first, mask=inside, other=0.0)
        dm += tl.load(dm_last + first, mask=inside, other=0.0)
        dm -= dc * tl.load(c + last, mask=inside, other=0.0)
        dm -= dn * tl.load(n + last, mask=inside, other=0.0)
    dh = tl.zeros((BB, BD), tl.float32)  # what later steps ask of h_t
    t = T - 1
    while t >= 0:
        at = ((b.to(tl.int64) * T + t) * H + head) * D + d
        gate = ((b.to(tl.int64) * T + t) * H + head) * 4 * D + d
        i = tl.load(gates + gate, mask=inside, other=0.0)
        f = tl.load(gates + gate + D, mask=inside, other=0.0)
        z = tanh(tl.load(gates + gate + 2 * D, mask=inside, other=0.0))
        o = sigmoid(tl.load(gates + gate + 3 * D, mask=inside, other=0.0))
        c_t, n_t = tl.load(c + at, mask=inside, other=0.0), tl.load(n + at, mask=inside, other=1.0)
        m_t = tl.load(m + at, mask=inside, other=0.0)
        earlier, begun = inside & (t > 0), inside & (t == 0)
        before = at - H * D
        c_before = tl.load(c + before, mask=earlier, other=0.0) + tl.load(c0 + first, mask=begun, other=0.0)
        n_before = tl.load(n + before, mask=earlier, other=0.0) + tl.load(n0 + first, mask=begun, other=0.0)
        m_before = tl.load(m + before, mask=earlier, other=0.0) + tl.load(m0 + first, mask=begun, other=0.0)
        kept = log_sigmoid(f) + m_before
        write, forget = tl.exp(i - m_t), tl.exp(kept - m_t)
        y = c_t / n_t
        dh += tl.load(dh_out + at, mask=inside, other=0.0)
        dc += dh * o / n_t
        dn -= dh * o * y / n_t
        di = write * (z * dc + dn)
        df = forget * sigmoid(-f) * (c_before * dc + n_before * dn)
        dz = write * (1.0 - z * z) * dc
        do = y * o * (1.0 - o) * dh
        if THROUGH_M:
            stays = tl.where(kept == i, 0.5, tl.where(kept > i, 1.0, 0.0))
            di += (1.0 - stays) * dm
            df += stays * dm * sigmoid(-f)
            dm *= stays
        tl.store(dgates + gate, di, mask=inside)
        tl.store(dgates + gate + D, df, mask=inside)
        tl.store(dgates + gate + 2 * D, dz, mask=inside)
        tl.store(dgates + gate + 3 * D, do, mask=inside)
        dc, dn = dc * forget, dn * forget
        dh = tl.dot(tl.where(inside, di, 0.0), R_i, input_precision="tf32x3")
        dh = tl.dot(tl.where(inside, df, 0.0), R_f, dh, input_precision="tf32x3")
        dh = tl.dot(tl.where(inside, dz, 0.0), R_z, dh, input_precision="tf32x3")
        dh = tl.dot(tl.where(inside, do, 0.0), R_o, dh, input_precision="tf32x3")
        t -= 1
    tl.store(dh0 + first, dh, mask=inside)
    tl.store(dc0 + first, dc, mask=inside)
    tl.store(dn0 + first, dn, mask=inside)
    # c and n enter as c exp(m) and n exp(m); the largest exponent may be the first one
    dm += dc * tl.load(c0 + first, mask=inside, other=0.0) + dn * tl.load(n0 + first, mask=inside, other=0.0)
    tl.store(dm0 + first, dm, mask=inside)
