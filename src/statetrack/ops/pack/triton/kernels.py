"""Packing of padded sequences into one row: lengths first, then tokens, bounds and answers.

    length_s = 1 + min {t : targets[s, t] != ignore}        row[ends_s - length_s + t] = inputs[s, t]

Grid: one program per SEQUENCES sequences. Registers: their W steps, padded to BW, a power of two. The running
sum `ends` of the lengths is taken by PyTorch between the two kernels.
"""

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
    position = tl.min(tl.where(target != ignore, t[None, :], W), axis=1)
    position = tl.where(position < W, position, 0)
    tl.store(lengths + s, (position + 1).to(tl.int64), mask=s < B)
    tl.store(answers + s, tl.sum(tl.where(t[None, :] == position[:, None], target, 0), axis=1), mask=s < B)


@triton.jit
def pack_kernel(
    inputs, lengths, ends, tokens, bounds, at, answers, ignore, B, fillers, rows,
    W: tl.constexpr, BW: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Sequence s < B copies its tokens; each of the `fillers` takes up to W positions behind them."""
    s = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    t = tl.arange(0, BW)
    given, exists = s < B, s < B + fillers
    end = tl.load(ends + tl.where(given, s, B - 1), mask=exists, other=0)
    length = tl.load(lengths + s, mask=given, other=W)
    end = tl.where(given, end, end + (s - B + 1).to(tl.int64) * W)
    start = end - length
    source = s.to(tl.int64)[:, None] * W + t[None, :]
    inside = t[None, :] < length[:, None]
    token = tl.load(inputs + source, mask=inside & given[:, None], other=0)
    row = start[:, None] + t[None, :]
    tl.store(tokens + row, token, mask=inside & exists[:, None] & (row < rows))
    tl.store(bounds + s + 1, tl.minimum(end, rows).to(tl.int32), mask=exists)
    tl.store(bounds + s, tl.zeros((SEQUENCES,), tl.int32), mask=s == 0)
    tl.store(at + s, tl.minimum(end, rows) - 1, mask=given)
    tl.store(answers + s, tl.zeros((SEQUENCES,), tl.int64) + ignore, mask=given & (end > rows))
