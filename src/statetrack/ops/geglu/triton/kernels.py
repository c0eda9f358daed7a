"""The gated activation with GELU and its gradient, each in one pass over the tensors.

    out = gate P(gate) up        P(g) = (1 + erf(g / sqrt(2))) / 2        x = [gate, up], rows of 2 W values
    dgate = dout up (P(gate) + gate p(gate))        dup = dout gate P(gate)

with p(g) = exp(-g^2 / 2) / sqrt(2 pi).

Grid: (blocks of ROWS rows, blocks of BW columns). Registers: a tile (ROWS, BW) of both halves of x.
Arithmetic is float32.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false

import triton
import triton.language as tl

SQRT_HALF = tl.constexpr(0.7071067811865476)
DENSITY_AT_0 = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)


@triton.jit
def geglu_kernel(x, out, rows, W: tl.constexpr, BW: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (row < rows)[:, None] & (w < W)[None, :]
    where = row[:, None] * (2 * W) + w[None, :]
    gate = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + where + W, mask=inside, other=0.0).to(tl.float32)
    value = gate * (0.5 + 0.5 * tl.erf(gate * SQRT_HALF)) * up
    tl.store(out + row[:, None] * W + w[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def geglu_backward_kernel(x, dout, dx, rows, W: tl.constexpr, BW: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (row < rows)[:, None] & (w < W)[None, :]
    where = row[:, None] * (2 * W) + w[None, :]
    gate = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + where + W, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dout + row[:, None] * W + w[None, :], mask=inside, other=0.0).to(tl.float32)
    below = 0.5 + 0.5 * tl.erf(gate * SQRT_HALF)
    density = DENSITY_AT_0 * tl.exp(-0.5 * gate * gate)
    tl.store(dx + where, (g * up * (below + gate * density)).to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + where + W, (g * gate * below).to(dx.dtype.element_ty), mask=inside)
