"""The delta rule with a gate per key channel, in chunks: what happens between the steps of a chunk.

With G the log-decays summed from the chunk's start, per channel (docs/gates.md, "Delta rule"):

    decays           G, 1 / ||k|| and scale / ||q||
    pairs            N_ts = sum_k k_tk e^(G_tk - G_sk) k_sk b_s  (t > s),  A_ts = sum_k q_tk e^(G_tk - G_sk) k_sk
    inverse          (I + N)^-1
    pair_gradients   dq, dk and dg from dA and dN, added to what passes through the states

e^(G_t - G_s) is not e^(G_t) e^(-G_s), which overflows. Rows are taken in blocks of 16. For s in an earlier
block than t it is e^(G_t - R) e^(R - G_s) with R the value of G before t's block: no exponent is positive,
and the sum over channels is a matrix product. Within a block it is computed for every pair.

dg_t sums what carries a factor e^(g_t), never differences of larger sums, which would lose its digits where
gates are small. A chunk has at most two blocks, so no pair of blocks has another between them.

Grids: decays and inverse have a program per (chunk, head), the others one per (chunk and block, head). Letters
and `slot`: chunk_forward.py.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.tiles import (
    chunk_rows,
    dot_bf16x3,
    dot_out,
    dot_tf32x3,
    inverse_norm,
    load_beta,
    load_tile,
    squared_norm,
    store_tile,
    unit_lower_inverse,
)


@triton.jit
def dot_floats(x, y, total, BF16: tl.constexpr):
    """total + x y for two float32 tiles: sixteen bits with bfloat16 inputs, else float32."""
    if BF16:
        total = dot_bf16x3(x, y, total)
    else:
        total = dot_tf32x3(x, y, total)
    return total


@triton.jit
def decays_kernel(
    q, k, g, G, inverse_norms, chunk_table, T, H, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:  # the grid is sized for the largest number of chunks that packed sequences can have
        return
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    valid, at, start = ic < rows, ic * (H * K), (first * H + h) * K
    g_c = load_tile(g + start, at, ik, valid, K, BK, False)
    store_tile(G + start, tl.cumsum(g_c, axis=0), at, ik, valid, K, BK)
    r_k = inverse_norm(squared_norm(load_tile(k + start, at, ik, valid, K, BK, False)), L2NORM)
    r_q = inverse_norm(squared_norm(load_tile(q + start, at, ik, valid, K, BK, False)), L2NORM)
    inverse_norms += (chunk * H + h).to(tl.int64) * 2 * C
    tl.store(inverse_norms + ic, r_k)
    tl.store(inverse_norms + C + ic, scale * r_q)


@triton.jit
def _load_block(
    q, k, G, inverse_norms, block, rows, H, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr
):
    """Of 16 rows: unit keys and scaled unit queries, G, and which rows there are."""
    row, ik = block * 16 + tl.arange(0, 16), tl.arange(0, BK)
    valid, at = row < rows, row * (H * K)
    r_k, s = tl.load(inverse_norms + row), tl.load(inverse_norms + C + row)
    k_c = load_tile(k, at, ik, valid, K, BK, False) * r_k[:, None]
    q_c = load_tile(q, at, ik, valid, K, BK, False) * s[:, None]
    return k_c, q_c, load_tile(G, at, ik, valid, K, BK, False), valid


@triton.jit
def _load_row(x, row, rows, H, K: tl.constexpr, BK: tl.constexpr):
    """One row, zero where there is none."""
    ik = tl.arange(0, BK)
    inside = (ik < K) & (row >= 0) & (row < rows)
    return tl.load(x + row * (H * K) + ik, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _power(exponent, valid):
    """e^exponent in valid rows, 0 in others, whose exponents mean nothing."""
    return tl.exp(tl.where(valid[:, None], exponent, -float("inf")))


@triton.jit
def pairs_kernel(
    q, k, beta, G, inverse_norms, N, A, chunk_table, T, H,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    BETA_FROM_LOGITS: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = C // 16
    chunk, I, h = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:
        return
    i16 = tl.arange(0, 16)
    i, j = i16[:, None], i16[None, :]
    slot = (chunk * H + h).to(tl.int64)
    start = (first * H + h) * K
    q, k, G = q + start, k + start, G + start
    beta += first * H + h
    inverse_norms += slot * 2 * C
    N += slot * C * C + I * 16 * C
    A += slot * C * C + I * 16 * C
    k_i, q_i, G_i, valid = _load_block(q, k, G, inverse_norms, I, rows, H, K, BK, C)
    before = _load_row(G, I * 16 - 1, rows, H, K, BK)[None, :]
    x = _power(G_i - before, valid)
    for J in tl.range(0, I):
        k_j, _, G_j, valid_j = _load_block(q, k, G, inverse_norms, J, rows, H, K, BK, C)
        b_j = load_beta(beta, (J * 16 + i16) * H, valid_j, BETA_FROM_LOGITS)
        k_j *= _power(before - G_j, valid_j & (I * 16 < rows))
        KK = dot_floats(k_i * x, tl.trans(k_j), None, BF16)
        QK = dot_out(q_i * x, tl.trans(k_j), None, BF16, OUT)
        tl.store(N + i * C + J * 16 + j, KK * b_j[None, :])
        tl.store(A + i * C + J * 16 + j, QK.to(A.dtype.element_ty))
    for J in tl.range(I + 1, BLOCKS):
        zero = tl.zeros((16, 16), tl.float32)
        tl.store(N + i * C + J * 16 + j, zero)
        tl.store(A + i * C + J * 16 + j, zero.to(A.dtype.element_ty))
    KK, QK = tl.zeros((16, 16), tl.float32), tl.zeros((16, 16), tl.float32)
    for s in tl.range(0, 16):
        row = I * 16 + s
        k_s = _load_row(k, row, rows, H, K, BK) * tl.load(inverse_norms + row)
        G_s = _load_row(G, row, rows, H, K, BK)
        decayed = _power(G_i - G_s[None, :], valid & (i16 >= s)) * k_s[None, :]
        KK = tl.where(j == s, tl.sum(k_i * decayed, axis=1)[:, None], KK)
        QK = tl.where(j == s, tl.sum(q_i * decayed, axis=1)[:, None], QK)
    b_i = load_beta(beta, (I * 16 + i16) * H, valid, BETA_FROM_LOGITS)
    tl.store(N + i * C + I * 16 + j, tl.where(i > j, KK * b_i[None, :], 0.0))
    tl.store(A + i * C + I * 16 + j, QK.to(A.dtype.element_ty))


@triton.jit
def inverse_kernel(N, chunk_table, T, H, C: tl.constexpr, PACKED: tl.constexpr, BF16: tl.constexpr):
    """(I + N)^-1 in place, in the form of `store_inverse`."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    _, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:
        return
    ic = tl.arange(0, C)
    N += (chunk * H + h).to(tl.int64) * C * C
    unit_lower_inverse(N, tl.load(N + ic[:, None] * C + ic[None, :]), C, BF16)


@triton.jit
def pair_gradients_kernel(
    q, k, G, inverse_norms, dA, dN, dq_states, dk_states, dg, dq, dk, chunk_table, T, H,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr,
    BF16: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """dq and dk, and dg completed in place; dN is that of k_t e^(G_t - G_s) k_s, without b."""
    BLOCKS: tl.constexpr = C // 16
    chunk, block, h = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if block * 16 >= rows:
        return
    i16, ik = tl.arange(0, 16), tl.arange(0, BK)
    i, j = i16[:, None], i16[None, :]
    slot = (chunk * H + h).to(tl.int64)
    start = (first * H + h) * K
    q, k, G = q + start, k + start, G + start
    inverse_norms += slot * 2 * C
    dA += slot * C * C
    dN += slot * C * C
    k_c, q_c, G_c, valid = _load_block(q, k, G, inverse_norms, block, rows, H, K, BK, C)
    at = (block * 16 + i16) * (H * K)
    dq_c = load_tile(dq_states + start, at, ik, valid, K, BK, False)
    dk_c = load_tile(dk_states + start, at, ik, valid, K, BK, False)
    dg_c = load_tile(dg + start, at, ik, valid, K, BK, False)
    own = block * 16 * C + i * C + j  # this block's rows

    # as later rows, with the blocks before: what these rows carry reaches dg from each row backwards
    before = _load_row(G, block * 16 - 1, rows, H, K, BK)[None, :]
    x = _power(G_c - before, valid)
    dq_x, dk_x = tl.zeros((16, BK), tl.float32), tl.zeros((16, BK), tl.float32)
    for J in tl.range(0, block):
        k_j, _, G_j, valid_j = _load_block(q, k, G, inverse_norms, J, rows, H, K, BK, C)
        k_j *= _power(before - G_j, valid_j)
        dq_x = dot_out(tl.load(dA + own + J * 16), k_j, dq_x, BF16, OUT)
        dk_x = dot_out(tl.load(dN + own + J * 16), k_j, dk_x, BF16, OUT)
    dq_c += x * dq_x
    dk_c += x * dk_x
    dg_c += tl.cumsum(x * (q_c * dq_x + k_c * dk_x), axis=0, reverse=True)

    # as earlier rows, with the block behind: it reaches dg of the rows after each
    earlier = tl.zeros((16, BK), tl.float32)
    for I in tl.range(block + 1, BLOCKS):
        k_i, q_i, G_i, valid_i = _load_block(q, k, G, inverse_norms, I, rows, H, K, BK, C)
        before_i = _load_row(G, I * 16 - 1, rows, H, K, BK)[None, :]
        x_i, there = _power(G_i - before_i, valid_i), I * 16 * C + i * C + block * 16 + j
        dk_y = dot_out(tl.trans(tl.load(dA + there)), q_i * x_i, None, BF16, OUT)
        dk_y = dot_out(tl.trans(tl.load(dN + there)), k_i * x_i, dk_y, BF16, OUT)
        dk_y *= _power(before_i - G_c, valid & (I * 16 < rows))
        dk_c += dk_y
        earlier += k_c * dk_y
    dg_c += dot_floats(tl.where(i > j, 1.0, 0.0), earlier, None, BF16)

    for s in tl.range(0, 16):
        row = block * 16 + s
        k_s = _load_row(k, row, rows, H, K, BK) * tl.load(inverse_norms + row)
        G_s = _load_row(G, row, rows, H, K, BK)
        dA_s = tl.load(dA + block * 16 * C + i16 * C + row)[:, None]
        dN_s = tl.load(dN + block * 16 * C + i16 * C + row)[:, None]
        decay = _power(G_c - G_s[None, :], valid & (i16 >= s))
        dq_c += dA_s * decay * k_s[None, :]
        dk_c += dN_s * decay * k_s[None, :]
        carried = (dA_s * q_c + dN_s * k_c) * decay
        dk_c += tl.where(i == s, tl.sum(carried, axis=0)[None, :], 0.0)
        carried = tl.where(i > s, carried * k_s[None, :], 0.0)
        dg_c += tl.where(i > s, tl.cumsum(carried, axis=0, reverse=True), 0.0)

    r_k, s_q = tl.load(inverse_norms + block * 16 + i16), tl.load(inverse_norms + C + block * 16 + i16)
    if L2NORM:  # the norm that was divided by moves with the vector
        dk_c -= k_c * tl.sum(k_c * dk_c, axis=1)[:, None]
        raw = load_tile(q, at, ik, valid, K, BK, False)
        unit = raw * inverse_norm(squared_norm(raw), True)[:, None]
        dq_c -= unit * tl.sum(unit * dq_c, axis=1)[:, None]
    store_tile(dq + start, dq_c * s_q[:, None], at, ik, valid, K, BK)
    store_tile(dk + start, dk_c * r_k[:, None], at, ik, valid, K, BK)
    store_tile(dg + start, dg_c, at, ik, valid, K, BK)
