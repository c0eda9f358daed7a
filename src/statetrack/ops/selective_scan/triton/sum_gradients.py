"""The last kernel of the backward: partial gradients summed (docs/internals/selective_scan.md, "Backward").

    dA, dD, ddelta_bias = sum over sequences and segments    of `dparams` (rows, N + 2, channels)
    dB, dC              = sum over blocks of channels        of `dBC` (channel_blocks, batch, tiles, N, 2 L)

`tiled_backward_kernel` leaves these partial sums. They are added here in a fixed order, without atomics, so
results repeat bit by bit.

Grid: `columns` programs for `dparams`, each with BW of its columns, BR rows at a time; and behind them one
program per BT tiles of dBC, BK blocks of channels at a time. Registers: the partial sums of these.
"""

import triton.language as tl

from statetrack.ops.selective_scan.triton.jit import scan_jit


@scan_jit
def sum_gradients_kernel(
    dBC, dparams, dB, dC, dA, dD, ddelta_bias, channel_blocks, batch, channels, T, tiles, rows, columns,
    dB_b, dB_n, dB_t, dC_b, dC_n, dC_t,
    N: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    if item < columns:
        column = item * BW + tl.arange(0, BW)
        width = (N + 2) * channels
        part = tl.zeros((BR, BW), tl.float32)
        j = 0
        while j < rows:
            r = j + tl.arange(0, BR)[:, None]
            at = dparams + r.to(tl.int64) * width + column[None, :]
            part += tl.load(at, mask=(r < rows) & (column < width)[None, :], other=0.0)
            j += BR
        total = tl.sum(part, axis=0)
        n, d = column // channels, column % channels
        tl.store(dA + d * N + n, total, mask=n < N)
        tl.store(dD + d, total, mask=n == N)
        tl.store(ddelta_bias + d, total, mask=n == N + 1)
    else:
        # element i of BT tiles, (tile, state, 2 L): the first L of 2 L are steps of dB, the others of dC
        i = tl.arange(0, BT * BN * 2 * L)
        tile = (item - columns).to(tl.int64) * BT + i // (BN * 2 * L)
        b, state, BC_row = tile // tiles, i // (2 * L) % BN, i % (2 * L)
        t = (tile % tiles) * L + BC_row % L
        inside = (
            (b < batch) & (state < N) & (t < T)
        )  # a half tile leaves the other half of its place unwritten
        at_tile = dBC + (tile * N + state) * 2 * L + BC_row
        block_stride = batch.to(tl.int64) * tiles * N * 2 * L
        block_sum = tl.zeros((BT * BN * 2 * L,), tl.float32)
        k = 0
        while k < channel_blocks:
            block = k + tl.arange(0, BK)[:, None]
            at = at_tile[None, :] + block * block_stride
            in_block = inside[None, :] & (block < channel_blocks)
            block_sum += tl.sum(tl.load(at, mask=in_block, other=0.0), axis=0)
            k += BK
        at_B, at_C = b * dB_b + state * dB_n + t * dB_t, b * dC_b + state * dC_n + t * dC_t
        tl.store(dB + at_B, block_sum.to(dB.dtype.element_ty), mask=inside & (BC_row < L))
        tl.store(dC + at_C, block_sum.to(dC.dtype.element_ty), mask=inside & (BC_row >= L))
