"""The loss of rows of logits, and the gradient of the logits in their place.

    loss = log(sum_c exp(z_c)) - z_target        dz_c = softmax(z)_c - [c = target]

Grid: one program per row of N logits. It reads the row twice, BN logits at a time: for the running maximum
and sum, and, mostly from cache, for the gradient. Registers: one block. Arithmetic is float32.
"""

import triton
import triton.language as tl


@triton.jit
def row_losses_kernel(
    logits, targets, losses, ignore_index, stride, N: tl.constexpr, BN: tl.constexpr, GRADIENT: tl.constexpr
):
    """The loss of a row, 0 where it does not count; with GRADIENT the row becomes its gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    counts = target != ignore_index
    n = tl.arange(0, BN)
    largest, total = tl.full((BN,), float("-inf"), tl.float32), tl.zeros((BN,), tl.float32)
    start = 0
    while start < N:
        z = tl.load(logits + start + n, mask=start + n < N, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, z)
        # both are -inf in columns past the end, and -inf - -inf is no number
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - shift) + tl.exp(z - shift)
        largest = new
        start += BN
    top = tl.max(largest, axis=0)
    log_sum = tl.log(tl.sum(total * tl.exp(largest - top), axis=0))  # of z - top
    known = (target >= 0) & (target < N)
    hit = tl.load(logits + tl.where(known, target, 0)).to(tl.float32)
    # a target that is no class must not go unnoticed
    loss = tl.where(known, log_sum - (hit - top), float("nan"))
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    if GRADIENT:
        tl.debug_barrier()  # every thread has read the target's logit before any overwrites it
        start = 0
        while start < N:
            inside = start + n < N
            z = tl.load(logits + start + n, mask=inside, other=float("-inf")).to(tl.float32)
            dz = tl.exp((z - top) - log_sum) - tl.where(start + n == target, 1.0, 0.0)
            dz = tl.where(counts, dz, 0.0)
            tl.store(logits + start + n, dz.to(logits.dtype.element_ty), mask=inside)
            start += BN
