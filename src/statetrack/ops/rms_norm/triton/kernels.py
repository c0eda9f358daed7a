"""RMS normalisation of rows, of x or of x + y, in one pass over the tensors.

    s = x + y        out = weight * s / sqrt(mean(s^2) + eps)        over the last axis, N wide

Grid: one program per ROWS whole rows forward; backward a few programs per multiprocessor, each with several
such tiles. Registers: a tile of ROWS rows by BN columns, N padded to a power of two; backward also the
running sum of the weight's gradient. Arithmetic is float32.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x, y, weight, total, out, rows, eps,
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
    inverse = 1.0 / tl.sqrt(tl.sum(s * s, axis=1) / N + eps)
    tl.store(out + where, (s * inverse[:, None] * w[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    s, weight, dtotal, dout, dx, dy, dweights, rows, eps, tiles,
    N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, HAS_DTOTAL: tl.constexpr, HAS_DY: tl.constexpr,
):  # fmt: skip
    """With u = s / rms(s) and g = weight * dout:

        ds = (g - u mean(g u)) / rms(s) + dtotal        dweight = sum_rows dout u

    dtotal is the gradient of s itself, where s is used elsewhere too. A program takes `tiles` tiles one after
    the other and leaves one row of `dweights`.
    """
    first = tl.program_id(0).to(tl.int64) * tiles * ROWS
    n = tl.arange(0, BN)
    w = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, BN), tl.float32)
    tile = 0
    while tile < tiles:
        row = first + tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (n < N)[None, :]
        where = row[:, None] * N + n[None, :]
        value = tl.load(s + where, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dout + where, mask=inside, other=0.0).to(tl.float32)
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
