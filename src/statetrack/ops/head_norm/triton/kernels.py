"""The norm of heads, with GATED the skip and the output gate of the mLSTM, in one pass over the tensors.

    u = (h - mean(h)) / sqrt(var(h) + eps) of each head        a = weight u + skip c        y = a silu(z)

    da = dy silu(z)        dz = dy a silu'(z)        dc = skip da
    dskip = sum da c        dweight = sum da u
    dh = (g - mean(g) - u mean(g u)) / sqrt(var(h) + eps),  g = weight da

without GATED y = weight u. Grid: (tiles of ROWS steps, heads) forward; (programs, heads) backward, where
program p takes the tiles p, p + programs, ... and leaves one partial gradient of weight and skip. Registers:
a tile of ROWS steps by BD channels of one head of each tensor. h is contiguous; rows of c and z have strides.
Arithmetic is float32.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false

import triton
import triton.language as tl

from statetrack.ops.layer_norm.triton.kernels import normalised, normalised_backward
from statetrack.ops.triton_runtime.sigmoid import sigmoid


@triton.jit
def head_norm_kernel(
    h, weight, skip, c, z, y, rows, H, c_stride, z_stride, eps,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BD)
    channel = tl.program_id(1) * D + d
    inside = (row < rows)[:, None] & (d < D)[None, :]
    where = row[:, None] * (H * D) + channel[None, :]
    value = tl.load(h + where, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + channel, mask=d < D, other=0.0).to(tl.float32)
    u, _ = normalised(value, inside, eps, D)
    a = u * w[None, :]
    if GATED:
        k = tl.load(skip + channel, mask=d < D, other=0.0).to(tl.float32)
        c_t = tl.load(c + row[:, None] * c_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        z_t = tl.load(z + row[:, None] * z_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        a = (a + k[None, :] * c_t) * z_t * sigmoid(z_t)
    tl.store(y + where, a.to(y.dtype.element_ty), mask=inside)


@triton.jit
def head_norm_backward_kernel(
    h, weight, skip, c, z, dy, dh, dc, dz, partial, rows, H, c_stride, z_stride, eps,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """dh; with GATED dc and dz, contiguous; and partial (programs, 2, H D), of weight and skip."""
    d = tl.arange(0, BD)
    channel = tl.program_id(1) * D + d
    w = tl.load(weight + channel, mask=d < D, other=0.0).to(tl.float32)
    dw, dskip = tl.zeros((ROWS, BD), tl.float32), tl.zeros((ROWS, BD), tl.float32)
    if GATED:
        k = tl.load(skip + channel, mask=d < D, other=0.0).to(tl.float32)
    start = tl.program_id(0) * ROWS
    while start < rows:
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (d < D)[None, :]
        where = row[:, None] * (H * D) + channel[None, :]
        value = tl.load(h + where, mask=inside, other=0.0).to(tl.float32)
        da = tl.load(dy + where, mask=inside, other=0.0).to(tl.float32)
        u, inverse = normalised(value, inside, eps, D)
        if GATED:
            at_c, at_z = (
                row[:, None] * c_stride + channel[None, :],
                row[:, None] * z_stride + channel[None, :],
            )
            c_t = tl.load(c + at_c, mask=inside, other=0.0).to(tl.float32)
            z_t = tl.load(z + at_z, mask=inside, other=0.0).to(tl.float32)
            s = sigmoid(z_t)
            a = u * w[None, :] + k[None, :] * c_t
            tl.store(dz + where, (da * a * s * (1.0 + z_t * (1.0 - s))).to(dz.dtype.element_ty), mask=inside)
            da *= z_t * s
            tl.store(dc + where, (da * k[None, :]).to(dc.dtype.element_ty), mask=inside)
            dskip += da * c_t
        dw += da * u
        dvalue = normalised_backward(da * w[None, :], u, inverse, D)
        tl.store(dh + where, dvalue.to(dh.dtype.element_ty), mask=inside)
        start += tl.num_programs(0) * ROWS
    own = partial + tl.program_id(0) * 2 * H * D + channel
    tl.store(own, tl.sum(dw, axis=0), mask=d < D)
    tl.store(own + H * D, tl.sum(dskip, axis=0), mask=d < D)
