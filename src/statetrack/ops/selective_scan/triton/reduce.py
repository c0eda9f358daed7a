"""The Triton kernel that ends the backward selective scan: sums over sequences, segments and blocks."""

import triton.language as tl

from statetrack.ops.selective_scan.triton.tiles import kernel


@kernel
def reduce_kernel(
    dBC, sums, dB, dC, dA, dD, dbias, blocks, batch, channels, T, tiles, rows, columns,
    dB_b, dB_n, dB_t, dC_b, dC_n, dC_t,
    N: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The sums `backward_kernel` leaves: over sequences and segments, and for dB and dC over blocks.

    A program adds BW columns of `sums`, BR rows at once, or BT tiles of dBC, BK blocks at once.
    """
    item = tl.program_id(0)
    if item < columns:
        column = item * BW + tl.arange(0, BW)
        width = (N + 2) * channels
        part = tl.zeros((BR, BW), tl.float32)
        j = 0
        while j < rows:
            r = j + tl.arange(0, BR)[:, None]
            at = sums + r.to(tl.int64) * width + column[None, :]
            part += tl.load(at, mask=(r < rows) & (column < width)[None, :], other=0.0)
            j += BR
        total = tl.sum(part, axis=0)
        n, d = column // channels, column % channels
        tl.store(dA + d * N + n, total, mask=n < N)
        tl.store(dD + d, total, mask=n == N)
        tl.store(dbias + d, total, mask=n == N + 1)
    else:
        number = tl.arange(0, BT * BN * 2 * L)
        tile = (item - columns).to(tl.int64) * BT + number // (BN * 2 * L)
        b, state, which = tile // tiles, number // (2 * L) % BN, number % (2 * L)
        t = (tile % tiles) * L + which % L
        inside = (b < batch) & (state < N) & (t < T)  # half a tile leaves the rest of its place unwritten
        at_tile = dBC + (tile * N + state) * 2 * L + which
        apart = batch.to(tl.int64) * tiles * N * 2 * L
        block_sum = tl.zeros((BT * BN * 2 * L,), tl.float32)
        k = 0
        while k < blocks:
            block = k + tl.arange(0, BK)[:, None]
            at = at_tile[None, :] + block * apart
            block_sum += tl.sum(tl.load(at, mask=inside[None, :] & (block < blocks), other=0.0), axis=0)
            k += BK
        at_B, at_C = b * dB_b + state * dB_n + t * dB_t, b * dC_b + state * dC_n + t * dC_t
        tl.store(dB + at_B, block_sum.to(dB.dtype.element_ty), mask=inside & (which < L))
        tl.store(dC + at_C, block_sum.to(dC.dtype.element_ty), mask=inside & (which >= L))
