"""What the chunk kernels share: products, tiles of rows, decays, norms, and the triangular inverse.

Equations and letters: docs/internals/delta_rule.md, "The equations as the kernels compute them" and
"Precision".
Products come in kinds, by what becomes of their rounding error:

    dot_input, dot_state   an input tile (q, k, v, dO) and a float32 tile that is carried along time (S, U, D)
    dot_inverse            such a float32 tile and the triangular inverse
    dot_out                a result that no later step depends on: outputs, gradients of inputs

BF16 means bfloat16 inputs. Then an input tile is an exact operand of the tensor cores, and a float32 tile
is the sum of two bfloat16 terms, high and low. dot_input and dot_state take two bfloat16 products,
dot_inverse three, all good to sixteen bits, and dot_out one. With float32 inputs everything that is carried
along time takes three tf32 products, which is float32 in effect, and dot_out takes three bfloat16 products,
good to sixteen bits.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.options import HARD_BETA_MARGIN

# The last bit of a bfloat16 and of a tf32 number, as bits of a float32.
BF16_LAST_BIT = tl.constexpr(1 << 16)
TF32_LAST_BIT = tl.constexpr(1 << 13)
SMALLEST_BETA = tl.constexpr(1e-20)
HARD_MARGIN = tl.constexpr(HARD_BETA_MARGIN)


@triton.jit
def split_high_low(x, LAST_BIT: tl.constexpr):
    """x rounded to a multiple of this bit, and the exact remainder.

    Rounded, not truncated: truncation leaves remainders of one sign, and the product of two remainders, which
    is left out, would become a bias.
    """
    high = (x.to(tl.int32, bitcast=True) + LAST_BIT // 2) & -LAST_BIT
    high = high.to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def dot_tf32x3(x, y, total):
    """total + x y to float32 accuracy, in three tf32 products: low high + high low + high high."""
    x_high, x_low = split_high_low(x, TF32_LAST_BIT)
    y_high, y_low = split_high_low(y, TF32_LAST_BIT)
    total = tl.dot(x_low, y_high, total, input_precision="tf32")
    total = tl.dot(x_high, y_low, total, input_precision="tf32")
    return tl.dot(x_high, y_high, total, input_precision="tf32")


@triton.jit
def dot_bf16x3(x, y, total):
    """total + x y to sixteen bits, in three bfloat16 products."""
    x_high, x_low = split_high_low(x, BF16_LAST_BIT)
    y_high, y_low = split_high_low(y, BF16_LAST_BIT)
    total = tl.dot(x_low.to(tl.bfloat16), y_high.to(tl.bfloat16), total)
    total = tl.dot(x_high.to(tl.bfloat16), y_low.to(tl.bfloat16), total)
    return tl.dot(x_high.to(tl.bfloat16), y_high.to(tl.bfloat16), total)


@triton.jit
def dot_input(x, y, total, BF16: tl.constexpr):
    """total + x y for an input tile x and a float32 tile y."""
    if BF16:
        high, low = split_high_low(y, BF16_LAST_BIT)
        total = tl.dot(x, high.to(tl.bfloat16), tl.dot(x, low.to(tl.bfloat16), total))
    else:
        total = dot_tf32x3(x, y, total)
    return total


@triton.jit
def dot_state(x, y, total, BF16: tl.constexpr):
    """total + x y for a float32 tile x and an input tile y."""
    if BF16:
        high, low = split_high_low(x, BF16_LAST_BIT)
        total = tl.dot(high.to(tl.bfloat16), y, tl.dot(low.to(tl.bfloat16), y, total))
    else:
        total = dot_tf32x3(x, y, total)
    return total


@triton.jit
def dot_out(x, y, total, BF16: tl.constexpr, OUT: tl.constexpr):
    """total + x y where the result is an output; OUT is "bf16x3", or "tf32x3" in Triton's interpreter."""
    if BF16:
        total = tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16), total)
    elif OUT == "bf16x3":
        total = dot_bf16x3(x, y, total)
    else:
        total = dot_tf32x3(x, y, total)
    return total


@triton.jit
def store_inverse(inverse, x, row, column, C: tl.constexpr, BF16: tl.constexpr):
    """Store a C x C tile of an inverse: as floats, or with BF16 as a tile of high and a tile of low terms."""
    if BF16:
        high, low = split_high_low(x, BF16_LAST_BIT)
        inverse = inverse.to(tl.pointer_type(tl.bfloat16)) + row * C + column
        tl.store(inverse, high.to(tl.bfloat16))
        tl.store(inverse + C * C, low.to(tl.bfloat16))
    else:
        tl.store(inverse + row * C + column, x)


@triton.jit
def load_inverse(inverse, row, column, C: tl.constexpr, BF16: tl.constexpr):
    """What `store_inverse` stored: the high and the low terms, or twice the same tile of floats."""
    if BF16:
        inverse = inverse.to(tl.pointer_type(tl.bfloat16))
        high = tl.load(inverse + row * C + column)
        low = tl.load(inverse + C * C + row * C + column)
    else:
        high = tl.load(inverse + row * C + column)
        low = high
    return high, low


@triton.jit
def dot_inverse(y, high, low, BF16: tl.constexpr):
    """y times the inverse (or its transpose), as `load_inverse` gave it."""
    if BF16:
        y_high, y_low = split_high_low(y, BF16_LAST_BIT)
        total = tl.dot(y_low.to(tl.bfloat16), high, tl.dot(y_high.to(tl.bfloat16), low))
        total = tl.dot(y_high.to(tl.bfloat16), high, total)
    else:
        total = dot_tf32x3(y, high, None)
    return total


@triton.jit
def load_tile(pointer, rows, columns, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BF16: tl.constexpr):
    """The rows at these offsets, zero where they are not valid; float32, or with BF16 as stored."""
    mask = valid[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    x = tl.load(pointer + rows[:, None] + columns[None, :], mask=mask, other=0.0)
    if not BF16:
        x = x.to(tl.float32)
    return x


@triton.jit
def store_tile(pointer, x, rows, columns, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store the valid rows of x at these offsets, in the dtype of the pointer."""
    mask = valid[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(pointer + rows[:, None] + columns[None, :], x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def chunk_rows(chunk_table, chunk, T, C: tl.constexpr, HOUSEHOLDERS: tl.constexpr, PACKED: tl.constexpr):
    """First row of a chunk, and how many rows are left from there. A row is a step: HOUSEHOLDERS per token.

    Packed sequences have a table of both, made on the GPU from `cu_seqlens`.
    """
    if PACKED:
        first = tl.load(chunk_table + 2 * chunk)
        rows = tl.load(chunk_table + 2 * chunk + 1).to(tl.int32)
    else:
        per_sequence = tl.cdiv(T * HOUSEHOLDERS, C)
        within = (chunk % per_sequence) * C
        first = (chunk // per_sequence).to(tl.int64) * T * HOUSEHOLDERS + within
        rows = T * HOUSEHOLDERS - within
    return first, rows


@triton.jit
def sequence_rows(cu_seqlens, sequence, T, HOUSEHOLDERS: tl.constexpr, PACKED: tl.constexpr):
    """First row of a sequence, and how many rows it has."""
    if PACKED:
        first = tl.load(cu_seqlens + sequence).to(tl.int64) * HOUSEHOLDERS
        rows = (tl.load(cu_seqlens + sequence + 1).to(tl.int64) * HOUSEHOLDERS - first).to(tl.int32)
    else:
        first = sequence.to(tl.int64) * T * HOUSEHOLDERS
        rows = T * HOUSEHOLDERS
    return first, rows


@triton.jit
def row_tokens(row, step, rows, HOUSEHOLDERS: tl.constexpr):
    """Which rows are below `rows`, the token of each, and which are the last of their token: it is read
    there.

    `step` is the row counted from the start of a token, since a chunk may start in the middle of one.
    """
    valid = row < rows
    return valid, step // HOUSEHOLDERS, valid & (step % HOUSEHOLDERS == HOUSEHOLDERS - 1)


@triton.jit
def load_beta(beta, rows, valid, BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr):
    """beta, or its value from logits; never quite zero, since the backward divides by it."""
    b = tl.load(beta + rows, mask=valid, other=0.0).to(tl.float32)
    if BETA_FROM_LOGITS is not None:
        b = BETA_FROM_LOGITS / (1.0 + tl.exp(-b))
        if HARD_BETA:
            b = (1.0 + 2.0 * HARD_MARGIN) * b - HARD_MARGIN * BETA_FROM_LOGITS
            b = tl.maximum(b, 0.0, propagate_nan=tl.PropagateNan.ALL)
            b = tl.minimum(b, BETA_FROM_LOGITS, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(tl.abs(b) < SMALLEST_BETA, SMALLEST_BETA, b)


@triton.jit
def relative_slope(b, BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr):
    """(d beta / d logit) / beta for the betas of `load_beta`.

    s sigmoid(x)                                      1 - u                              u = beta / s
    s clamp((1 + 2 m) sigmoid(x) - m, 0, 1)           (u + m) (1 + m - u) / ((1 + 2 m) u), 0 if clamped
    """
    u = b / BETA_FROM_LOGITS
    slope = 1.0 - u
    if HARD_BETA:
        slope = (u + HARD_MARGIN) * (1.0 + HARD_MARGIN - u) / ((1.0 + 2.0 * HARD_MARGIN) * u)
        slope = tl.where((b > SMALLEST_BETA) & (b < BETA_FROM_LOGITS), slope, 0.0)
    return slope


@triton.jit
def load_decay(g, tokens, first_step):
    """G, the log-decay summed from the chunk's start, and its last value G_C."""
    g_c = tl.load(g + tokens, mask=first_step, other=0.0).to(tl.float32)
    return tl.cumsum(g_c, axis=0), tl.sum(g_c, axis=0)


@triton.jit
def inverse_norm(squares, L2NORM: tl.constexpr):
    """1 / sqrt(||x||^2 + 1e-6) from ||x||^2 with L2NORM, and 1 without.

    NaN where ||x||^2 has overflowed: 0, its limit, would drop the step without a word.
    """
    if L2NORM:
        return tl.where(squares == float("inf"), float("nan"), tl.rsqrt(squares + 1e-6))
    return squares * 0.0 + 1.0


@triton.jit
def squared_norm(x):
    """||x||^2 of every row."""
    x = x.to(tl.float32)
    return tl.sum(x * x, axis=1)


@triton.jit
def unit_lower_inverse(buffer, N, C: tl.constexpr, BF16: tl.constexpr):
    """Write (I + N)^-1 to a C x C buffer in device memory, for strictly lower N.

        [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]

    The inverses of blocks of 2 are I - N. Two of them make the inverse of a block of twice the size, for all
    blocks at once: by masks inside tiles of 16, from there on by loading the corners B. No power of N is
    formed, so nothing grows near beta = 2. The buffer, in device memory and so in the L1 cache, is how a part
    of a tile reaches other threads; with BF16 it ends in the form of `store_inverse`.
    """
    ic = tl.arange(0, C)
    tl.store(buffer + ic[:, None] * C + ic[None, :], N)
    tl.debug_barrier()
    block = tl.arange(0, C // 16)[:, None, None] * (16 * C + 16)
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    L = tl.load(buffer + block + i * C + j)
    X = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -L, 0.0))
    for level in tl.static_range(1, 4):
        # the corners B of all blocks of this size: X <- X - X B X fills in theirs
        between = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
        X -= _dot_blocks(X, _dot_blocks(tl.where(between, L, 0.0), X, BF16), BF16)
    tl.debug_barrier()
    tl.store(buffer + block + i * C + j, X)
    if C >= 32:
        _join_blocks(buffer, C, 16, BF16)
    if C >= 64:
        _join_blocks(buffer, C, 32, BF16)
    tl.debug_barrier()
    if BF16:
        X = tl.load(buffer + ic[:, None] * C + ic[None, :])
        tl.debug_barrier()
        store_inverse(buffer, X, ic[:, None], ic[None, :], C, BF16)
        tl.debug_barrier()


@triton.jit
def _dot_blocks(x, y, BF16: tl.constexpr):
    """x y in `unit_lower_inverse`: sixteen bits if the inverse ends as two bfloat16 terms, else float32."""
    if BF16:
        product = dot_bf16x3(x, y, None)
    else:
        product = dot_tf32x3(x, y, None)
    return product


@triton.jit
def _join_blocks(buffer, C: tl.constexpr, SIZE: tl.constexpr, BF16: tl.constexpr):
    """The inverse of every pair of blocks from the inverses of the two: the corner is -D^-1 (B A^-1)."""
    tl.debug_barrier()
    pair = tl.arange(0, C // (2 * SIZE))[:, None, None] * (2 * SIZE * C + 2 * SIZE)
    i, j = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    A = tl.load(buffer + pair + i * C + j)
    B = tl.load(buffer + pair + (SIZE + i) * C + j)
    D = tl.load(buffer + pair + (SIZE + i) * C + SIZE + j)
    corner = _dot_blocks(D, _dot_blocks(B, A, BF16), BF16)
    tl.debug_barrier()
    tl.store(buffer + pair + (SIZE + i) * C + j, -corner)
