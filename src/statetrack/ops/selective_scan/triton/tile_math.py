"""Arithmetic on tiles: the recurrence along time, sums over channels, softplus, and the transition a.

A tile is L steps by BD channels, with channels along the lanes of a warp and steps in the registers of each
lane. The recurrence along time is then a chain of fused multiply-adds in one thread, without a shuffle.
Selecting, shifting and reversing rows look expensive and are free: the compiler knows which register holds
a row, so these operations only rename registers. They work on the bits as integers, because the compiler
simplifies x + 0 and x * 1 for integers only.

The transition enters as e, not as a (docs/internals/selective_scan.md, "Eigenvalues in [-1,1]"):

    e = exp(delta A),    a = e        unless SIGNED
    e = 2 exp(delta A),  a = e - 1    if SIGNED        so a h + x = e h + (x - h)
"""

import os

import triton
import triton.language as tl

# After a branch on a constexpr the compiler continues, so the other branch needs its `else`.
# ruff: noqa: RET505

COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _compose(a1, x1, a2, x2):
    """h -> a1 h + x1, and then h -> a2 h + x2."""
    return a1 * a2, a2 * x1 + x2


@triton.jit
def scan_rows_with_decays(a, x, h_in, row):
    """The products of a_t and h_t = a_t h_{t-1} + x_t down the rows, with `h_in` before row 0."""
    return tl.associative_scan((a, tl.where(row == 0, a * h_in[None, :] + x, x)), 0, _compose)


@triton.jit
def _compose_signed(e1, x1, e2, x2):
    """`_compose` in terms of e = a + 1."""
    return (e1 - 1.0) * (e2 - 1.0) + 1.0, e2 * x1 + (x2 - x1)


@triton.jit
def scan_rows(e, x, SIGNED: tl.constexpr):
    """h_t = a_t h_{t-1} + x_t down the rows, with h = x in row 0."""
    if SIGNED:
        _, h = tl.associative_scan((e, x), 0, _compose_signed)
    else:
        _, h = tl.associative_scan((e, x), 0, _compose)
    return h


@triton.jit
def recurrence_step(e, h, x, SIGNED: tl.constexpr):
    """One step of the recurrence, a h + x."""
    if SIGNED:
        return e * h + (x - h)
    else:
        return e * h + x


@triton.jit
def scan_rows_from(e, x, h_in, row, SIGNED: tl.constexpr):
    """h_t = a_t h_{t-1} + x_t down the rows, with `h_in` before row 0: it enters in row 0 only."""
    return scan_rows(e, tl.where(row == 0, recurrence_step(e, h_in[None, :], x, SIGNED), x), SIGNED)


@triton.jit
def _previous_row(x1, single1, previous1, x2, single2, previous2):
    """Combine two runs of rows; `previous` is the row before the last one, if the run has several."""
    return x2, single2 * 0, single2 * x1 + previous2


@triton.jit
def shift_rows(x, first, row):
    """Every row of x one further down, `first` in row 0."""
    single = tl.full(x.shape, 1, tl.int32)
    previous = tl.where(row == 0, first[None, :].to(tl.int32, bitcast=True), 0)
    _, _, previous = tl.associative_scan((x.to(tl.int32, bitcast=True), single, previous), 0, _previous_row)
    return previous.to(tl.float32, bitcast=True)


@triton.jit
def select_row(x, row, ROW: tl.constexpr):
    """x[ROW], (BD,)."""
    bits = tl.where(row == ROW, x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def _add_lane_pairs(low, high, lane, R: tl.constexpr, W: tl.constexpr, DISTANCE: tl.constexpr):
    """Sums over pairs of lanes: of `low` where lane // DISTANCE is even, of `high` where it is odd."""
    odd = ((lane // DISTANCE) % 2 == 1)[None, :]
    send = tl.where(odd, low, high).to(tl.int32, bitcast=True)
    pairs = tl.reshape(send, (R, W // (2 * DISTANCE), 2, DISTANCE))
    # The exclusive or of a pair with one of the two is the other one: a single shuffle.
    received = tl.reshape(tl.xor_sum(pairs, axis=2, keep_dims=True) ^ pairs, (R, W))
    return tl.where(odd, high, low) + received.to(tl.float32, bitcast=True)


@triton.jit
def _halve_rows(x, lane, R: tl.constexpr, W: tl.constexpr, DISTANCE: tl.constexpr):
    """One exchange between lanes: R rows become R / 2, each summed over pairs of lanes."""
    low, high = tl.split(tl.permute(tl.reshape(x, (2, R // 2, W)), (1, 2, 0)))
    return _add_lane_pairs(low, high, lane, R // 2, W, DISTANCE)


@triton.jit
def sum_over_channels(x, y, L: tl.constexpr, BD: tl.constexpr):
    """The sums of two tiles over their channels, as one vector of 2 L numbers: those of x, then those of y.

    Each exchange between lanes halves the rows a lane still holds, so 2 L sums over 32 lanes take 2 L
    shuffles in total instead of five each.
    """
    tl.static_assert(L <= 16)
    W: tl.constexpr = min(BD, 32)  # pyright: ignore[reportArgumentType, reportAssignmentType]
    if BD > W:  # a lane has several neighbouring channels
        x = tl.sum(tl.reshape(x, (L, W, BD // W)), axis=2)
        y = tl.sum(tl.reshape(y, (L, W, BD // W)), axis=2)
    lane = tl.arange(0, W)
    sums = _add_lane_pairs(x, y, lane, L, W, W // 2)
    if L >= 2:
        sums = _halve_rows(sums, lane, L, W, W // 4)
    if L >= 4:
        sums = _halve_rows(sums, lane, L // 2, W, W // 8)
    if L >= 8:
        sums = _halve_rows(sums, lane, L // 4, W, W // 16)
    if L >= 16:
        sums = _halve_rows(sums, lane, L // 8, W, W // 32)
    return tl.sum(tl.reshape(sums, (2 * L, W // (2 * L))), axis=1)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), by a reciprocal square root: cheaper than a division."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return root * root


@triton.jit
def _log2(x):
    if COMPILED:  # one instruction; tl.log2 takes twenty, for the last two bits
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.log2(x)


@triton.jit
def opaque(i):
    """i, as a value the compiler cannot trace back to i.

    Addresses computed from it are therefore computed after it, and occupy no registers before.
    """
    if COMPILED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], tl.int32, False, 1)
    else:
        return i


@triton.jit
def softplus(x):
    """log(1 + exp(x)): x above 20, a series where exp(x) is small, so that small values stay accurate."""
    e = tl.exp2(tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL) * LOG2_E)
    series = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * (0.25 - e * 0.2))))
    return tl.where(x > 20.0, x, tl.where(e < 0.0625, series, _log2(1.0 + e) * LN_2))


@triton.jit
def softplus_derivative(s):
    """The derivative of softplus where its value is s: 1 - exp(-s)."""
    series = s * (1.0 - s * (0.5 - s * (1.0 / 6.0 - s * (1.0 / 24.0 - s * (1.0 / 120.0)))))
    return tl.where(s < 0.0625, series, 1.0 - tl.exp2(s * -LOG2_E))


@triton.jit
def step_sizes(delta, delta_bias, d, in_d, HAS_DELTA_BIAS: tl.constexpr, DELTA_SOFTPLUS: tl.constexpr):
    """A tile of delta as the recurrence takes it: with the bias of its channels, and through softplus."""
    if HAS_DELTA_BIAS:
        delta += tl.load(delta_bias + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
    if DELTA_SOFTPLUS:
        delta = softplus(delta)
    return delta


@triton.jit
def transition(exponent, SIGNED: tl.constexpr):
    """a = exp(delta A) or 2 exp(delta A) - 1, from delta A in base two."""
    if SIGNED:
        return tl.exp2(exponent + 1.0) - 1.0
    else:
        return tl.exp2(exponent)


@triton.jit
def transition_exp(exponent, SIGNED: tl.constexpr):
    """e = exp(delta A) or 2 exp(delta A), from delta A in base two: also the derivative of a in delta A."""
    if SIGNED:
        return tl.exp2(exponent + 1.0)
    else:
        return tl.exp2(exponent)
