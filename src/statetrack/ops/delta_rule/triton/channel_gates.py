"""Gates per key channel in the kernels of the delta rule: sizes as logarithms, and cumulated signs.

A gate a is held as l = -log2 |a|, at most ZERO: a gate of at most 1e-12 in size counts as 0; one beyond 1 has
l < 0. L_t = l_1 + ... + l_t from the chunk's start lies in memory with the sign of a_1 ... a_t as its last
bit, which is below the rounding error of the sum. The product of the gates between rows s < t is
2^(L_s - L_t), and its sign is folded into q and k, whose rows take that of L. Within a chunk a gate of 0
leaves 2^-ZERO of what came before it, less than float32 can show beside anything else; from chunk to chunk it
leaves nothing (`product`).
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.plan import INTERPRETED
from statetrack.ops.delta_rule.triton.tiles import chunk_rows
from statetrack.ops.gated_linear_attention.triton.gates import cumulated, load_gates, product

INLINE = tl.constexpr(not INTERPRETED)  # assembly, which Triton's interpreter does not know


@triton.jit
def power_of_two(x):
    """2^x, 0 where that is no normal number: one instruction, where `tl.exp2` takes four."""
    if INLINE:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, False, 1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def load_sums(L, rows, columns, K: tl.constexpr, BK: tl.constexpr):
    """L of rows at these offsets, with the cumulated signs."""
    if K % BK == 0:
        x = tl.load(L + rows[:, None] + columns[None, :])
    else:
        x = tl.load(L + rows[:, None] + columns[None, :], mask=(columns < K)[None, :], other=0.0)
    return x


@triton.jit
def with_sign(x, L, SIGNED: tl.constexpr):
    """x times the cumulated sign that L carries."""
    if SIGNED:
        bits = x.to(tl.int32, bitcast=True) ^ (L.to(tl.int32, bitcast=True) << 31)
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def last_of_first_block(ic, level, rows):
    """For blocks of m = 2^level rows in pairs: the last row of the first block of each row's pair."""
    r = ((ic >> (level + 1)) << (level + 1)) + (1 << level) - 1
    return tl.minimum(r, rows - 1)


@triton.jit
def gates_to(L_c, L_r, ic, level):
    """The products of the gates between every row and r = `last_of_first_block`, of their sums L."""
    towards = tl.where(((ic >> level) & 1) == 1, -1.0, 1.0)  # r is before rows of second blocks
    return power_of_two(towards[:, None] * (L_c - L_r))


@triton.jit
def cumulate_kernel(
    gate, sign, L, kept, steepest, chunk_table, T, H,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """L of every row (B, T, H, K), and the product of the gates of every chunk (chunks, H, K); of a also the
    largest l, in `steepest`.

    A program has a chunk of one head and BK channels.
    """
    slices: tl.constexpr = (K + BK - 1) // BK
    chunk, h = tl.program_id(0) // slices, tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:  # the grid is sized for the largest number of chunks that packed sequences can have
        return
    ic, ik = tl.arange(0, C), (tl.program_id(0) % slices) * BK + tl.arange(0, BK)
    inside = (ic < rows)[:, None] & (ik < K)[None, :]
    offsets = (first * H + h) * K + ic[:, None] * (H * K) + ik[None, :]
    l, negative = load_gates(gate, sign, offsets, inside, GATE)
    L_c, c = cumulated(l, negative)
    carried = L_c
    if GATE != "log":
        bits = (L_c.to(tl.int32, bitcast=True) & -2) | tl.where(c < 0.0, 1, 0)
        carried = bits.to(tl.float32, bitcast=True)
    tl.store(L + offsets, carried, mask=inside)
    _, P = product(L_c)
    # rows beyond the last have gates of 1, so that the last row of the tile is the end of the chunk
    end = tl.sum(tl.where((ic == C - 1)[:, None], P * c, 0.0), axis=0)
    slot = (chunk * H + h).to(tl.int64) * K + ik
    tl.store(kept + slot, end, mask=ik < K)
    if GATE == "value":
        tl.store(steepest + slot, tl.max(l, axis=0), mask=ik < K)
