"""The gated activation and its gradient, each in one pass over the tensors.

    out = silu(gate) up        x = [gate, up], rows of 2 W values

Grid: (blocks of ROWS rows, blocks of BW columns). Registers: a tile (ROWS, BW) of both halves of x.
Arithmetic is float32.
"""

import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(x, out, rows, W: tl.constexpr, BW: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (row < rows)[:, None] & (w < W)[None, :]
    where = row[:, None] * (2 * W) + w[None, :]
    gate = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + where + W, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row[:, None] * W + w[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    x, dout, dx, rows, W: tl.constexpr, BW: tl.constexpr, ROWS: tl.constexpr, OUT_AGAIN: tl.constexpr
):
    """dx; with OUT_AGAIN also `out`, in the place of its gradient."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (row < rows)[:, None] & (w < W)[None, :]
    where = row[:, None] * (2 * W) + w[None, :]
    gate = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + where + W, mask=inside, other=0.0).to(tl.float32)
    dout += row[:, None] * W + w[None, :]
    g = tl.load(dout, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    dgate = g * up * s * (1.0 + gate * (1.0 - s))
    tl.store(dx + where, dgate.to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + where + W, (g * gate * s).to(dx.dtype.element_ty), mask=inside)
    if OUT_AGAIN:
        tl.store(dout, (gate * s * up).to(dout.dtype.element_ty), mask=inside)
