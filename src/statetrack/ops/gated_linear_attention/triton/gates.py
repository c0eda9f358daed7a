"""Gates in the kernels: sizes as logarithms, signs folded into queries and keys, zeros kept apart.

A gate a is held as l = -log2 |a|, at most ZERO, and L_t = l_1 + ... + l_t from the chunk's start. A product
of gates from s + 1 to t is 2^(L_s - L_t) c_s c_t with the cumulated signs c. Gates of at most 2^-ZERO = 1e-12
in size have l = ZERO, and a product below 2^-CUT is 0: so a gate of 0 cuts exactly what came before it. Gates
beyond 1 in size have l < 0: where they double a state within a chunk, a cut leaves 2^-ZERO times as much.

Every term of the gradient dl_j with respect to l_j contains a_j. Where a gate of a chunk is below 2^-STEEP,
its terms are summed apart from all others and before that cut, so that dividing the sum by a_j is
well-conditioned, and right at a_j = 0: there 2^-ZERO is divided by itself. Elsewhere dl_j may be the
difference of larger sums, whose rounding errors the division multiplies by 2^STEEP at most.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.tiles import chunk_rows

ZERO = tl.constexpr(40.0)
STEEP = tl.constexpr(2.0)
CUT = tl.constexpr(39.0)  # less than ZERO by more than the rounding error of L
FACTOR = tl.constexpr(2.0**64)  # of negative sums in memory
SMALLEST = tl.constexpr(2.0**-40)  # negative sums of less than this are stored as 0
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_gates(gate, sign, offsets, mask, GATE: tl.constexpr):
    """l and whether the gate is negative. GATE: "value" for a, "log" for g, "log and sign" for both.

    Written with `where`, which keeps NaN.
    """
    outside = 1.0 if GATE == "value" else 0.0
    x = tl.load(gate + offsets, mask=mask, other=outside).to(tl.float32)
    if GATE == "value":
        negative = x < 0.0
        size = tl.abs(x)
        zero = size < 1e-12
        l = -tl.log2(tl.where(zero, 1.0, size))
        l = tl.where(zero, ZERO, l)
    else:
        l = -LOG2_E * x
        negative = x > float("inf")
        if GATE == "log and sign":
            s = tl.load(sign + offsets, mask=mask, other=1.0).to(tl.float32)
            negative = s < 0.0
            l = tl.where(s == 0.0, ZERO, l)
    return tl.where(l > ZERO, ZERO, l), negative


@triton.jit
def gate_gradient(dl, l, negative, GATE: tl.constexpr):
    """The gradient of a or g, from dl = a dL/da as the sums of the backward give it."""
    if GATE == "value":
        d = dl * tl.where(negative, -1.0, 1.0) * tl.exp2(l)
    else:
        d = tl.where(l >= ZERO, 0.0, dl)
    return d


@triton.jit
def taken_by_other(steepest, mask, GATE: tl.constexpr, EXACT: tl.constexpr):
    """Of a: whether the launch with the other EXACT takes these channels, of the largest l in `steepest`."""
    other = False
    if GATE == "value":
        other = (tl.max(tl.load(steepest, mask=mask, other=0.0), axis=0) > STEEP) != EXACT
    return other


@triton.jit
def cumulated(l, negative):
    """L and the cumulated signs along the first axis."""
    L = tl.cumsum(l, axis=0)
    odd = tl.cumsum(negative.to(tl.int32), axis=0) & 1
    return L, tl.where(odd == 1, -1.0, 1.0)


@triton.jit
def product(L):
    """The product of gates whose l sum to L, before and after the cut."""
    whole = tl.exp2(-L)
    return whole, tl.where(L > CUT, 0.0, whole)


@triton.jit
def load_cumulated(L, rows, columns, K: tl.constexpr, BK: tl.constexpr):
    """What `cumulate_kernel` stored at these offsets of rows: L and the cumulated signs."""
    return decoded(tl.load(L + rows[:, None] + columns[None, :], mask=(columns < K)[None, :], other=0.0))


@triton.jit
def load_end(L, row, columns, K: tl.constexpr):
    """L and the cumulated signs of one row, as tiles with this row."""
    L_end, c_end = decoded(tl.load(L + row + columns, mask=columns < K, other=0.0))
    return L_end[None, :], c_end[None, :]


@triton.jit
def encoded(L, c):
    """L and the cumulated signs as one number: its size is L, its sign bit is set where c is -1.

    L < 0, of gates beyond 1, is stored as 2^64 times its size. No sum that is not negative is that large.
    The L of gates of exactly 1 may be -0, whose sign bit must not be read as c.
    """
    size = tl.where(L < -SMALLEST, L * -FACTOR, tl.where(L <= 0.0, 0.0, L))
    bits = tl.where(c < 0.0, -2147483648, 0).to(tl.int32)
    return (size.to(tl.int32, bitcast=True) | bits).to(tl.float32, bitcast=True)


@triton.jit
def decoded(x):
    """L and c from what `encoded` gave; NaN stays."""
    size = tl.abs(x)
    L = tl.where(size > SMALLEST * FACTOR, size * (-1.0 / FACTOR), size)
    return L, tl.where(x.to(tl.int32, bitcast=True) < 0, -1.0, 1.0)


@triton.jit
def cumulate_kernel(
    gate, sign, L, kept, steepest, chunk_table, T, H,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """L and c of gates per channel in one (B, T, H, K); P_C of every chunk, (chunks, H, K); of a also the
    largest l, in `steepest`.

    A program has a chunk of one head and BK channels.
    """
    slices: tl.constexpr = (K + BK - 1) // BK
    chunk, h = tl.program_id(0) // slices, tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:
        return
    ic, ik = tl.arange(0, C), (tl.program_id(0) % slices) * BK + tl.arange(0, BK)
    inside = (ic < rows)[:, None] & (ik < K)[None, :]
    offsets = (first * H + h) * K + ic[:, None] * (H * K) + ik[None, :]
    l, negative = load_gates(gate, sign, offsets, inside, GATE)
    L_c, c = cumulated(l, negative)
    tl.store(L + offsets, encoded(L_c, c), mask=inside)
    _, P = product(L_c)
    # rows beyond the last have gates of 1, so that the last row of the tile is the end of the chunk
    end = tl.sum(tl.where((ic == C - 1)[:, None], P * c, 0.0), axis=0)
    slot = (chunk * H + h).to(tl.int64) * K + ik
    tl.store(kept + slot, end, mask=ik < K)
    if GATE == "value":
        tl.store(steepest + slot, tl.max(l, axis=0), mask=ik < K)
