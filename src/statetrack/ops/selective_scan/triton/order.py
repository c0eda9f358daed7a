"""Packed sequences in the order in which programs take them: the longest first.

Programs start in turn, as others end. If the last ones to start are short, processors end at about the same
time; otherwise a few long sequences keep the GPU from the next kernel.
"""

import triton
import triton.language as tl

from statetrack.ops.selective_scan.triton.tiles import kernel


@triton.jit
def _lengths(cu_seqlens, s, number):
    start = tl.load(cu_seqlens + s, mask=s < number, other=0)
    return tl.load(cu_seqlens + s + 1, mask=s < number, other=0) - start


@kernel
def order_kernel(cu_seqlens, order, number, BI: tl.constexpr, BJ: tl.constexpr):
    """order[r] = the sequence that r others come before: longer ones, or as long and earlier in the row."""
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    length = _lengths(cu_seqlens, i, number)[:, None]
    before = tl.zeros((BI,), tl.int32)
    first = 0
    while first < number:
        j = first + tl.arange(0, BJ)
        other = _lengths(cu_seqlens, j, number)[None, :]
        comes = (other > length) | ((other == length) & (j[None, :] < i[:, None]))
        before += tl.sum((comes & (j < number)[None, :]).to(tl.int32), axis=1)
        first += BJ
    tl.store(order + before, i, mask=i < number)
