"""The sum of the rows of a matrix in float32: a program has BC columns and takes BR rows at a time."""

import triton
import triton.language as tl


@triton.jit
def add_up_kernel(parts, total, rows, columns, BC: tl.constexpr, BR: tl.constexpr):
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    found = tl.zeros((BR, BC), tl.float32)
    start = 0
    while start < rows:
        r = start + tl.arange(0, BR)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        found += tl.load(parts + r[:, None] * columns + c[None, :], mask=inside, other=0.0)
        start += BR
    tl.store(total + c, tl.sum(found, axis=0).to(total.dtype.element_ty), mask=c < columns)
