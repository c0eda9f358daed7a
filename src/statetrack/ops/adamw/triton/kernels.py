"""AdamW with gradient clipping for all weights of a model, in two kernels, or three for a large model.

    norm_kernel      ||g||^2 per program, and t <- t + 1 for every weight
    total_kernel     their sum, by one program, where they are many
    update_kernel    g <- g min(1, clip / (||g|| + 1e-6))
                     m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
                     p <- (1 - lr decay) p - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

Grid: one program per BLOCK neighbouring values of one weight. Registers: these values of p, g, m and v. The
program's row of `table` (COLUMNS int64) holds the addresses of its values of p, g, m and v and of the
weight's step count t, the number of values, whether it is the weight's first program, and the address of a
bfloat16 copy of p, or 0; with a copy, the gradient is bfloat16. Arithmetic is float32.
"""

import triton
import triton.language as tl

COLUMNS: tl.constexpr = tl.constexpr(8)


@triton.jit
def _address(table, column: tl.constexpr):
    """The float32 pointer in a column of the program's row."""
    address = tl.load(table + tl.program_id(0) * COLUMNS + column)
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def _copy_address(table):
    """Address of the bfloat16 copy, 0 if there is none."""
    return tl.load(table + tl.program_id(0) * COLUMNS + 7)


@triton.jit
def _gradient(table, i, size):
    """Values i of the program's gradient, in float32."""
    address = tl.load(table + tl.program_id(0) * COLUMNS + 1)
    if _copy_address(table) != 0:
        g = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + i, mask=i < size, other=0.0).to(tl.float32)
    else:
        g = tl.load(address.to(tl.pointer_type(tl.float32)) + i, mask=i < size, other=0.0)
    return g


@triton.jit
def norm_kernel(table, squares, BLOCK: tl.constexpr):
    """The sum of squared gradients of a program; the first program of a weight increments its step count."""
    i = tl.arange(0, BLOCK)
    size = tl.load(table + tl.program_id(0) * COLUMNS + 5)
    g = _gradient(table, i, size)
    tl.store(squares + tl.program_id(0), tl.sum(g * g, axis=0))
    if tl.load(table + tl.program_id(0) * COLUMNS + 6) > 0:
        step = _address(table, 4)
        tl.store(step, tl.load(step) + 1.0)


@triton.jit
def total_kernel(squares, total, programs, BLOCK: tl.constexpr):
    """The sum of all squared norms, always in the same order."""
    i = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    start = 0
    while start < programs:
        sums += tl.load(squares + start + i, mask=start + i < programs, other=0.0)
        start += BLOCK
    tl.store(total, tl.sum(sums, axis=0))


@triton.jit
def _one_minus_power(log_base, exponent):
    """1 - base^exponent without cancellation: a series where the power is near 1."""
    x = log_base * exponent
    series = -x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0))))
    return tl.where(x > -0.1, series, 1.0 - tl.exp(x))


@triton.jit
def update_kernel(
    table, decays, squares, rate, programs, clip, beta1, beta2, log_beta1, log_beta2, eps,
    BLOCK: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One step; every program adds up the `programs` squared norms, in the same order."""
    i = tl.arange(0, BLOCK)
    lr = tl.load(rate)
    decay = tl.load(decays + tl.program_id(0))
    step = tl.load(_address(table, 4))
    size = tl.load(table + tl.program_id(0) * COLUMNS + 5)
    program = tl.arange(0, BP)
    total = tl.sum(tl.load(squares + program, mask=program < programs, other=0.0), axis=0)
    scale = 1.0
    if clip > 0:
        scale = tl.minimum(clip / (tl.sqrt(total) + 1e-6), 1.0, propagate_nan=tl.PropagateNan.ALL)
    p_at, m_at, v_at = _address(table, 0) + i, _address(table, 2) + i, _address(table, 3) + i
    p = tl.load(p_at, mask=i < size, other=0.0)
    g = _gradient(table, i, size) * scale
    m = tl.load(m_at, mask=i < size, other=0.0)
    v = tl.load(v_at, mask=i < size, other=0.0)
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    step_size = lr / _one_minus_power(log_beta1, step)
    root = tl.sqrt(v) / tl.sqrt(_one_minus_power(log_beta2, step))
    p = p * (1.0 - lr * decay) - step_size * m / (root + eps)
    tl.store(p_at, p, mask=i < size)
    tl.store(m_at, m, mask=i < size)
    tl.store(v_at, v, mask=i < size)
    if _copy_address(table) != 0:
        tl.store(_copy_address(table).to(tl.pointer_type(tl.bfloat16)) + i, p.to(tl.bfloat16), mask=i < size)
