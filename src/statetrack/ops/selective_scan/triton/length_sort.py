"""Packed sequences sorted by length, longest first (docs/internals/selective_scan.md, "Packed sequences").

    longest_first[r] = i        r = #{j : T_j > T_i, or T_j = T_i and j < i}

with T_i = cu_seqlens[i + 1] - cu_seqlens[i].

The scan kernels take sequences in this order. Programs start as others finish, so if the last ones to start
are short, all multiprocessors finish at about the same time; otherwise a few long sequences delay the next
kernel.

Grid: one program per BI sequences. Registers: their lengths and ranks, and the lengths of BJ others at a
time.
"""

import triton
import triton.language as tl

from statetrack.ops.selective_scan.triton.jit import scan_jit


@triton.jit
def _lengths(cu_seqlens, s, sequences):
    start = tl.load(cu_seqlens + s, mask=s < sequences, other=0)
    return tl.load(cu_seqlens + s + 1, mask=s < sequences, other=0) - start


@scan_jit
def length_sort_kernel(cu_seqlens, longest_first, sequences, BI: tl.constexpr, BJ: tl.constexpr):
    """The rank of a sequence is the number of those that come before it: S^2 comparisons, no exchange."""
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    length = _lengths(cu_seqlens, i, sequences)[:, None]
    rank = tl.zeros((BI,), tl.int32)
    first = 0
    while first < sequences:
        j = first + tl.arange(0, BJ)
        other = _lengths(cu_seqlens, j, sequences)[None, :]
        before = (other > length) | ((other == length) & (j[None, :] < i[:, None]))
        rank += tl.sum((before & (j < sequences)[None, :]).to(tl.int32), axis=1)
        first += BJ
    tl.store(longest_first + rank, i, mask=i < sequences)
