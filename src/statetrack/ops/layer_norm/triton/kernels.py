"""Layer normalisation of rows, of x or of x + y, in one pass over the tensors.

    s = x + y        u = (s - mean(s)) / sqrt(var(s) + eps)        out = weight u + bias

    ds = (g - mean(g) - u mean(g u)) / sqrt(var(s) + eps) + dtotal,        g = weight dout
    dweight = sum over rows of dout u        dbias = sum over rows of dout

over the last axis, N wide. Grid: one program per ROWS whole rows forward; backward a few programs per
multiprocessor, each with several such tiles. Registers: a tile of ROWS rows by BN columns, N padded to a
power of two; backward also the running sums of the parameters' gradients. Arithmetic is float32.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def normalised(s, inside, eps, N: tl.constexpr):
    """u of rows s that are 0 where not `inside`, and 1 / sqrt(var + eps) of each row."""
    mean = tl.sum(s, axis=1) / N
    centred = tl.where(inside, s - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / N + eps)
    return centred * inverse[:, None], inverse


@triton.jit
def normalised_backward(g, u, inverse, N: tl.constexpr):
    """The gradient of s from that of u, g, which is 0 outside."""
    along, mean = tl.sum(g * u, axis=1) / N, tl.sum(g, axis=1) / N
    return (g - mean[:, None] - u * along[:, None]) * inverse[:, None]


@triton.jit
def layer_norm_kernel(
    x, y, weight, bias, total, out, rows, eps,
    N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, HAS_Y: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BN)
    inside = (row < rows)[:, None] & (n < N)[None, :]
    where = row[:, None] * N + n[None, :]
    s = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    if HAS_Y:
        s += tl.load(y + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + where, s.to(total.dtype.element_ty), mask=inside)
    w = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    u, _ = normalised(s, inside, eps, N)
    tl.store(out + where, (u * w[None, :] + b[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_backward_kernel(
    s, weight, dtotal, dout, dx, dy, partial, rows, eps, tiles,
    N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, HAS_DTOTAL: tl.constexpr, HAS_DY: tl.constexpr,
):  # fmt: skip
    """dx, dy in its dtype with HAS_DY, and this program's gradients of weight and bias, partial (., 2, N)."""
    first = tl.program_id(0).to(tl.int64) * tiles * ROWS
    n = tl.arange(0, BN)
    w = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    dw, db = tl.zeros((ROWS, BN), tl.float32), tl.zeros((ROWS, BN), tl.float32)
    tile = 0
    while tile < tiles:
        row = first + tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (n < N)[None, :]
        where = row[:, None] * N + n[None, :]
        value = tl.load(s + where, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dout + where, mask=inside, other=0.0).to(tl.float32)
        u, inverse = normalised(value, inside, eps, N)
        dw += g * u
        db += g
        ds = normalised_backward(g * w[None, :], u, inverse, N)
        if HAS_DTOTAL:
            ds += tl.load(dtotal + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + where, ds.to(dx.dtype.element_ty), mask=inside)
        if HAS_DY:
            tl.store(dy + where, ds.to(dy.dtype.element_ty), mask=inside)
        tile += 1
    own = partial + tl.program_id(0) * 2 * N + n
    tl.store(own, tl.sum(dw, axis=0), mask=n < N)
    tl.store(own + N, tl.sum(db, axis=0), mask=n < N)
