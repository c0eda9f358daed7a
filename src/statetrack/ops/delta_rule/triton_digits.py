"""Float32 tiles as sums of two half-precision digits, their products, and a triangular inverse made of them.

The first digit of a number is the number rounded to half precision, the second what the first left over,
rounded. A product of two tiles is then the sum of products of their digits on the tensor cores; the two
second digits together would add nothing. What HALF is decides how much two digits say:

    bfloat16   sixteen bits, at any size: for bfloat16 inputs, which are their own first and only digit
    float16    twenty-two bits, as many as three products of tf32 keep, where numbers are neither large nor
               small: for float32 inputs. Keys and queries become unit vectors, and values and gradients, in
               which everything is linear, are shrunk by a power of two beforehand.

Why not tf32 itself: tensor cores leave a half-precision result in the registers just where they want the left
factor of the next product, and its transpose where they want the right one. So a chain of products never
moves a number between threads, if transposes are taken before digits (`_digits(tl.trans(x))`, not the
reverse: Triton would send that through shared memory).

WHOLE: tiles are their own only digit. Triton's interpreter has no bfloat16 arithmetic.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton_parts import _load_tile

# The digits of two numbers at a time, packed. Triton's own casts go one by one, at a quarter of the rate.
BFLOAT16_DIGITS = tl.constexpr("""{
.reg .b32 a, b;
cvt.rn.bf16x2.f32 $0, $3, $2;
shl.b32 a, $0, 16;
and.b32 b, $0, 0xffff0000;
sub.f32 a, $2, a;
sub.f32 b, $3, b;
cvt.rn.bf16x2.f32 $1, b, a;
}""")
FLOAT16_DIGITS = tl.constexpr("""{
.reg .b16 low, high;
.reg .b32 a, b;
cvt.rn.f16x2.f32 $0, $3, $2;
mov.b32 {low, high}, $0;
cvt.f32.f16 a, low;
cvt.f32.f16 b, high;
sub.f32 a, $2, a;
sub.f32 b, $3, b;
cvt.rn.f16x2.f32 $1, b, a;
}""")

HOLD = tl.constexpr("mov.b32 $0, $2; mov.b32 $1, $3;")


@triton.jit
def _digits(x, COUNT: tl.constexpr, HALF: tl.constexpr, WHOLE: tl.constexpr):
    """The first digit of a float32 tile, or both; a tile of halves is its own."""
    if WHOLE or x.dtype == HALF:
        digits = (x,)
    elif COUNT == 1:
        digits = (x.to(HALF),)
    elif HALF == tl.float16:  # noqa: SIM300
        float16: tl.constexpr = (tl.float16, tl.float16)
        digits = tl.inline_asm_elementwise(FLOAT16_DIGITS, "=r,=r,r,r", [x], float16, is_pure=True, pack=2)
    else:
        bfloat16: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        digits = tl.inline_asm_elementwise(BFLOAT16_DIGITS, "=r,=r,r,r", [x], bfloat16, is_pure=True, pack=2)
    return digits


@triton.jit
def _hold(x, y, WHOLE: tl.constexpr):
    """The same two tiles, but none before both are loaded.

    Triton sends a loaded tile on to shared memory at once, and the barrier there keeps every load after it
    waiting. What passes through here goes there afterwards; loads before it in the program are all on their
    way by then. Tiles of different shapes are let through.
    """
    if not WHOLE and x.shape == y.shape and x.dtype == y.dtype:
        PACK: tl.constexpr = 1 if x.dtype == tl.float32 else 2
        two: tl.constexpr = (x.dtype, x.dtype)
        x, y = tl.inline_asm_elementwise(HOLD, "=r,=r,r,r", [x, y], two, is_pure=False, pack=PACK)
    return x, y


@triton.jit
def _product(x, y, total, PLACES: tl.constexpr):
    """total + x y, smallest products first: digits a and b meet where a + b < PLACES."""
    for smaller in tl.static_range(PLACES):
        for a in tl.static_range(PLACES - smaller):
            if a < len(x) and PLACES - 1 - smaller - a < len(y):
                total = tl.dot(x[a], y[PLACES - 1 - smaller - a], total)
    return total


@triton.jit
def _transposed(x):
    """The same of every digit, for tiles that come from memory and pass through shared memory anyway."""
    if len(x) == 1:
        result = (tl.trans(x[0]),)
    else:
        result = (tl.trans(x[0]), tl.trans(x[1]))
    return result


@triton.jit
def _peak(x, rows, stride, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The largest absolute value in a sequence's rows; ROWS of them at most if that is not zero."""
    peak = 0.0
    if ROWS > 0:
        for start in tl.static_range(0, ROWS, 16):
            peak = tl.maximum(peak, _peak_of_16(x, start, rows, stride, columns, WIDTH, BLOCK))
    else:
        for start in tl.range(0, rows, 16, num_stages=1):
            peak = tl.maximum(peak, _peak_of_16(x, start, rows, stride, columns, WIDTH, BLOCK))
    return peak


@triton.jit
def _peak_of_16(x, start, rows, stride, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = start + tl.arange(0, 16)
    return tl.max(tl.abs(_load_tile(x, row * stride, columns, row < rows, WIDTH, BLOCK, False)))


@triton.jit
def _powers(peak):
    """The power of two that brings numbers up to `peak` under a half, and its inverse.

    float16 digits of a sum of a few thousand such products are then still finite, and the smallest they tell
    from zero is 2^-22 of the peak.
    """
    exponent = peak.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 4 << 23), 250 << 23)
    shrink = ((252 << 23) - exponent).to(tl.float32, bitcast=True)
    return shrink, (exponent + (2 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _resolvent_of_16(P, P_transposed, b, HALF: tl.constexpr, WHOLE: tl.constexpr, BOTH: tl.constexpr):
    """G = P (I + diag(b) P)^-1 for a strictly lower 16 x 16 tile P, and its transpose if BOTH.

    It holds both inverses, (I + P diag(b))^-1 = I - G diag(b) and (I + diag(b) P)^-1 = I - diag(b) G, and
    unlike them it is not small where b is. Blocks of 2 are those of P; two blocks of any size make one of
    twice the size, in which a corner C of P becomes

        (I - G_2 diag(b_2)) C (I - diag(b_1) G_1)

    All blocks of a size at once, by masks. No power of P is formed, so nothing grows near reflections. The
    transpose is made alongside: it is the right factor.
    """
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    one = tl.where(i == j, 1.0, 0.0)
    G, T = tl.where(i // 2 == j // 2, P, 0.0), tl.where(i // 2 == j // 2, P_transposed, 0.0)
    for level in tl.static_range(1, 4):
        between = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
        corner = _digits(tl.trans(tl.where(between, P, 0.0)), 2, HALF, WHOLE)
        left = one - G * b[None, :]
        right = _product(_digits(one - T * b[None, :], 2, HALF, WHOLE), corner, None, 2)  # on its side
        if BOTH or level < 3:
            T = _product(_digits(right, 2, HALF, WHOLE), _digits(tl.trans(left), 2, HALF, WHOLE), T, 2)
        G = _product(_digits(left, 2, HALF, WHOLE), _digits(tl.trans(right), 2, HALF, WHOLE), G, 2)
    return G, T
