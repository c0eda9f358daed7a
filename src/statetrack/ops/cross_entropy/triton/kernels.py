"""Cross-entropy in three Triton kernels: sums per program, their mean, the gradient. Arithmetic is float32.

A program has ROWS whole rows of N classes, padded to BN; `stride` is the distance of two rows of logits, of
whose values READ may be read: more than N where that makes for wider loads.
"""

import triton
import triton.language as tl


@triton.jit
def _rows(logits, targets, row, rows, stride, ignore, n, N: tl.constexpr, READ: tl.constexpr):
    """Logits (ROWS, BN), targets and whether they count (ROWS,), and log(sum exp) of each row."""
    target = tl.load(targets + row, mask=row < rows, other=ignore)
    counts = (row < rows) & (target != ignore)
    inside = (row < rows)[:, None] & (n < READ)[None, :]
    x = tl.load(logits + row[:, None] * stride + n[None, :], mask=inside, other=0.0).to(tl.float32)
    x = tl.where((n < N)[None, :], x, float("-inf"))
    largest = tl.max(x, axis=1)
    return x, target, counts, largest + tl.log(tl.sum(tl.exp(x - largest[:, None]), axis=1))


@triton.jit
def cross_entropy_kernel(
    logits, targets, sums, counted, rows, stride, ignore,
    N: tl.constexpr, READ: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sum of a program's losses and the number of rows that count."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BN)
    x, target, counts, total = _rows(logits, targets, row, rows, stride, ignore, n, N, READ)
    hit = n[None, :] == target[:, None]
    loss = total - tl.sum(tl.where(hit, x, 0.0), axis=1)
    # a target that is no class must not pass unseen
    loss = tl.where((target >= 0) & (target < N), loss, float("nan"))
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(counts, loss, 0.0), axis=0))
    tl.store(counted + tl.program_id(0), tl.sum(counts.to(tl.int32), axis=0))


@triton.jit
def mean_kernel(sums, counted, loss, count, programs, BLOCK: tl.constexpr):
    """One program: the same order of additions every time."""
    total, number = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    start = 0
    while start < programs:
        i = start + tl.arange(0, BLOCK)
        total += tl.load(sums + i, mask=i < programs, other=0.0)
        number += tl.load(counted + i, mask=i < programs, other=0)
        start += BLOCK
    n = tl.sum(number, axis=0)
    tl.store(count, n)
    mean = tl.sum(total, axis=0) / tl.maximum(n, 1).to(tl.float32)
    tl.store(loss, tl.where(n > 0, mean, float("nan")))


@triton.jit
def cross_entropy_backward_kernel(
    logits, targets, count, dloss, dlogits, rows, stride, ignore,
    N: tl.constexpr, READ: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(softmax - one-hot) dloss / count, zero in rows that do not count."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BN)
    x, target, counts, total = _rows(logits, targets, row, rows, stride, ignore, n, N, READ)
    scale = tl.load(dloss).to(tl.float32) / tl.maximum(tl.load(count), 1).to(tl.float32)
    hit = n[None, :] == target[:, None]
    dx = (tl.exp(x - total[:, None]) - tl.where(hit, 1.0, 0.0)) * scale
    dx = tl.where(counts[:, None], dx, 0.0)
    inside = (row < rows)[:, None] & (n < N)[None, :]
    tl.store(dlogits + row[:, None] * N + n[None, :], dx.to(dlogits.dtype.element_ty), mask=inside)
