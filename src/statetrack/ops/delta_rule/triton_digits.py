"""Float32 tiles as sums of bfloat16 digits, their products, and a triangular inverse made of them.

A digit is a bfloat16 number, eight bits: the first is the tile rounded, the next what the first left over
rounded, and so on. Two digits are sixteen bits, three are float32. A product of two tiles is the sum of the
products of their digits, those that matter: with PLACES digits kept, digit a of one meets digit b of the
other where a + b < PLACES. That is one, three or six products on the tensor cores.

Why not tf32, which needs no more products: tensor cores leave a bfloat16-sized result in the registers just
where they want the left factor of the next product, and its transpose where they want the right one. So a
chain of products never moves a number between threads, if transposes are taken before digits
(`_digits(tl.trans(x))`, not the reverse: Triton would send that through shared memory).

WHOLE: tiles are their own only digit. Triton's interpreter has no bfloat16 arithmetic.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

# The digits of two numbers at a time, packed. Triton's own casts go one by one, at a quarter of the rate.
TWO_DIGITS = tl.constexpr("""{
.reg .b32 a, b;
cvt.rn.bf16x2.f32 $0, $3, $2;
shl.b32 a, $0, 16;
and.b32 b, $0, 0xffff0000;
sub.f32 a, $2, a;
sub.f32 b, $3, b;
cvt.rn.bf16x2.f32 $1, b, a;
}""")
THREE_DIGITS = tl.constexpr("""{
.reg .b32 a, b, c, d;
cvt.rn.bf16x2.f32 $0, $4, $3;
shl.b32 a, $0, 16;
and.b32 b, $0, 0xffff0000;
sub.f32 a, $3, a;
sub.f32 b, $4, b;
cvt.rn.bf16x2.f32 $1, b, a;
shl.b32 c, $1, 16;
and.b32 d, $1, 0xffff0000;
sub.f32 c, a, c;
sub.f32 d, b, d;
cvt.rn.bf16x2.f32 $2, d, c;
}""")


@triton.jit
def _digits(x, COUNT: tl.constexpr, WHOLE: tl.constexpr):
    """The first digits of a float32 tile; a bfloat16 tile is its own."""
    if WHOLE or x.dtype == tl.bfloat16:
        digits = (x,)
    elif COUNT == 1:
        digits = (x.to(tl.bfloat16),)
    elif COUNT == 2:
        two: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        digits = tl.inline_asm_elementwise(TWO_DIGITS, "=r,=r,r,r", [x], two, is_pure=True, pack=2)
    else:
        three: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16)
        digits = tl.inline_asm_elementwise(THREE_DIGITS, "=r,=r,=r,r,r", [x], three, is_pure=True, pack=2)
    return digits


@triton.jit
def _product(x, y, total, PLACES: tl.constexpr):
    """total + x y, smallest products first."""
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
    elif len(x) == 2:
        result = (tl.trans(x[0]), tl.trans(x[1]))
    else:
        result = (tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2]))
    return result


@triton.jit
def _inverse_of_16(N, N_transposed, PLACES: tl.constexpr, WHOLE: tl.constexpr):
    """X = (I + N)^-1 for a strictly lower 16 x 16 tile N, to two or three digits.

        [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]

    Blocks of 2 are I - N; pairs of blocks make one of twice the size, all blocks of a size at once by masks:
    X <- X - X (N o mask) X. No power of N is formed, so nothing grows near reflections. The transpose of X is
    made alongside: it is the right factor. All this has two digits, and one step of Newton's iteration,
    X <- X + (I - X (I + N)) X, makes three of them: what it adds is small and needs only one digit.
    """
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    one = tl.where(i == j, 1.0, 0.0)
    near = i // 2 == j // 2
    X = one - tl.where(near, N, 0.0)
    Y = one - tl.where(near, N_transposed, 0.0)  # the transpose of X
    for level in tl.static_range(1, 4):
        between = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
        corner = _digits(tl.trans(tl.where(between, N, 0.0)), 2, WHOLE)
        change = -_product(_digits(Y, 2, WHOLE), corner, None, 2)
        if level < 3:
            Y = _product(_digits(change, 2, WHOLE), _digits(tl.trans(X), 2, WHOLE), Y, 2)
        elif PLACES == 3:
            Y = _product(_digits(change, 1, WHOLE), _digits(tl.trans(X), 1, WHOLE), Y, 1)
        X = _product(_digits(X, 2, WHOLE), _digits(tl.trans(change), 2, WHOLE), X, 2)
    if PLACES == 3:
        right = _digits(tl.trans(N_transposed), 3, WHOLE)
        rest = _product(_digits(-X, 3, WHOLE), right, one - X, 3)
        X = _product(_digits(rest, 1, WHOLE), _digits(tl.trans(Y), 1, WHOLE), X, 1)
    return X
