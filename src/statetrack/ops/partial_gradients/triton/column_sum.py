"""Column sums of a matrix in float32, in a fixed order.

    total_c = sum_r partial_{r, c}        partial (rows, columns)

Grid: one program per BC columns. Registers: a tile of BR rows by BC columns of running sums, added over its
rows at the end.
"""

import triton
import triton.language as tl


@triton.jit
def column_sum_kernel(partial, total, rows, columns, BC: tl.constexpr, BR: tl.constexpr):
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    running = tl.zeros((BR, BC), tl.float32)
    start = 0
    while start < rows:
        r = start + tl.arange(0, BR)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        running += tl.load(partial + r[:, None] * columns + c[None, :], mask=inside, other=0.0)
        start += BR
    tl.store(total + c, tl.sum(running, axis=0).to(total.dtype.element_ty), mask=c < columns)
