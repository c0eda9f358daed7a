"""q, k and v out of the rows of one product, q and k rotated; BACKWARD their gradients into such rows.

    (a, b) -> (a cos - b sin, b cos + a sin)        angle t rate_j, channels a = j and b = j + K/2 of a head

A rotation's gradient is the rotation by the opposite angle. Grid: (tiles of ROWS steps, blocks of BP pairs of
channels among those of all heads of q, k and v). Angles are counted in turns and in float64 up to the nearest
quarter of a turn; what is left, at most an eighth, goes into two series, exact to float32.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def cos_and_sin(turns):
    """Of angles in turns, float64; results in float32."""
    quarters = 4.0 * turns
    nearest = tl.floor(quarters + 0.5)
    x = (quarters - nearest).to(tl.float32) * 1.5707963267948966
    quadrant = (nearest - 4.0 * tl.floor(nearest * 0.25)).to(tl.int32)
    x2 = x * x
    sin = x * (1.0 + x2 * (-1.0 / 6 + x2 * (1.0 / 120 + x2 * (-1.0 / 5040 + x2 * (1.0 / 362880)))))
    cos = 1.0 + x2 * (-0.5 + x2 * (1.0 / 24 + x2 * (-1.0 / 720 + x2 * (1.0 / 40320))))
    odd = (quadrant & 1) == 1
    turned_cos, turned_sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    turned_cos = tl.where((quadrant == 1) | (quadrant == 2), -turned_cos, turned_cos)
    return turned_cos, tl.where(quadrant >= 2, -turned_sin, turned_sin)


@triton.jit
def rotated_split_kernel(
    qkv, q, k, v, rates, rows, T,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BP: tl.constexpr, ROWS: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """qkv (rows, (HEADS + 2 KV_HEADS) K), K = 2 HALF; q (rows, HEADS K), k and v (rows, KV_HEADS K)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tl.program_id(1) * BP + tl.arange(0, BP)
    head, j = pair // HALF, pair % HALF
    groups: tl.constexpr = HEADS + 2 * KV_HEADS
    in_row = (row < rows)[:, None]
    inside = in_row & (head < groups)[None, :]
    turns = (row % T).to(tl.float64)[:, None] * tl.load(rates + j)[None, :]
    cos, sin = cos_and_sin(turns)
    # v is not rotated
    rotated = (head < HEADS + KV_HEADS)[None, :]
    cos, sin = tl.where(rotated, cos, 1.0), tl.where(rotated, sin, 0.0)
    joined = qkv + row[:, None] * (groups * 2 * HALF) + (head * 2 * HALF + j)[None, :]
    of_q, of_k = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    part = tl.where(of_q, q, tl.where(of_k, k, v))
    first = tl.where(of_q, 0, tl.where(of_k, HEADS, HEADS + KV_HEADS))
    width = tl.where(of_q, HEADS, KV_HEADS) * 2 * HALF
    apart = part[None, :] + row[:, None] * width[None, :] + ((head - first) * 2 * HALF + j)[None, :]
    if BACKWARD:
        a = tl.load(apart, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(apart + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(joined, (a * cos + b * sin).to(qkv.dtype.element_ty), mask=inside)
        tl.store(joined + HALF, (b * cos - a * sin).to(qkv.dtype.element_ty), mask=inside)
    else:
        a = tl.load(joined, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(joined + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(apart, (a * cos - b * sin).to(q.dtype.element_ty), mask=inside)
        tl.store(apart + HALF, (b * cos + a * sin).to(q.dtype.element_ty), mask=inside)
