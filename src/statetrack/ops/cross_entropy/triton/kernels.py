"""Cross-entropy: sums per program, their mean over rows that count, and the gradient.

    loss = mean over rows with target != ignore_index of L - (1 - e) x_target - e mean_c x_c + z L^2
    L = log(sum_c exp(x_c))
    dx_c = (softmax(x)_c (1 + 2 z L) - (1 - e) [c = target] - e / N) dloss / count

CENTRED: without the terms of z and e, dx_target is minus the sum of the others as they are rounded.

Grid: one program per ROWS whole rows of N classes; the mean is one program. Registers: a tile (ROWS, BN), N
padded to a power of two. `stride` is the distance between rows of logits; READ values of a row may be read,
more than N where rows are padded and that makes loads wider. Arithmetic is float32.
"""

import triton
import triton.language as tl


@triton.jit
def _load_rows(logits, targets, row, rows, stride, ignore_index, n, N: tl.constexpr, READ: tl.constexpr):
    """Logits less the largest of their row (ROWS, BN), targets, whether these count, log(sum exp) of the
    logits given first, and the largest (ROWS,). Apart, they keep their digits where logits are large.
    """
    target = tl.load(targets + row, mask=row < rows, other=ignore_index)
    counts = (row < rows) & (target != ignore_index)
    inside = (row < rows)[:, None] & (n < READ)[None, :]
    x = tl.load(logits + row[:, None] * stride + n[None, :], mask=inside, other=0.0).to(tl.float32)
    x = tl.where((n < N)[None, :], x, float("-inf"))
    largest = tl.max(x, axis=1)
    x -= largest[:, None]
    return x, target, counts, tl.log(tl.sum(tl.exp(x), axis=1)), largest


@triton.jit
def cross_entropy_kernel(
    logits, targets, sums, counted, rows, stride, ignore_index,
    N: tl.constexpr, READ: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, Z_LOSS: tl.constexpr,
    SMOOTHING: tl.constexpr,
):  # fmt: skip
    """The sum of a program's losses and the number of rows that count."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BN)
    x, target, counts, log_sum, largest = _load_rows(
        logits, targets, row, rows, stride, ignore_index, n, N, READ
    )
    hit = n[None, :] == target[:, None]
    at_target = tl.sum(tl.where(hit, x, 0.0), axis=1)
    loss = log_sum - at_target
    if SMOOTHING > 0:
        loss += SMOOTHING * (at_target - tl.sum(tl.where((n < N)[None, :], x, 0.0), axis=1) / N)
    if Z_LOSS > 0:
        loss += Z_LOSS * (log_sum + largest) * (log_sum + largest)
    # a target that is no class must not go unnoticed
    loss = tl.where((target >= 0) & (target < N), loss, float("nan"))
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(counts, loss, 0.0), axis=0))
    tl.store(counted + tl.program_id(0), tl.sum(counts.to(tl.int32), axis=0))


@triton.jit
def mean_kernel(sums, counted, loss, count, programs, BLOCK: tl.constexpr):
    """The mean of all sums, by one program: the same order of additions every time."""
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
    logits, targets, count, dloss, dlogits, rows, stride, ignore_index,
    N: tl.constexpr, READ: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
    CENTRED: tl.constexpr, Z_LOSS: tl.constexpr, SMOOTHING: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits, zero in rows that do not count."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BN)
    x, target, counts, log_sum, largest = _load_rows(
        logits, targets, row, rows, stride, ignore_index, n, N, READ
    )
    scale = tl.load(dloss).to(tl.float32) / tl.maximum(tl.load(count), 1).to(tl.float32)
    hit = n[None, :] == target[:, None]
    softmax = tl.exp(x - log_sum[:, None])
    if CENTRED:
        dx = tl.where(hit, 0.0, softmax * scale).to(dlogits.dtype.element_ty).to(tl.float32)
        dx = tl.where(hit, -tl.sum(dx, axis=1)[:, None], dx)
    else:
        dx = (softmax - tl.where(hit, 1.0, 0.0)) * scale
    if SMOOTHING > 0:
        dx += SMOOTHING * scale * (tl.where(hit, 1.0, 0.0) - 1.0 / N)
    if Z_LOSS > 0:
        dx += 2.0 * Z_LOSS * scale * (log_sum + largest)[:, None] * softmax
    dx = tl.where(counts[:, None], dx, 0.0)
    inside = (row < rows)[:, None] & (n < N)[None, :]
    tl.store(dlogits + row[:, None] * N + n[None, :], dx.to(dlogits.dtype.element_ty), mask=inside)
