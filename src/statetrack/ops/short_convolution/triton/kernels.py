"""The short convolution of several parts of the rows of x in two Triton kernels. Arithmetic is float32.

Rows of x hold the columns of up to three convolved parts, q, k and v (Q, K and V wide), then of a part r that
passes as it is (R wide), then some that nobody reads. A program has a block of BC columns of one part and
walks along time with the last W values in registers: every number is read once and written once, U steps at
a time so that their loads overlap. Of `items` it takes every so many, one after the other; an item is a piece
of `length` steps (a multiple of U) of one sequence. Sequences are all T long, or PACKED: sequence s has the
rows from cu_seqlens[s] to cu_seqlens[s + 1], and pieces enough for the longest.
"""

import triton
import triton.language as tl

ALL = tl.constexpr(7)  # of SILU: bit i says whether part i has one; ALL also if there are fewer than three
NUMBERS = ["T", "pieces", "length", "items"]  # no new compilation for other lengths


@triton.jit
def _of_part(block, q, k, v, Q: tl.constexpr, K: tl.constexpr, BC: tl.constexpr):
    """That of q, k and v to which this block of columns belongs."""
    return tl.where(block < tl.cdiv(Q, BC), q, tl.where(block < tl.cdiv(Q, BC) + tl.cdiv(K, BC), k, v))


@triton.jit
def _columns(
    block, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, ALIGNED: tl.constexpr
):
    """Of this block's part: its first column in x and its width; and the block's columns, within the part."""
    begin = _of_part(block, 0, Q, Q + K, Q, K, BC)
    if ((K == 0) | (K == Q)) & ((V == 0) | (V == Q)):
        width = Q
    else:
        width = tl.multiple_of(_of_part(block, Q, K, V, Q, K, BC), ALIGNED)
    before = _of_part(block, 0, tl.cdiv(Q, BC), tl.cdiv(Q, BC) + tl.cdiv(K, BC), Q, K, BC)
    return begin, width, (block - before) * BC + tl.arange(0, BC)


@triton.jit
def _sequence(s, cu_seqlens, T, PACKED: tl.constexpr):
    """The first row of sequence s, and its length."""
    if PACKED:
        first = tl.load(cu_seqlens + s).to(tl.int64)
        steps = (tl.load(cu_seqlens + s + 1) - first).to(tl.int32)
    else:
        first, steps = s.to(tl.int64) * T, T
    return first, steps


@triton.jit
def _rows(tensor, stride, c, inside, t, end, COUNT: tl.constexpr):
    """Columns c of COUNT rows, from that of time t on, at `tensor`: float32, zeros unless 0 <= t < end."""
    raw = ()
    for i in tl.static_range(COUNT):
        here = inside & (t + i >= 0) & (t + i < end)
        raw += (tl.load(tensor + i * stride + c, mask=here, other=0.0),)
    rows = ()
    for i in tl.static_range(COUNT):
        rows += (raw[i].to(tl.float32),)
    return rows


@triton.jit
def _taps(weights, c, inside, W: tl.constexpr, FILTERED: tl.constexpr):
    """The weights of the columns c, from (width, W)."""
    taps = ()
    if FILTERED:
        for i in tl.static_range(W):
            taps += (tl.load(weights + c * W + i, mask=inside, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _bias(bias, c, inside, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        found = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    else:
        found = tl.zeros(c.shape, tl.float32)
    return found


@triton.jit
def _filtered(window, taps, bias, J: tl.constexpr, W: tl.constexpr, FILTERED: tl.constexpr):
    """y_J = bias + sum_i taps_i window_{J + i}: the window begins W - 1 steps before the first output."""
    if FILTERED:
        y = bias
        for i in tl.static_range(W):
            y += taps[i] * window[J + i]
    else:
        y = window[J]
    return y


@triton.jit
def _activated(block, SILU: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, BC: tl.constexpr):
    """Whether this block's part goes through a SiLU."""
    return _of_part(block, SILU & 1, SILU & 2, SILU & 4, Q, K, BC) != 0


@triton.jit
def _after_silu(y, activated, SILU: tl.constexpr):
    if SILU == ALL:
        y = y / (1.0 + tl.exp(-y))
    elif SILU != 0:
        y = tl.where(activated, y / (1.0 + tl.exp(-y)), y)
    return y


@triton.jit
def _before_silu(
    dy, window, taps, bias, activated,
    J: tl.constexpr, W: tl.constexpr, FILTERED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The gradient g_J of y_J before its SiLU, if it has one, from the gradient dy_J after it."""
    g = dy
    if SILU != 0:
        y = _filtered(window, taps, bias, J, W, FILTERED)
        s = 1.0 / (1.0 + tl.exp(-y))
        g *= s * (1.0 + y * (1.0 - s))
        if SILU != ALL:
            g = tl.where(activated, g, dy)
    return g


@triton.jit
def _gradients_after(
    x, x_stride, dy, dy_stride, c, inside, t, T, later, taps, bias, activated,
    W: tl.constexpr, FILTERED: tl.constexpr, SILU: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """The gradients before the SiLU of the W - 1 steps from t on: zeros where sequences are not cut."""
    after = ()
    if CUT:
        window = later + _rows(x, x_stride, c, inside, t, T, W - 1)
        dys = _rows(dy, dy_stride, c, inside, t, T, W - 1)
        for j in tl.static_range(W - 1):
            after += (_before_silu(dys[j], window, taps, bias, activated, j, W, FILTERED, SILU),)
    else:
        for _ in tl.static_range(W - 1):
            after += (tl.zeros(inside.shape, tl.float32),)
    return after


@triton.jit
def _pass(
    source, source_stride, target, target_stride, block, item, items, cu_seqlens, T, pieces, length,
    PACKED: tl.constexpr, GIVEN: tl.constexpr, WANTED: tl.constexpr, BR: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A block of columns of `source` as they are; zeros from column GIVEN to column WANTED of `target`."""
    column = block * BR + tl.arange(0, BR)[None, :]
    while item < items:
        first, steps = _sequence(item // pieces, cu_seqlens, T, PACKED)
        t = (item % pieces) * length
        end = tl.minimum(t + length, steps)
        while t < end:
            time = t + tl.arange(0, ROWS)[:, None]
            row, here = first + time, time < end
            value = tl.load(source + row * source_stride + column, mask=here & (column < GIVEN), other=0.0)
            tl.store(target + row * target_stride + column, value, mask=here & (column < WANTED))
            t += ROWS
        item += tl.num_programs(1)


@triton.jit(do_not_specialize=NUMBERS)
def convolution_forward_kernel(
    x, wq, wk, wv, bq, bk, bv, q, k, v, r, cu_seqlens, T, pieces, length, items,
    N: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, FILTERED: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
    ALIGNED: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, BR: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The parts, contiguous, from rows of x that lie N numbers apart."""
    block, item = tl.program_id(0), tl.program_id(1)
    filtered_blocks: tl.constexpr = tl.cdiv(Q, BC) + tl.cdiv(K, BC) + tl.cdiv(V, BC)
    if block < filtered_blocks:
        begin, width, c = _columns(block, Q, K, V, BC, ALIGNED)
        inside = c < width
        out = _of_part(block, q, k, v, Q, K, BC)
        taps = _taps(_of_part(block, wq, wk, wv, Q, K, BC), c, inside, W, FILTERED)
        bias = _bias(_of_part(block, bq, bk, bv, Q, K, BC), c, inside, HAS_BIAS)
        activated = _activated(block, SILU, Q, K, BC)
        while item < items:
            first, steps = _sequence(item // pieces, cu_seqlens, T, PACKED)
            t = (item % pieces) * length
            end = tl.minimum(t + length, steps)
            before = t - (W - 1)
            past = _rows(x + (first + before) * N + begin, N, c, inside, before, end, W - 1)
            while t < end:
                window = past + _rows(x + (first + t) * N + begin, N, c, inside, t, end, U)
                target = out + (first + t) * width
                for j in tl.static_range(U):
                    y = _filtered(window, taps, bias, j, W, FILTERED)
                    y = _after_silu(y, activated, SILU)
                    tl.store(target + j * width + c, y.to(out.dtype.element_ty), mask=inside & (t + j < end))
                past = ()
                for i in tl.static_range(W - 1):
                    past += (window[U + i],)
                t += U
            item += tl.num_programs(1)
    else:
        _pass(
            x + (Q + K + V), N, r, R, block - filtered_blocks, item, items, cu_seqlens, T, pieces, length,
            PACKED, R, R, BR, ROWS,
        )  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def convolution_backward_kernel(
    x, wq, wk, wv, bq, bk, bv, dq, dk, dv, dr, dx, sums, cu_seqlens, T, pieces, length, items,
    N: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, FILTERED: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
    CUT: tl.constexpr, ALIGNED: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, BR: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """dx, in rows of M numbers; and sums over this program's items for the gradients of weights and biases.

    dx_t = sum_i taps_i g_{t + W - 1 - i},  dtaps_i = sum_t g_t x_{t - (W - 1) + i},  dbias = sum_t g_t.
    A program walks from the end to the start, so that the gradients it needs are the last W it has found.
    `sums` has a row per program along time: the weights of q, k and v, then their biases.
    """
    block, item = tl.program_id(0), tl.program_id(1)
    filtered_blocks: tl.constexpr = tl.cdiv(Q, BC) + tl.cdiv(K, BC) + tl.cdiv(V, BC)
    C: tl.constexpr = Q + K + V
    if block < filtered_blocks:
        begin, width, c = _columns(block, Q, K, V, BC, ALIGNED)
        inside = c < width
        dy = _of_part(block, dq, dk, dv, Q, K, BC)
        taps = _taps(_of_part(block, wq, wk, wv, Q, K, BC), c, inside, W, FILTERED)
        bias = _bias(_of_part(block, bq, bk, bv, Q, K, BC), c, inside, HAS_BIAS)
        activated = _activated(block, SILU, Q, K, BC)
        if FILTERED or SILU == ALL:
            read = inside
        else:
            read = inside & activated  # x is of no use to the gradient of a part that passes as it is
        dbias = tl.zeros((BC,), tl.float32)
        dtaps = ()
        for _ in tl.static_range(W if FILTERED else 0):
            dtaps += (dbias,)
        while item < items:
            first, steps = _sequence(item // pieces, cu_seqlens, T, PACKED)
            start = (item % pieces) * length
            # behind the last block of U steps: the W - 1 values before, and the W - 1 gradients after
            t = start + tl.cdiv(tl.maximum(tl.minimum(length, steps - start), 0), U) * U
            before = t - (W - 1)
            later = _rows(x + (first + before) * N + begin, N, c, read, before, steps, W - 1)
            after = _gradients_after(
                x + (first + t) * N + begin, N, dy + (first + t) * width, width, c, inside, t, steps,
                later, taps, bias, activated, W, FILTERED, SILU, CUT,
            )  # fmt: skip
            t -= U
            while t >= start:
                before = t - (W - 1)
                window = _rows(x + (first + before) * N + begin, N, c, read, before, steps, U) + later
                dys = _rows(dy + (first + t) * width, width, c, inside, t, steps, U)
                target = dx + (first + t) * M + begin
                for j in tl.static_range(U - 1, -1, -1):
                    g = _before_silu(dys[j], window, taps, bias, activated, j, W, FILTERED, SILU)
                    if HAS_BIAS:
                        dbias += g
                    if FILTERED:
                        after = (g,) + after  # noqa: RUF005 (Triton knows no stars)
                        total = tl.zeros((BC,), tl.float32)
                        found = ()
                        for i in tl.static_range(W):
                            total += taps[i] * after[W - 1 - i]
                            found += (dtaps[i] + g * window[j + i],)
                        dtaps = found
                    else:
                        total = g
                    here = inside & (t + j < steps)
                    tl.store(target + j * M + c, total.to(dx.dtype.element_ty), mask=here)
                kept, later = (), ()
                for i in tl.static_range(W - 1):
                    kept += (after[i],)
                    later += (window[i],)
                after = kept
                t -= U
            item += tl.num_programs(1)
        own = sums + tl.program_id(1) * (C * (W + 1 if HAS_BIAS else W)) + begin * W
        for i in tl.static_range(W if FILTERED else 0):
            tl.store(own + c * W + i, dtaps[i], mask=inside)
        if HAS_BIAS:
            tl.store(own + (C - begin) * W + begin + c, dbias, mask=inside)
    else:
        _pass(
            dr, R, dx + C, M, block - filtered_blocks, item, items, cu_seqlens, T, pieces, length,
            PACKED, R, M - C, BR, ROWS,
        )  # fmt: skip
