"""Short causal convolutions of several parts of the rows of x, with SiLU, and their gradient.

    y_t = silu(bias + sum_i taps_i x_{t - (W - 1) + i})           per channel, i = 0, ..., W - 1
    dx_t = sum_i taps_i g_{t + (W - 1) - i}                       g_t: the gradient before the SiLU
    dtaps_i = sum_t g_t x_{t - (W - 1) + i}        dbias = sum_t g_t

Rows of x hold the columns of up to three convolved parts, q, k and v (Q, K and V wide), then of a part r that
is copied (R wide), then columns that are not read.

Grid: (blocks of BC columns of q, k and v, then blocks of BR columns of r; programs that share the items). An
item is a piece of `length` steps (a multiple of U) of one sequence; program j takes items j, j + programs,
and so on. Sequences all have T steps, or are PACKED: sequence s has the rows cu_seqlens[s] to
cu_seqlens[s + 1], and pieces enough for the longest. Registers: the last W - 1 values of each column
(backward: of x and of g), and U steps at a time, so that their loads overlap. Every number is read once and
written once. Arithmetic is float32.
"""

import triton
import triton.language as tl

from statetrack.ops.triton_runtime.sigmoid import sigmoid

# SILU is a bit mask, bit i for part i. All three bits are set if every part has one, however many there are.
ALL_SILU = tl.constexpr(7)
RUNTIME = ["T", "pieces", "length", "items"]  # not specialized: no new compilation for other lengths


@triton.jit
def _select_part(block, q, k, v, Q: tl.constexpr, K: tl.constexpr, BC: tl.constexpr):
    """Whichever of q, k and v this block of columns belongs to."""
    return tl.where(block < tl.cdiv(Q, BC), q, tl.where(block < tl.cdiv(Q, BC) + tl.cdiv(K, BC), k, v))


@triton.jit
def _part_columns(
    block, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, ALIGNED: tl.constexpr
):
    """First column in x and width of this block's part, and the block's columns within the part."""
    first_column = _select_part(block, 0, Q, Q + K, Q, K, BC)
    if ((K == 0) | (K == Q)) & ((V == 0) | (V == Q)):
        width = Q
    else:
        width = tl.multiple_of(_select_part(block, Q, K, V, Q, K, BC), ALIGNED)
    blocks_before = _select_part(block, 0, tl.cdiv(Q, BC), tl.cdiv(Q, BC) + tl.cdiv(K, BC), Q, K, BC)
    return first_column, width, (block - blocks_before) * BC + tl.arange(0, BC)


@triton.jit
def _sequence_bounds(s, cu_seqlens, T, PACKED: tl.constexpr):
    """The first row of sequence s, and its length."""
    if PACKED:
        first = tl.load(cu_seqlens + s).to(tl.int64)
        steps = (tl.load(cu_seqlens + s + 1) - first).to(tl.int32)
    else:
        first, steps = s.to(tl.int64) * T, T
    return first, steps


@triton.jit
def _load_rows(tensor, stride, c, inside, t, end, COUNT: tl.constexpr):
    """Columns c of COUNT rows, from that of time t on, at `tensor`: float32, zeros unless 0 <= t < end."""
    raw = ()
    for i in tl.static_range(COUNT):
        in_time = inside & (t + i >= 0) & (t + i < end)
        raw += (tl.load(tensor + i * stride + c, mask=in_time, other=0.0),)
    rows = ()
    for i in tl.static_range(COUNT):
        rows += (raw[i].to(tl.float32),)
    return rows


@triton.jit
def _load_weight(weights, c, inside, W: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """The weights of the columns c, from (width, W)."""
    taps = ()
    if HAS_WEIGHT:
        for i in tl.static_range(W):
            taps += (tl.load(weights + c * W + i, mask=inside, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _load_bias(bias, c, inside, HAS_BIAS: tl.constexpr):
    """The bias of the columns c, zeros if there is none."""
    if HAS_BIAS:
        value = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    else:
        value = tl.zeros(c.shape, tl.float32)
    return value


@triton.jit
def _convolve(window, taps, bias, J: tl.constexpr, W: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """y_J = bias + sum_i taps_i window_{J + i}: the window begins W - 1 steps before the first output."""
    if HAS_WEIGHT:
        y = bias
        for i in tl.static_range(W):
            y += taps[i] * window[J + i]
    else:
        y = window[J]
    return y


@triton.jit
def _part_has_silu(block, SILU: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, BC: tl.constexpr):
    """Whether this block's part goes through a SiLU."""
    return _select_part(block, SILU & 1, SILU & 2, SILU & 4, Q, K, BC) != 0


@triton.jit
def _apply_silu(y, has_silu, SILU: tl.constexpr):
    """silu(y), or y where the part has none."""
    if SILU == ALL_SILU:
        y = y * sigmoid(y)
    elif SILU != 0:
        y = tl.where(has_silu, y * sigmoid(y), y)
    return y


@triton.jit
def _silu_backward(
    dy, window, taps, bias, has_silu,
    J: tl.constexpr, W: tl.constexpr, HAS_WEIGHT: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The gradient g_J of y_J before its SiLU, if it has one, from the gradient dy_J after it."""
    g = dy
    if SILU != 0:
        y = _convolve(window, taps, bias, J, W, HAS_WEIGHT)
        s = sigmoid(y)
        g *= s * (1.0 + y * (1.0 - s))
        if SILU != ALL_SILU:
            g = tl.where(has_silu, g, dy)
    return g


@triton.jit
def _load_later_gradients(
    x, x_stride, dy, dy_stride, c, inside, t, T, x_later, taps, bias, has_silu,
    W: tl.constexpr, HAS_WEIGHT: tl.constexpr, SILU: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The gradients before the SiLU of the W - 1 steps from t on; zeros unless SPLIT: no piece follows."""
    g_later = ()
    if SPLIT:
        window = x_later + _load_rows(x, x_stride, c, inside, t, T, W - 1)
        dys = _load_rows(dy, dy_stride, c, inside, t, T, W - 1)
        for j in tl.static_range(W - 1):
            g_later += (_silu_backward(dys[j], window, taps, bias, has_silu, j, W, HAS_WEIGHT, SILU),)
    else:
        for _ in tl.static_range(W - 1):
            g_later += (tl.zeros(inside.shape, tl.float32),)
    return g_later


@triton.jit
def _copy_columns(
    source, source_stride, target, target_stride, block, item, items, cu_seqlens, T, pieces, length,
    PACKED: tl.constexpr, SOURCE_WIDTH: tl.constexpr, TARGET_WIDTH: tl.constexpr, BR: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Copy a block of columns of `source`; zeros in columns SOURCE_WIDTH to TARGET_WIDTH of `target`."""
    column = block * BR + tl.arange(0, BR)[None, :]
    while item < items:
        first, steps = _sequence_bounds(item // pieces, cu_seqlens, T, PACKED)
        t = (item % pieces) * length
        end = tl.minimum(t + length, steps)
        while t < end:
            time = t + tl.arange(0, ROWS)[:, None]
            row, in_time = first + time, time < end
            in_source = in_time & (column < SOURCE_WIDTH)
            value = tl.load(source + row * source_stride + column, mask=in_source, other=0.0)
            tl.store(target + row * target_stride + column, value, mask=in_time & (column < TARGET_WIDTH))
            t += ROWS
        item += tl.num_programs(1)


@triton.jit(do_not_specialize=RUNTIME)
def convolution_forward_kernel(
    x, wq, wk, wv, bq, bk, bv, q, k, v, r, cu_seqlens, T, pieces, length, items,
    N: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    PACKED: tl.constexpr, ALIGNED: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, BR: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The parts, contiguous, from rows of x with a stride of N numbers."""
    block, item = tl.program_id(0), tl.program_id(1)
    convolved_blocks: tl.constexpr = tl.cdiv(Q, BC) + tl.cdiv(K, BC) + tl.cdiv(V, BC)
    if block < convolved_blocks:
        first_column, width, c = _part_columns(block, Q, K, V, BC, ALIGNED)
        inside = c < width
        out = _select_part(block, q, k, v, Q, K, BC)
        taps = _load_weight(_select_part(block, wq, wk, wv, Q, K, BC), c, inside, W, HAS_WEIGHT)
        bias = _load_bias(_select_part(block, bq, bk, bv, Q, K, BC), c, inside, HAS_BIAS)
        has_silu = _part_has_silu(block, SILU, Q, K, BC)
        while item < items:
            first, steps = _sequence_bounds(item // pieces, cu_seqlens, T, PACKED)
            t = (item % pieces) * length
            end = tl.minimum(t + length, steps)
            t_before = t - (W - 1)
            x_before = _load_rows(
                x + (first + t_before) * N + first_column, N, c, inside, t_before, end, W - 1
            )
            while t < end:
                window = x_before + _load_rows(x + (first + t) * N + first_column, N, c, inside, t, end, U)
                target = out + (first + t) * width
                for j in tl.static_range(U):
                    y = _convolve(window, taps, bias, j, W, HAS_WEIGHT)
                    y = _apply_silu(y, has_silu, SILU)
                    tl.store(target + j * width + c, y.to(out.dtype.element_ty), mask=inside & (t + j < end))
                x_before = ()
                for i in tl.static_range(W - 1):
                    x_before += (window[U + i],)
                t += U
            item += tl.num_programs(1)
    else:
        _copy_columns(
            x + (Q + K + V), N, r, R, block - convolved_blocks, item, items, cu_seqlens, T, pieces, length,
            PACKED, R, R, BR, ROWS,
        )  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def convolution_backward_kernel(
    x, wq, wk, wv, bq, bk, bv, dq, dk, dv, dr, dx, partial, cu_seqlens, T, pieces, length, items,
    N: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    PACKED: tl.constexpr, SPLIT: tl.constexpr, ALIGNED: tl.constexpr, BC: tl.constexpr, U: tl.constexpr,
    BR: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx, in rows of M numbers, and the partial gradients of weights and biases over this program's items.

    dx_t needs g_t, ..., g_{t + W - 1}: a program goes backward in time, so these are the last W it computed.
    `partial` has a row per program along items: the weights of q, k and v, then their biases.
    """
    block, item = tl.program_id(0), tl.program_id(1)
    convolved_blocks: tl.constexpr = tl.cdiv(Q, BC) + tl.cdiv(K, BC) + tl.cdiv(V, BC)
    C: tl.constexpr = Q + K + V
    if block < convolved_blocks:
        first_column, width, c = _part_columns(block, Q, K, V, BC, ALIGNED)
        inside = c < width
        dy = _select_part(block, dq, dk, dv, Q, K, BC)
        taps = _load_weight(_select_part(block, wq, wk, wv, Q, K, BC), c, inside, W, HAS_WEIGHT)
        bias = _load_bias(_select_part(block, bq, bk, bv, Q, K, BC), c, inside, HAS_BIAS)
        has_silu = _part_has_silu(block, SILU, Q, K, BC)
        if HAS_WEIGHT or SILU == ALL_SILU:
            read = inside
        else:
            read = inside & has_silu  # the gradient of a part that is copied does not need x
        dbias = tl.zeros((BC,), tl.float32)
        dtaps = ()
        for _ in tl.static_range(W if HAS_WEIGHT else 0):
            dtaps += (dbias,)
        while item < items:
            first, steps = _sequence_bounds(item // pieces, cu_seqlens, T, PACKED)
            start = (item % pieces) * length
            # At the end of the piece: the W - 1 values of x before t, and the W - 1 gradients from t on.
            t = start + tl.cdiv(tl.maximum(tl.minimum(length, steps - start), 0), U) * U
            t_before = t - (W - 1)
            x_later = _load_rows(
                x + (first + t_before) * N + first_column, N, c, read, t_before, steps, W - 1
            )
            g_later = _load_later_gradients(
                x + (first + t) * N + first_column, N, dy + (first + t) * width, width, c, inside, t, steps,
                x_later, taps, bias, has_silu, W, HAS_WEIGHT, SILU, SPLIT,
            )  # fmt: skip
            t -= U
            while t >= start:
                t_before = t - (W - 1)
                window = (
                    _load_rows(x + (first + t_before) * N + first_column, N, c, read, t_before, steps, U)
                    + x_later
                )
                dys = _load_rows(dy + (first + t) * width, width, c, inside, t, steps, U)
                target = dx + (first + t) * M + first_column
                for j in tl.static_range(U - 1, -1, -1):
                    g = _silu_backward(dys[j], window, taps, bias, has_silu, j, W, HAS_WEIGHT, SILU)
                    if HAS_BIAS:
                        dbias += g
                    if HAS_WEIGHT:
                        g_later = (g,) + g_later  # noqa: RUF005 (no unpacking in Triton)
                        dx_t = tl.zeros((BC,), tl.float32)
                        dtaps_next = ()
                        for i in tl.static_range(W):
                            dx_t += taps[i] * g_later[W - 1 - i]
                            dtaps_next += (dtaps[i] + g * window[j + i],)
                        dtaps = dtaps_next
                    else:
                        dx_t = g
                    in_time = inside & (t + j < steps)
                    tl.store(target + j * M + c, dx_t.to(dx.dtype.element_ty), mask=in_time)
                g_kept, x_later = (), ()
                for i in tl.static_range(W - 1):
                    g_kept += (g_later[i],)
                    x_later += (window[i],)
                g_later = g_kept
                t -= U
            item += tl.num_programs(1)
        own = partial + tl.program_id(1) * (C * (W + 1 if HAS_BIAS else W)) + first_column * W
        for i in tl.static_range(W if HAS_WEIGHT else 0):
            tl.store(own + c * W + i, dtaps[i], mask=inside)
        if HAS_BIAS:
            tl.store(own + (C - first_column) * W + first_column + c, dbias, mask=inside)
    else:
        _copy_columns(
            dr, R, dx + C, M, block - convolved_blocks, item, items, cu_seqlens, T, pieces, length,
            PACKED, R, M - C, BR, ROWS,
        )  # fmt: skip
