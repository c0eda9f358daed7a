"""Float32 tiles as sums of bfloat16 terms, products of such sums, and a triangular resolvent made of them.

A bfloat16 number has eight bits of mantissa. The first term is the tile rounded to bfloat16, the second is
what that left over, rounded, and so on: two terms hold sixteen bits, three hold a float32. The product of
two tiles is the sum of the products of their terms, without those too small to matter: with TERMS terms,
term a of one meets term b of the other where a + b < TERMS. That is one, three or six products on the
tensor cores.

Why not tf32, which needs no more products: tensor cores leave a result, rounded to bfloat16, in the registers
just where they read the left factor of the next product, and its transpose where they read the right one.
So a chain of products never moves a number between threads, as long as tiles are transposed before they are
split (`split(tl.trans(x))`, not the reverse, which Triton would send through shared memory).

SPLIT is "bf16" on a GPU. Triton's interpreter has no bfloat16 arithmetic: there it is "none", which leaves
tiles whole, or "emulated", which makes the same terms as float32 tiles and so has the rounding errors of a
GPU.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.tiles import BF16_LAST_BIT, split_high_low

# The terms of two numbers at a time, packed. Triton's own casts take one at a time, at a quarter of the rate.
SPLIT_IN_TWO = tl.constexpr("""{
.reg .b32 a, b;
cvt.rn.bf16x2.f32 $0, $3, $2;
shl.b32 a, $0, 16;
and.b32 b, $0, 0xffff0000;
sub.f32 a, $2, a;
sub.f32 b, $3, b;
cvt.rn.bf16x2.f32 $1, b, a;
}""")
SPLIT_IN_THREE = tl.constexpr("""{
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

PASS_THROUGH = tl.constexpr("mov.b32 $0, $2; mov.b32 $1, $3;")


@triton.jit
def split(x, TERMS: tl.constexpr, SPLIT: tl.constexpr):
    """The first terms of a float32 tile; a bfloat16 tile is its own only term."""
    if x.dtype == tl.bfloat16 or SPLIT == "none":
        terms = (x,)
    elif SPLIT == "emulated":
        terms = _split_in_float32(x, TERMS)
    elif TERMS == 1:
        terms = (x.to(tl.bfloat16),)
    elif TERMS == 2:
        two: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        terms = tl.inline_asm_elementwise(SPLIT_IN_TWO, "=&r,=&r,r,r", [x], two, is_pure=True, pack=2)
    else:
        three: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16)
        terms = tl.inline_asm_elementwise(SPLIT_IN_THREE, "=&r,=&r,=&r,r,r", [x], three, is_pure=True, pack=2)
    return terms


@triton.jit
def _split_in_float32(x, TERMS: tl.constexpr):
    """The same terms as float32 tiles, for the interpreter."""
    first, rest = split_high_low(x, BF16_LAST_BIT)
    if TERMS == 1:
        terms = (first,)
    else:
        second, rest = split_high_low(rest, BF16_LAST_BIT)
        if TERMS == 2:
            terms = (first, second)
        else:
            third, _ = split_high_low(rest, BF16_LAST_BIT)
            terms = (first, second, third)
    return terms


@triton.jit
def loads_first(x, y, SPLIT: tl.constexpr):
    """The same two loaded tiles, but neither can be used before the loads of both are issued.

    Triton copies a loaded tile to shared memory as soon as it arrives, and the barrier of that copy delays
    every load after it. A tile that passes through here, an assembly statement with a side effect, is
    copied only after all loads that come earlier in the program are issued. Tiles of different shapes pass
    unchanged.
    """
    if SPLIT == "bf16" and x.shape == y.shape and x.dtype == y.dtype:
        PACK: tl.constexpr = 1 if x.dtype == tl.float32 else 2
        two: tl.constexpr = (x.dtype, x.dtype)
        x, y = tl.inline_asm_elementwise(PASS_THROUGH, "=&r,=&r,r,r", [x, y], two, is_pure=False, pack=PACK)
    return x, y


@triton.jit
def dot_terms(x, y, total, TERMS: tl.constexpr):
    """total + x y for tiles split into terms, smallest products first, so that they are not rounded away."""
    for smaller in tl.static_range(TERMS):
        for a in tl.static_range(TERMS - smaller):
            if a < len(x) and TERMS - 1 - smaller - a < len(y):
                total = tl.dot(x[a], y[TERMS - 1 - smaller - a], total)
    return total


@triton.jit
def transpose_terms(x):
    """The transpose of every term, for tiles that come from memory and pass through shared memory anyway."""
    if len(x) == 1:
        result = (tl.trans(x[0]),)
    elif len(x) == 2:
        result = (tl.trans(x[0]), tl.trans(x[1]))
    else:
        result = (tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2]))
    return result


@triton.jit
def resolvent_16x16(P, P_transposed, b, TERMS: tl.constexpr, SPLIT: tl.constexpr):
    """G = P (I + diag(b) P)^-1 for a strictly lower 16 x 16 tile P, to the accuracy of two or three terms.

    It gives both inverses, (I + P diag(b))^-1 = I - G diag(b) and (I + diag(b) P)^-1 = I - diag(b) G, and
    stays exact where b is tiny, while an inverse would lose G beside the 1. Inside blocks of 2, G is P. Two
    blocks of any size make one of twice the size, in which a corner C of P becomes

        (I - G_2 diag(b_2)) C (I - diag(b_1) G_1)

    for all blocks of a size at once, by masks. No power of P is formed, so nothing grows near beta = 2. The
    transpose of G is updated alongside, because it serves as right factor. All this has two terms; with
    three, one step of Newton's iteration follows, G <- G + (P - G - G diag(b) P) (I - diag(b) G), whose
    correction is small and needs one term only.
    """
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    one = tl.where(i == j, 1.0, 0.0)
    same_block = i // 2 == j // 2
    G, G_t = tl.where(same_block, P, 0.0), tl.where(same_block, P_transposed, 0.0)
    for level in tl.static_range(1, 4):
        between = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
        corner_t = split(tl.trans(tl.where(between, P, 0.0)), 2, SPLIT)
        left = one - G * b[None, :]
        right_t = dot_terms(split(one - G_t * b[None, :], 2, SPLIT), corner_t, None, 2)
        if level < 3:
            right_terms = split(right_t, 2, SPLIT)
            G_t = dot_terms(right_terms, split(tl.trans(left), 2, SPLIT), G_t, 2)
        elif TERMS == 3:  # the correction reads one term of it
            right_terms = split(right_t, 1, SPLIT)
            G_t = dot_terms(right_terms, split(tl.trans(left), 1, SPLIT), G_t, 1)
        G = dot_terms(split(left, 2, SPLIT), split(tl.trans(right_t), 2, SPLIT), G, 2)
    if TERMS == 3:
        P_terms = split(tl.trans(P_transposed), 3, SPLIT)
        residual = dot_terms(split(-G * b[None, :], 3, SPLIT), P_terms, P - G, 3)
        right = split(tl.trans(one - G_t * b[None, :]), 1, SPLIT)
        G = dot_terms(split(residual, 1, SPLIT), right, G, 1)
    return G
