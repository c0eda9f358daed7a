"""The short convolution in two Triton kernels, each one pass over its tensors. Arithmetic is float32.

A program has a tile of L times and BC channels of one sequence. Neighbouring times are loaded again for every
tap: they come from the cache.
"""

import triton
import triton.language as tl


@triton.jit
def _filtered(x, row, t, T, x_t, c, inside, weights, bias_c, C, W: tl.constexpr, HAS_BIAS: tl.constexpr):
    """y before the SiLU at times t (L,) and channels c (BC,)."""
    y = tl.zeros((t.shape[0], c.shape[0]), tl.float32)
    for i in tl.static_range(W):
        s = t - (W - 1) + i
        w = tl.load(weights + c * W + i, mask=inside, other=0.0).to(tl.float32)
        here = ((s >= 0) & (s < T))[:, None] & inside[None, :]
        value = tl.load(x + row + s[:, None] * x_t + c[None, :], mask=here, other=0.0).to(tl.float32)
        y += w[None, :] * value
    if HAS_BIAS:
        y += bias_c[None, :]
    return y


@triton.jit
def forward_kernel(
    x, weights, bias, y, T, C, x_b, x_t,
    W: tl.constexpr, L: tl.constexpr, BC: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * L + tl.arange(0, L)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < C
    bias_c = tl.zeros((BC,), tl.float32)
    if HAS_BIAS:
        bias_c = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    out = _filtered(x, b * x_b, t, T, x_t, c, inside, weights, bias_c, C, W, HAS_BIAS)
    if SILU:
        out = out / (1.0 + tl.exp(-out))
    where = (t < T)[:, None] & inside[None, :]
    tl.store(y + b * T * C + t[:, None] * C + c[None, :], out.to(y.dtype.element_ty), mask=where)


@triton.jit
def _gradient_before_silu(
    x, dy, row, drow, t, T, x_t, dy_t, c, inside, weights, bias_c, C,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    here = ((t >= 0) & (t < T))[:, None] & inside[None, :]
    g = tl.load(dy + drow + t[:, None] * dy_t + c[None, :], mask=here, other=0.0).to(tl.float32)
    if SILU:
        y = _filtered(x, row, t, T, x_t, c, inside, weights, bias_c, C, W, HAS_BIAS)
        s = 1.0 / (1.0 + tl.exp(-y))
        g *= s * (1.0 + y * (1.0 - s))
    return g


@triton.jit
def backward_kernel(
    x, weights, bias, dy, dx, dweights, dbias, T, C, x_b, x_t, dy_b, dy_t,
    W: tl.constexpr, L: tl.constexpr, BC: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """dx; and the sums over a tile for the weights' gradients, one row per tile, added up afterwards."""
    b = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * L + tl.arange(0, L)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < C
    bias_c = tl.zeros((BC,), tl.float32)
    if HAS_BIAS:
        bias_c = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    row, drow = b * x_b, b * dy_b
    tile = b * tl.num_programs(1) + tl.program_id(1)
    total = tl.zeros((L, BC), tl.float32)
    for i in tl.static_range(W):
        # x_t goes into y_{t + W - 1 - i} with weight i
        g = _gradient_before_silu(
            x, dy, row, drow, t + (W - 1 - i), T, x_t, dy_t, c, inside, weights, bias_c, C, W, HAS_BIAS, SILU
        )
        w = tl.load(weights + c * W + i, mask=inside, other=0.0).to(tl.float32)
        total += w[None, :] * g
        here = (t < T)[:, None] & inside[None, :]
        value = tl.load(x + row + t[:, None] * x_t + c[None, :], mask=here, other=0.0).to(tl.float32)
        tl.store(dweights + (tile * C + c) * W + i, tl.sum(g * value, axis=0), mask=inside)
        if HAS_BIAS & (i == W - 1):
            tl.store(dbias + tile * C + c, tl.sum(g, axis=0), mask=inside)
    where = (t < T)[:, None] & inside[None, :]
    tl.store(dx + b * T * C + t[:, None] * C + c[None, :], total.to(dx.dtype.element_ty), mask=where)
