"""The embedding and its gradient, for small and for large vocabularies.

    out = weight[tokens]        dweight = one_hot(tokens)^T dout

Grid: forward (blocks of BT tokens, blocks of BD columns); backward (splits of the tokens, blocks of BD
columns, blocks of BV rows of the table), or for large vocabularies (sorted tokens, blocks of BD columns).
Registers: forward the gathered tile, (BT, BD); backward the running sum of its part of dweight, (BV, BD), to
which a matrix product adds a block of BT tokens at a time, or (ROWS, BD). A product with zeros and ones
needs no sort of the tokens; both add in a fixed order.
"""

import triton
import triton.language as tl


@triton.jit
def embedding_kernel(
    tokens, weight, out, count, V: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    token = tl.load(tokens + t, mask=t < count, other=0)
    known = (token >= 0) & (token < V)
    value = tl.load(
        weight + tl.where(known, token, 0)[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0
    )
    # a token outside the vocabulary must not go unnoticed
    value = tl.where(known[:, None], value, float("nan"))
    tl.store(out + t[:, None] * D + d[None, :], value, mask=(t < count)[:, None] & (d < D)[None, :])


@triton.jit
def embedding_backward_kernel(
    tokens, dout, dweights, count,
    V: tl.constexpr, D: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """A program adds BLOCKS blocks of BT tokens for BV rows and BD columns of the table.

    Zeros and ones are exact on tensor cores; float32 gradients are split into three TF32 terms, so that they
    keep float32 precision.
    """
    split = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    total = tl.zeros((BV, BD), tl.float32)
    for block in range(BLOCKS):
        t = (split * BLOCKS + block) * BT + tl.arange(0, BT)
        token = tl.load(tokens + t, mask=t < count, other=-1)
        inside = (t < count)[:, None] & (d < D)[None, :]
        g = tl.load(dout + t[:, None] * D + d[None, :], mask=inside, other=0.0)
        one_hot = (v[:, None] == token[None, :]).to(g.dtype)
        total = tl.dot(one_hot, g, total, input_precision="tf32x3")
    where = (split * V + v[:, None]) * D + d[None, :]
    tl.store(dweights + where, total, mask=(v < V)[:, None] & (d < D)[None, :])


@triton.jit
def sorted_backward_kernel(
    tokens, order, dout, dweight, count,
    V: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of one row of the table, by the program at the first of its tokens; the others do nothing.

    `tokens` are sorted and `order` says where each stood. Rows that no token names are not written.
    """
    first = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    token = tl.load(tokens + first)
    before = tl.load(tokens + first - 1, mask=first > 0, other=-1)
    if (token != before) & (token >= 0) & (token < V):
        total = tl.zeros((ROWS, BD), tl.float32)
        t = first + tl.arange(0, ROWS)
        equal = ROWS
        while equal == ROWS:
            same = tl.load(tokens + t, mask=t < count, other=-1) == token
            row = tl.load(order + t, mask=same, other=0)
            where = row[:, None] * D + d[None, :]
            total += tl.load(dout + where, mask=same[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
            equal = tl.sum(same.to(tl.int32), axis=0)
            t += ROWS
        value = tl.sum(total, axis=0).to(dweight.dtype.element_ty)
        tl.store(dweight + token.to(tl.int64) * D + d, value, mask=d < D)
