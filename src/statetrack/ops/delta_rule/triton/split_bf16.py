"""Float32 tiles as sums of bfloat16 digits, their products, and a triangular resolvent made of them.

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

HOLD = tl.constexpr("mov.b32 $0, $2; mov.b32 $1, $3;")


@triton.jit
def _digits(x, COUNT: tl.constexpr, WHOLE: tl.constexpr):
    """The first digits of a float32 tile; a bfloat16 tile is its own."""
    if WHOLE or x.dtype == tl.bfloat16:
        digits = (x,)
    elif COUNT == 1:
        digits = (x.to(tl.bfloat16),)
    elif COUNT == 2:
        two: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        digits = tl.inline_asm_elementwise(TWO_DIGITS, "=&r,=&r,r,r", [x], two, is_pure=True, pack=2)
    else:
        three: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16)
        digits = tl.inline_asm_elementwise(THREE_DIGITS, "=&r,=&r,=&r,r,r", [x], three, is_pure=True, pack=2)
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
        x, y = tl.inline_asm_elementwise(HOLD, "=&r,=&r,r,r", [x, y], two, is_pure=False, pack=PACK)
    return x, y


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
def _resolvent_of_16(P, P_transposed, b, PLACES: tl.constexpr, WHOLE: tl.constexpr):
    """G = P (I + diag(b) P)^-1 for a strictly lower 16 x 16 tile P, to two or three digits.

    It holds both inverses, (I + P diag(b))^-1 = I - G diag(b) and (I + diag(b) P)^-1 = I - diag(b) G, and
    keeps its digits where b is tiny and theirs are lost beside the 1. Blocks of 2 are those of P; two blocks
    of any size make one of twice the size, in which a corner C of P becomes

        (I - G_2 diag(b_2)) C (I - diag(b_1) G_1)

    All blocks of a size at once, by masks. No power of P is formed, so nothing grows near reflections. The
    transpose (`turned`) is made alongside: it is the right factor. All this has two digits, and one step of
    Newton's iteration, G <- G + (P - G - G diag(b) P) (I - diag(b) G), makes three of them: what it adds is
    small and needs only one digit.
    """
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    one = tl.where(i == j, 1.0, 0.0)
    near = i // 2 == j // 2
    G, turned = tl.where(near, P, 0.0), tl.where(near, P_transposed, 0.0)
    for level in tl.static_range(1, 4):
        between = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
        corner = _digits(tl.trans(tl.where(between, P, 0.0)), 2, WHOLE)
        left = one - G * b[None, :]
        right = _product(_digits(one - turned * b[None, :], 2, WHOLE), corner, None, 2)  # on its side
        if level < 3:
            turned = _product(_digits(right, 2, WHOLE), _digits(tl.trans(left), 2, WHOLE), turned, 2)
        elif PLACES == 3:
            turned = _product(_digits(right, 1, WHOLE), _digits(tl.trans(left), 1, WHOLE), turned, 1)
        G = _product(_digits(left, 2, WHOLE), _digits(tl.trans(right), 2, WHOLE), G, 2)
    if PLACES == 3:
        right = _digits(tl.trans(P_transposed), 3, WHOLE)
        rest = _product(_digits(-G * b[None, :], 3, WHOLE), right, P - G, 3)
        right = _digits(tl.trans(one - turned * b[None, :]), 1, WHOLE)
        G = _product(_digits(rest, 1, WHOLE), right, G, 1)
    return G
