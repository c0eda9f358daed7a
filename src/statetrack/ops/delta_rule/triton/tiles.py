"""What the Triton kernels of the delta rule share: products, tiles, decays, and the triangular inverse.

Names and equations: docs/delta_rule.md. Kinds of product, by what becomes of their rounding:

    _dot_input, _dot_state   an input tile and a float32 tile that is carried along time (a state, new values)
    _dot_inverse             such a tile and the triangular inverse
    _dot_out                 a result nobody carries on: outputs, input gradients

With SPLIT (bfloat16 inputs) an input tile is its own exact operand and a float32 tile is the sum of two
halves, so the first take two half-precision products and the second three, all good to sixteen bits, and the
last is a single one. Without SPLIT what is carried on is float32 in effect (three tf32 products), and the
last has sixteen bits (three bfloat16 products).
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def _cut(x, BITS: tl.constexpr):
    """x rounded to all but its last bits, and the exact remainder.

    Rounded, not truncated: remainders of one sign would make the product of two, which is left out, a bias.
    """
    high = (x.to(tl.int32, bitcast=True) + (1 << (BITS - 1))) & -(1 << BITS)
    high = high.to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def _dot_float32(x, y, total):
    """total + x y to float32 accuracy in three tf32 products: a factor is a tf32 number plus a remainder."""
    x_high, x_low = _cut(x, 13)
    y_high, y_low = _cut(y, 13)
    total = tl.dot(x_low, y_high, total, input_precision="tf32")
    total = tl.dot(x_high, y_low, total, input_precision="tf32")
    return tl.dot(x_high, y_high, total, input_precision="tf32")


@triton.jit
def _dot_halves(x, y, total, half: tl.constexpr):
    """total + x y to sixteen bits in three half-precision products."""
    BITS: tl.constexpr = 16 if half == tl.bfloat16 else 13
    x_high, x_low = _cut(x, BITS)
    y_high, y_low = _cut(y, BITS)
    total = tl.dot(x_low.to(half), y_high.to(half), total)
    total = tl.dot(x_high.to(half), y_low.to(half), total)
    return tl.dot(x_high.to(half), y_high.to(half), total)


@triton.jit
def _dot_input(x, y, total, SPLIT: tl.constexpr):
    if SPLIT:
        BITS: tl.constexpr = 16 if x.dtype == tl.bfloat16 else 13
        high, low = _cut(y, BITS)
        total = tl.dot(x, high.to(x.dtype), tl.dot(x, low.to(x.dtype), total))
    else:
        total = _dot_float32(x, y, total)
    return total


@triton.jit
def _dot_state(x, y, total, SPLIT: tl.constexpr):
    """total + x y for a float32 tile x and an input tile y."""
    if SPLIT:
        BITS: tl.constexpr = 16 if y.dtype == tl.bfloat16 else 13
        high, low = _cut(x, BITS)
        total = tl.dot(high.to(y.dtype), y, tl.dot(low.to(y.dtype), y, total))
    else:
        total = _dot_float32(x, y, total)
    return total


@triton.jit
def _dot_out(x, y, total, half: tl.constexpr, SPLIT: tl.constexpr, OUT: tl.constexpr):
    if SPLIT:
        total = tl.dot(x.to(half), y.to(half), total)
    elif OUT == "bf16x3":
        total = _dot_halves(x, y, total, tl.bfloat16)
    else:
        total = _dot_float32(x, y, total)
    return total


@triton.jit
def _load_inverse(A, row, column, C: tl.constexpr, half: tl.constexpr, SPLIT: tl.constexpr):
    """A tile of an inverse as `_store_inverse` left it: two tiles of halves when SPLIT."""
    if SPLIT:
        A = A.to(tl.pointer_type(half))
        high = tl.load(A + row * C + column)
        low = tl.load(A + C * C + row * C + column)
    else:
        high = tl.load(A + row * C + column)
        low = high
    return high, low


@triton.jit
def _store_inverse(A, x, row, column, C: tl.constexpr, half: tl.constexpr, SPLIT: tl.constexpr):
    """x as `_load_inverse` reads it."""
    if SPLIT:
        BITS: tl.constexpr = 16 if half == tl.bfloat16 else 13
        high, low = _cut(x, BITS)
        A = A.to(tl.pointer_type(half)) + row * C + column
        tl.store(A, high.to(half))
        tl.store(A + C * C, low.to(half))
    else:
        tl.store(A + row * C + column, x)


@triton.jit
def _dot_inverse(y, high, low, half: tl.constexpr, SPLIT: tl.constexpr):
    """y times the inverse (or its transpose), as `_load_inverse` gave it."""
    if SPLIT:
        BITS: tl.constexpr = 16 if half == tl.bfloat16 else 13
        y_high, y_low = _cut(y, BITS)
        total = tl.dot(y_low.to(half), high, tl.dot(y_high.to(half), low))
        total = tl.dot(y_high.to(half), high, total)
    else:
        total = _dot_float32(y, high, None)
    return total


@triton.jit
def _load_tile(pointer, rows, columns, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """Rows at the given offsets, zero outside; float32, or as stored when SPLIT."""
    mask = inside[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    x = tl.load(pointer + rows[:, None] + columns[None, :], mask=mask, other=0.0)
    if not SPLIT:
        x = x.to(tl.float32)
    return x


@triton.jit
def _store_tile(pointer, x, rows, columns, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    mask = inside[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(pointer + rows[:, None] + columns[None, :], x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _chunk(table, chunk, T, C: tl.constexpr, n: tl.constexpr, PACKED: tl.constexpr):
    """First row of a chunk and how many rows it has. A row is a step; token t of the batch has rows t n..."""
    if PACKED:
        first = tl.load(table + 2 * chunk)
        rows = tl.load(table + 2 * chunk + 1).to(tl.int32)
    else:
        per_sequence = tl.cdiv(T * n, C)
        within = (chunk % per_sequence) * C
        first = (chunk // per_sequence).to(tl.int64) * T * n + within
        rows = T * n - within
    return first, rows


@triton.jit
def _span(cu_seqlens, sequence, T, n: tl.constexpr, PACKED: tl.constexpr):
    """First row of a sequence and how many it has."""
    if PACKED:
        first = tl.load(cu_seqlens + sequence).to(tl.int64) * n
        rows = (tl.load(cu_seqlens + sequence + 1).to(tl.int64) * n - first).to(tl.int32)
    else:
        first = sequence.to(tl.int64) * T * n
        rows = T * n
    return first, rows


@triton.jit
def _steps(row, step, rows, n: tl.constexpr):
    """Of these rows, of so many: which there are, the token of each, and which are the last of their token.

    `step` counts from where a token begins, which a chunk need not do.
    """
    valid = row < rows
    return valid, step // n, valid & (step % n == n - 1)


@triton.jit
def _betas(beta, rows, valid, LOGITS: tl.constexpr, SIGMOID: tl.constexpr):
    """b, never quite zero: the backward divides by it."""
    b = tl.load(beta + rows, mask=valid, other=0.0).to(tl.float32)
    if LOGITS:
        b = SIGMOID / (1.0 + tl.exp(-b))
    return tl.where(tl.abs(b) < 1e-20, 1e-20, b)


@triton.jit
def _decays(g, tokens, first_step):
    """G, the log-decay summed from the chunk's start, and its last value."""
    step = tl.load(g + tokens, mask=first_step, other=0.0).to(tl.float32)
    return tl.cumsum(step, axis=0), tl.sum(step, axis=0)


@triton.jit
def _inverse_norms(squares, L2NORM: tl.constexpr):
    """1 / sqrt(||x||^2 + eps) from squared norms, or one."""
    if L2NORM:
        return tl.rsqrt(squares + 1e-6)
    return squares * 0.0 + 1.0


@triton.jit
def _squares(x):
    x = x.to(tl.float32)
    return tl.sum(x * x, axis=1)


@triton.jit
def _unit_lower_inverse(buffer, N, C: tl.constexpr, half: tl.constexpr, SPLIT: tl.constexpr):
    """Write (I + N)^-1 to a C x C buffer in device memory, for strictly lower N.

        [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]

    Blocks of 2 are I - N; pairs of blocks make one of twice the size, all blocks of a size at once, inside
    tiles of 16 by masks and from there on by loading corners. No power of N is formed, so nothing grows near
    reflections. The buffer is how a part of a tile reaches other threads. With SPLIT it ends as two tiles of
    halves, whose sum is the inverse.
    """
    ic = tl.arange(0, C)
    tl.store(buffer + ic[:, None] * C + ic[None, :], N)
    tl.debug_barrier()
    block = tl.arange(0, C // 16)[:, None, None] * (16 * C + 16)
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    L = tl.load(buffer + block + i * C + j)
    X = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -L, 0.0))
    for level in tl.static_range(1, 4):
        between = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
        X -= _dot_blocks(X, _dot_blocks(tl.where(between, L, 0.0), X, SPLIT), SPLIT)
    tl.debug_barrier()
    tl.store(buffer + block + i * C + j, X)
    if C >= 32:
        _join(buffer, C, 16, SPLIT)
    if C >= 64:
        _join(buffer, C, 32, SPLIT)
    tl.debug_barrier()
    if SPLIT:
        A = tl.load(buffer + ic[:, None] * C + ic[None, :])
        tl.debug_barrier()
        _store_inverse(buffer, A, ic[:, None], ic[None, :], C, half, SPLIT)
        tl.debug_barrier()


@triton.jit
def _dot_blocks(x, y, SPLIT: tl.constexpr):
    """x y on the way to the inverse: to sixteen bits if it ends as two halves, or else float32."""
    if SPLIT:
        product = _dot_halves(x, y, None, tl.bfloat16)
    else:
        product = _dot_float32(x, y, None)
    return product


@triton.jit
def _join(buffer, C: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr):
    """The inverse of every pair of blocks from the inverses of the two: the corner is -D^-1 (B A^-1)."""
    tl.debug_barrier()
    pair = tl.arange(0, C // (2 * SIZE))[:, None, None] * (2 * SIZE * C + 2 * SIZE)
    i, j = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    A = tl.load(buffer + pair + i * C + j)
    B = tl.load(buffer + pair + (SIZE + i) * C + j)
    D = tl.load(buffer + pair + (SIZE + i) * C + SIZE + j)
    corner = _dot_blocks(D, _dot_blocks(B, A, SPLIT), SPLIT)
    tl.debug_barrier()
    tl.store(buffer + pair + (SIZE + i) * C + j, -corner)
