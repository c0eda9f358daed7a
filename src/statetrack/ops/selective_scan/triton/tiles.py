"""What the Triton kernels of the selective scan share: tiles of L steps by BD channels, and sums over either.

A warp holds a tile with its channels along the lanes and its steps in each lane's registers. The recurrence
along time is then a chain of fused multiply-adds in one thread, without a shuffle. Three idioms below look
costlier than they are: the compiler sees which register a row is, so choosing, shifting and reversing rows
only renames registers. They go through integers because x + 0 and x * 1 are simplified for integers alone.
"""

import os
from typing import Any

import triton
import triton.language as tl

# After a branch on a constant the compiler reads on, so the other one needs its `else`.
# ruff: noqa: RET505

COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# How a (batch, channels, time) tensor lies in memory: which index has stride 1.
BY_CHANNEL, BY_TIME, BY_NEITHER = 0, 1, 2

# Integers the compiler must not look at. It would use their divisibility to load several neighbouring
# channels per thread and move steps to other lanes; it also keeps the number of compiled variants down.
RUNTIME = ["batch", "channels", "T", "tiles", "each", "segments", "blocks", "rows", "columns", "number"]
RUNTIME += [f"{x}_{i}" for x in ("u", "delta", "z", "out", "dout", "du") for i in "bdt"]
RUNTIME += [f"{x}_{i}" for x in ("B", "C", "dB", "dC") for i in "bnt"]
RUNTIME += [f"{x}_{i}" for x in ("state", "last", "dlast") for i in "bdn"] + ["A_d", "A_n"]


def kernel(function) -> Any:
    """`triton.jit` that leaves the integers of `RUNTIME` alone."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    jit: Any = triton.jit
    return jit(function, do_not_specialize=[name for name in names if name in RUNTIME])


@triton.jit
def _compose(a1, x1, a2, x2):
    return a1 * a2, a2 * x1 + x2


@triton.jit
def scan_rows(a, x, first, row):
    """h_t = a_t h_{t-1} + x_t down the rows, with `first` before row 0; and the products of the a."""
    return tl.associative_scan((a, tl.where(row == 0, a * first[None, :] + x, x)), 0, _compose)


@triton.jit
def _compose_shifted(a1, x1, a2, x2):
    return (a1 - 1.0) * (a2 - 1.0) + 1.0, a2 * x1 + (x2 - x1)


@triton.jit
def walk_rows(a, x, EXTENDED: tl.constexpr):
    """h_t = a_t h_{t-1} + x_t down the rows, h = x in row 0. EXTENDED: `a` is a_t + 1, 2 exp(delta A)."""
    if EXTENDED:
        _, h = tl.associative_scan((a, x), 0, _compose_shifted)
    else:
        _, h = tl.associative_scan((a, x), 0, _compose)
    return h


@triton.jit
def advance(a, h, x, EXTENDED: tl.constexpr):
    """One step, a h + x; `a` as in `walk_rows`."""
    if EXTENDED:
        return a * h + (x - h)
    else:
        return a * h + x


@triton.jit
def _follow(x1, single1, before1, x2, single2, before2):
    return x2, single2 * 0, single2 * x1 + before2


@triton.jit
def shift_rows(x, first, row):
    """Every row of x one further down, `first` in row 0."""
    single = tl.full(x.shape, 1, tl.int32)
    before = tl.where(row == 0, first[None, :].to(tl.int32, bitcast=True), 0)
    _, _, before = tl.associative_scan((x.to(tl.int32, bitcast=True), single, before), 0, _follow)
    return before.to(tl.float32, bitcast=True)


@triton.jit
def take_row(x, row, ROW: tl.constexpr):
    bits = tl.where(row == ROW, x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def _fold(low, high, lane, R: tl.constexpr, W: tl.constexpr, APART: tl.constexpr):
    """Sums over pairs of lanes: of `low` where lane // APART is even, of `high` where it is odd."""
    odd = ((lane // APART) % 2 == 1)[None, :]
    send = tl.where(odd, low, high).to(tl.int32, bitcast=True)
    pairs = tl.reshape(send, (R, W // (2 * APART), 2, APART))
    # Exclusive or of a pair with one of the two is the other: one shuffle.
    received = tl.reshape(tl.xor_sum(pairs, axis=2, keep_dims=True) ^ pairs, (R, W))
    return tl.where(odd, high, low) + received.to(tl.float32, bitcast=True)


@triton.jit
def _halve(x, lane, R: tl.constexpr, W: tl.constexpr, APART: tl.constexpr):
    low, high = tl.split(tl.permute(tl.reshape(x, (2, R // 2, W)), (1, 2, 0)))
    return _fold(low, high, lane, R // 2, W, APART)


@triton.jit
def sum_channels(x, y, L: tl.constexpr, BD: tl.constexpr):
    """The sums of two tiles over their channels, as one vector of 2 L numbers: those of x, then those of y.

    Each exchange between lanes halves the rows a lane still holds, so 2 L sums over 32 lanes take 2 L
    shuffles in all instead of five each.
    """
    tl.static_assert(L <= 16)
    W: tl.constexpr = min(BD, 32)  # pyright: ignore[reportArgumentType, reportAssignmentType]
    if BD > W:  # a lane has neighbouring channels
        x = tl.sum(tl.reshape(x, (L, W, BD // W)), axis=2)
        y = tl.sum(tl.reshape(y, (L, W, BD // W)), axis=2)
    lane = tl.arange(0, W)
    sums = _fold(x, y, lane, L, W, W // 2)
    if L >= 2:
        sums = _halve(sums, lane, L, W, W // 4)
    if L >= 4:
        sums = _halve(sums, lane, L // 2, W, W // 8)
    if L >= 8:
        sums = _halve(sums, lane, L // 4, W, W // 16)
    if L >= 16:
        sums = _halve(sums, lane, L // 8, W, W // 32)
    return tl.sum(tl.reshape(sums, (2 * L, W // (2 * L))), axis=1)


@triton.jit
def sigmoid(x):
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return root * root


@triton.jit
def _log2(x):
    if COMPILED:  # one instruction; tl.log2 takes twenty for the last two bits
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.log2(x)


@triton.jit
def opaque(i):
    """i, computed anew as far as the compiler can tell: what follows from it takes no registers before."""
    if COMPILED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], tl.int32, False, 1)
    else:
        return i


@triton.jit
def softplus(x):
    e = tl.exp2(tl.minimum(x, 20.0) * LOG2_E)
    series = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * (0.25 - e * 0.2))))
    return tl.where(x > 20.0, x, tl.where(e < 0.0625, series, _log2(1.0 + e) * LN_2))


@triton.jit
def with_bias(step, bias, d, in_d, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr):
    """A tile of delta as the recurrence takes it: with the bias of its channels, and through softplus."""
    if HAS_BIAS:
        step += tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
    if SOFTPLUS:
        step = softplus(step)
    return step


@triton.jit
def softplus_slope(s):
    """The derivative of softplus where its value is s: 1 - exp(-s)."""
    series = s * (1.0 - s * (0.5 - s * (1.0 / 6.0 - s * (1.0 / 24.0 - s * (1.0 / 120.0)))))
    return tl.where(s < 0.0625, series, 1.0 - tl.exp2(s * -LOG2_E))


@triton.jit
def transition(exponent, EXTENDED: tl.constexpr):
    """a = exp(delta A) or 2 exp(delta A) - 1, from delta A in base two."""
    if EXTENDED:
        return tl.exp2(exponent + 1.0) - 1.0
    else:
        return tl.exp2(exponent)


@triton.jit
def transition_slope(exponent, EXTENDED: tl.constexpr):
    """The derivative of a in delta A: exp(delta A) or 2 exp(delta A), from delta A in base two."""
    if EXTENDED:
        return tl.exp2(exponent + 1.0)
    else:
        return tl.exp2(exponent)


@triton.jit
def by_eight(x):
    """x, a multiple of eight, so that the compiler knows it is one and loads 16 bytes at once."""
    return (x // 8) * 8


@triton.jit
def by_two(x):
    """x, an even number, so that the compiler knows it is one and loads two channels at once."""
    return (x // 2) * 2


@triton.jit
def strides(x_b, x_d, x_t, LIES: tl.constexpr, VECTOR: tl.constexpr, PAIRS: tl.constexpr):
    """The same, with what is known of them: multiples of eight where VECTOR and by time, even where PAIRS."""
    if VECTOR and LIES == 1:
        x_b, x_d = by_eight(x_b), by_eight(x_d)
    if PAIRS:
        x_b, x_t = by_two(x_b), by_two(x_t)
    return x_b, x_d, x_t


@triton.jit
def packed_sequence(cu_seqlens, s, L: tl.constexpr):
    """First step, length and tiles of packed sequence s, and 1 if the last tile is half a one.

    An empty sequence has a tile too, with no step inside: it hands the state on.
    """
    start = tl.load(cu_seqlens + s).to(tl.int64)
    T = (tl.load(cu_seqlens + s + 1).to(tl.int64) - start).to(tl.int32)
    up = T + L - 1
    return start, T, tl.maximum(up // L, 1), (up % L < L // 2).to(tl.int32)


@triton.jit
def first_step(x, b, start, x_b, x_t, PACKED: tl.constexpr):
    """Pointer to the first step of sequence b, which is step `start` of the one row if PACKED."""
    if PACKED:
        return x + start * x_t
    else:
        return x + b * x_b


@triton.jit
def offsets(x_d, x_t, d, t, LIES: tl.constexpr):
    """Of a tile inside one sequence. The stride that is 1 is left out, so that the compiler knows it."""
    if LIES == 0:
        return t * x_t + d[None, :]
    elif LIES == 1:
        return (d * x_d)[None, :] + t
    else:
        return (d * x_d)[None, :] + t * x_t


@triton.jit
def load_tile(pointers, inside, FULL: tl.constexpr):
    """A tile in float32. FULL: every tile of this call lies inside the tensor."""
    if FULL:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tile(pointers, x, inside, FULL: tl.constexpr):
    if FULL:
        tl.store(pointers, x.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def lanes_along_channels(like, d, t, unknown):
    """Zeros whose layout, a channel per lane, the compiler carries over to whatever they are added to.

    It lays out a computation like the last load that feeds it. Tensors with time innermost are loaded with
    lanes along time; this load of nothing comes after theirs, so they are transposed through shared memory.
    """
    return tl.load(like + t * unknown + d[None, :], mask=unknown < 0, other=0.0).to(tl.float32)


@triton.jit
def two_rows(B, C, t, B_t, C_t):
    """Pointers to B_t and C_t side by side, (steps, 2): one load and one trip through shared memory."""
    return tl.where(tl.arange(0, 2)[None, :] == 0, B + t * B_t, C + t * C_t)


@triton.jit
def split_rows(pair, L: tl.constexpr):
    """B and C, (L,) each, from what `two_rows` points at; there may be a second copy below the first."""
    if pair.shape[0] == L:
        return tl.split(pair)
    else:
        copies = tl.reshape(pair, (2, pair.shape[0] // 2, 2))
        once, _ = tl.split(tl.permute(copies, (1, 2, 0)))
        return split_rows(once, L)
