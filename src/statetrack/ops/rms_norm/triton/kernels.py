"""RMS normalisation of rows, of x or of x + y, in one pass over the tensors.

    s = x + y        out = weight * s / sqrt(mean(s^2) + eps)        over the last axis, N wide

Grid: one program per ROWS whole rows forward; backward a few programs per multiprocessor, each with several
such tiles. Registers: a tile of ROWS rows by BN columns, N padded to a power of two; backward also the
running sum of the weight's gradient. Arithmetic is float32.

FROM_OUT: the backward reads `out` and 1 / rms(s) instead of s, which then need not be kept: s / rms(s) is
out / weight. A weight of zero would hide it, so TINY stands for weights that are smaller.
"""

import triton
import triton.language as tl

TINY = tl.constexpr(1e-30)  # bfloat16 has the exponents of float32


@triton.jit
def _load_weight(weight, n, N: tl.constexpr, FROM_OUT: tl.constexpr):
    w = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    if FROM_OUT:
        w = tl.where(tl.abs(w) < TINY, TINY, w)
    return w


@triton.jit
def rms_norm_kernel(
    x, y, weight, total, out, inverses, rows, eps,
    N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, HAS_Y: tl.constexpr, FROM_OUT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BN)
    inside = (row < rows)[:, None] & (n < N)[None, :]
    where = row[:, None] * N + n[None, :]
    s = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    if HAS_Y:
        s += tl.load(y + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + where, s.to(total.dtype.element_ty), mask=inside)
    w = _load_weight(weight, n, N, FROM_OUT)
    inverse = 1.0 / tl.sqrt(tl.sum(s * s, axis=1) / N + eps)
    if FROM_OUT:
        tl.store(inverses + row, inverse, mask=row < rows)
    tl.store(out + where, (s * inverse[:, None] * w[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    s, inverses, weight, dtotal, dout, dx, dy, dweights, rows, eps, tiles,
    N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, HAS_DTOTAL: tl.constexpr, HAS_DY: tl.constexpr,
    FROM_OUT: tl.constexpr,
):  # fmt: skip
    """With u = s / rms(s) and g = weight * dout:

        ds = (g - u mean(g u)) / rms(s) + dtotal        dweight = sum_rows dout u

    dtotal is the gradient of s itself, where s is used elsewhere too. With FROM_OUT, `s` is the norm's output
    and `inverses` hold 1 / rms(s). A program takes `tiles` tiles one after
    the other and leaves one row of `dweights`.
    """
    first = tl.program_id(0).to(tl.int64) * tiles * ROWS
    n = tl.arange(0, BN)
    w = _load_weight(weight, n, N, FROM_OUT)
    dw = tl.zeros((ROWS, BN), tl.float32)
    tile = 0
    while tile < tiles:
        row = first + tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (n < N)[None, :]
        where = row[:, None] * N + n[None, :]
        value = tl.load(s + where, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dout + where, mask=inside, other=0.0).to(tl.float32)
        if FROM_OUT:
            inverse = tl.load(inverses + row, mask=row < rows, other=0.0)
            u = value * (1.0 / w)[None, :]
        else:
            inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / N + eps)
            u = value * inverse[:, None]
        dw += g * u
        g *= w[None, :]
        ds = (g - u * (tl.sum(g * u, axis=1) / N)[:, None]) * inverse[:, None]
        if HAS_DTOTAL:
            ds += tl.load(dtotal + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + where, ds.to(dx.dtype.element_ty), mask=inside)
        if HAS_DY:
            tl.store(dy + where, ds.to(dy.dtype.element_ty), mask=inside)
        tile += 1
    tl.store(dweights + tl.program_id(0) * N + n, tl.sum(dw, axis=0), mask=n < N)
