"""Packing in two Triton kernels. A program has SEQUENCES rows of W steps, padded to BW."""

import triton
import triton.language as tl


@triton.jit
def lengths_kernel(
    targets, lengths, answers, ignore, B, W: tl.constexpr, BW: tl.constexpr, SEQUENCES: tl.constexpr
):
    """Steps of a sequence up to the first target that counts, and that target; one step if none does."""
    s = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    t = tl.arange(0, BW)
    inside = (s < B)[:, None] & (t < W)[None, :]
    target = tl.load(targets + s.to(tl.int64)[:, None] * W + t[None, :], mask=inside, other=ignore)
    place = tl.min(tl.where(target != ignore, t[None, :], W), axis=1)
    place = tl.where(place < W, place, 0)
    tl.store(lengths + s, (place + 1).to(tl.int64), mask=s < B)
    tl.store(answers + s, tl.sum(tl.where(t[None, :] == place[:, None], target, 0), axis=1), mask=s < B)


@triton.jit
def pack_kernel(
    inputs, lengths, ends, tokens, bounds, at, answers, ignore, B, more, rows,
    W: tl.constexpr, BW: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Sequence s < B copies its tokens; s - B of the `more` others fills up to W rows behind the last one."""
    s = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    t = tl.arange(0, BW)
    given, there = s < B, s < B + more
    end = tl.load(ends + tl.where(given, s, B - 1), mask=there, other=0)
    length = tl.load(lengths + s, mask=given, other=W)
    end = tl.where(given, end, end + (s - B + 1).to(tl.int64) * W)
    start = end - length
    source = s.to(tl.int64)[:, None] * W + t[None, :]
    inside = t[None, :] < length[:, None]
    token = tl.load(inputs + source, mask=inside & given[:, None], other=0)
    row = start[:, None] + t[None, :]
    tl.store(tokens + row, token, mask=inside & there[:, None] & (row < rows))
    tl.store(bounds + s + 1, tl.minimum(end, rows).to(tl.int32), mask=there)
    tl.store(bounds + s, tl.zeros((SEQUENCES,), tl.int32), mask=s == 0)
    tl.store(at + s, tl.minimum(end, rows) - 1, mask=given)
    tl.store(answers + s, tl.zeros((SEQUENCES,), tl.int64) + ignore, mask=given & (end > rows))
