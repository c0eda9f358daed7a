"""The delta rule with a gate per key channel, in chunks, backward.

With D the gradient of the state that leaves a chunk, S the one that enters, and W, A, E, U = b E of the
forward (channel_forward.py):

    prepare_backward   A^T dO and q_in^T dO
    sweep_backward     dU = A^T dO + k_out D,  D <- P_C o D + q_in^T dO - W^T b dU, last chunk first
    pair_gradients     Z = (I + N)^-T b dU = dV,  dA = lower(dO U^T),  dN = -strictly_lower(Z U^T),  dbeta
    gradients          dQ = P o (dO S^T) + ...,  dK = X o (U D^T) - P o (Z S^T) + ...,  those of the gates

The dots stand for the products inside the chunk. At a level of blocks of m steps (channel_forward.py) let F
be the products of gates between a row and r, x_t = q_t in second and k_t in first blocks, and M the corners
of dA or dN made symmetric. Rows of F o (M_A (F o x)) are parts of dQ in second and of dK in first blocks, and
those of F o (M_N (F o k)) are parts of dK. Their products with x and k are the gradient of log F, a sum over
the gates between t and r: so that of gate j sums over t >= j in second and t < j in first blocks, one product
with a matrix of zeros and ones. The same holds for P and X with the whole chunk as the block.

So every term of the gradient of log |a_j| contains a_j, and its quotient by a_j is the gradient of the number
a_j, exact where a_j is small, and right at 0 (gates.py of gated_linear_attention/triton). Of g, whose
gradient is the sum itself, and in chunks where no a_j is small, all levels are summed at once, by another
launch of `gradients`, as

    sum_{t >= j} (q_t o dq_t + k_t o dk_t as a later - k_t o dk_t as an earlier step) + what holds for all j
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.channel_forward import dot_carried
from statetrack.ops.delta_rule.triton.channel_gates import (
    gates_to,
    last_of_first_block,
    load_sums,
    power_of_two,
    with_sign,
)
from statetrack.ops.delta_rule.triton.chunk_state import load_state, sweep_program, sweep_sequence
from statetrack.ops.delta_rule.triton.tiles import (
    BF16_LAST_BIT,
    chunk_rows,
    dot_out,
    dot_tf32x3,
    load_beta,
    load_inverse,
    load_tile,
    relative_slope,
    split_high_low,
    store_tile,
)
from statetrack.ops.gated_linear_attention.triton.gates import gate_gradient, load_gates, taken_by_other


@triton.jit
def prepare_backward_kernel(
    q_in, A, dout, dU, added, chunk_table, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """A^T dO in dU, and q_in^T dO, transposed, in `added`."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:
        return
    ic = tl.arange(0, C)
    valid, slot, values = ic < rows, (chunk * H + h).to(tl.int64), (first * H + h) * V
    A_c = tl.load(A + slot * C * C + ic[:, None] * C + ic[None, :])
    for columns in tl.range(0, (V + BV - 1) // BV, num_stages=1, disable_licm=True):
        iv = columns * BV + tl.arange(0, BV)
        dO = load_tile(dout + values, ic * (H * V), iv, valid, V, BV, BF16)
        dU_c = dot_out(tl.trans(A_c), dO, None, BF16, OUT)
        store_tile(dU + values, dU_c, ic * (H * V), iv, valid, V, BV)
        for slice in tl.range(0, (K + BK - 1) // BK, num_stages=1, disable_licm=True):
            ik = slice * BK + tl.arange(0, BK)
            q_c = load_tile(q_in + (first * H + h) * K, ic * (H * K), ik, valid, K, BK, BF16)
            QdO = dot_carried(tl.trans(dO), q_c, None, BF16)
            cell, inside = iv[:, None] * K + ik[None, :], (iv < V)[:, None] & (ik < K)[None, :]
            tl.store(added + slot * K * V + cell, QdO.to(added.dtype.element_ty), mask=inside)


@triton.jit
def sweep_backward_kernel(
    beta, W, k_out, dU, dU_total, added, kept, dfinal_state, dstates, dinitial_state, cu_seqlens, first_chunk,
    T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr, HAS_DFINAL_STATE: tl.constexpr, BF16: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """D of every chunk in dstates, and dU in dU_total. dU and D are transposed here."""
    sequence, h, iv = sweep_program(H, V, BV)
    first, rows, chunk = sweep_sequence(cu_seqlens, first_chunk, sequence, T, C, 1, PACKED)
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    D, inside, state_offsets = load_state(dfinal_state, sequence, h, iv, H, K, V, BK, HAS_DFINAL_STATE)
    keys, values = (first * H + h) * K, (first * H + h) * V
    W, k_out, dU, dU_total, beta = (
        W + keys, k_out + keys, dU + values, dU_total + values, beta + first * H + h
    )  # fmt: skip
    chunks = tl.cdiv(rows, C)
    for back in tl.range(0, chunks, num_stages=STAGES, disable_licm=True):
        row = (chunks - 1 - back) * C + ic
        valid, slot = row < rows, ((chunk + chunks - 1 - back) * H + h).to(tl.int64)
        cell = slot * K * V + iv[:, None] * K + ik[None, :]
        k_c = load_tile(k_out, row * (H * K), ik, valid, K, BK, BF16)
        W_c = load_tile(W, row * (H * K), ik, valid, K, BK, BF16)
        dU_c = tl.trans(load_tile(dU, row * (H * V), iv, valid, V, BV, False))
        QdO = tl.load(added + cell, mask=inside, other=0.0).to(tl.float32)
        end = tl.load(kept + slot * K + ik, mask=ik < K, other=0.0)
        b = load_beta(beta, row * H, valid, BETA_FROM_LOGITS, HARD_BETA)
        tl.store(dstates + cell, D.to(dstates.dtype.element_ty), mask=inside)
        dU_c += dot_carried(D, tl.trans(k_c), None, BF16)
        store_tile(dU_total, tl.trans(dU_c), row * (H * V), iv, valid, V, BV)
        D = dot_carried(-b[None, :] * dU_c, W_c, D * end[None, :] + QdO, BF16)
    if HAS_INITIAL_STATE:
        tl.store(dinitial_state + state_offsets, D, mask=inside)


@triton.jit
def pair_gradients_kernel(
    beta, inverse, inverse_norms, E, dU, dout, dv, dA, dN, dbeta, chunk_table, T, H, scale,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """dA and dN are stored as symmetric matrices, times norms and scale; dN is that of N without b."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
    if rows <= 0:
        return
    ic = tl.arange(0, C)
    i, j, valid, slot = ic[:, None], ic[None, :], ic < rows, (chunk * H + h).to(tl.int64)
    values = (first * H + h) * V
    b = load_beta(beta + first * H + h, ic * H, valid, BETA_FROM_LOGITS, HARD_BETA)
    inverse_c, _ = load_inverse(inverse + slot * C * C, i, j, C, BF16)
    dA_c, dN_c, db = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32), tl.zeros((C,), tl.float32)
    for slice in tl.range(0, (V + BV - 1) // BV, num_stages=1, disable_licm=True):
        iv = slice * BV + tl.arange(0, BV)
        dU_c = load_tile(dU + values, ic * (H * V), iv, valid, V, BV, False)
        Z = dot_out(tl.trans(inverse_c), b[:, None] * dU_c, None, BF16, OUT)
        store_tile(dv + values, Z, ic * (H * V), iv, valid, V, BV)
        E_c = load_tile(E + values, ic * (H * V), iv, valid, V, BV, False)
        db += tl.sum(E_c * Z, axis=1)
        U = tl.trans(b[:, None] * E_c)
        dO = load_tile(dout + values, ic * (H * V), iv, valid, V, BV, BF16)
        dA_c = dot_out(dO, U, dA_c, BF16, OUT)
        dN_c = dot_out(-Z, U, dN_c, BF16, OUT)
    if BETA_FROM_LOGITS is not None:
        db *= relative_slope(b, BETA_FROM_LOGITS, HARD_BETA)
    else:
        db /= b
    tl.store(dbeta + (first + ic) * H + h, db.to(dbeta.dtype.element_ty), mask=valid)
    r_k = tl.load(inverse_norms + slot * 2 * C + ic)
    s = scale * tl.load(inverse_norms + slot * 2 * C + C + ic)
    dA_c = (dA_c * (s[:, None] * r_k[None, :])).to(dA.dtype.element_ty)
    dN_c = (dN_c * (r_k[:, None] * r_k[None, :])).to(dN.dtype.element_ty)
    square, transposed = slot * C * C + i * C + j, slot * C * C + j * C + i
    tl.store(dA + square, dA_c, mask=i >= j)
    tl.store(dA + transposed, dA_c, mask=i > j)
    tl.store(dN + square, dN_c, mask=i > j)
    tl.store(dN + transposed, dN_c, mask=i > j)


@triton.jit
def chunk_gradients(
    first, rows, slot, h, q, k, beta, gate, sign, L, inverse_norms, E, dv, dA, dN, reached, states, dstates,
    dout, dq, dk, dgate, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, GATE: tl.constexpr, EXACT: tl.constexpr, SIGNED: tl.constexpr,
    L2NORM: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr, BF16: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    """dq, dk and the gradient of the gates of a chunk; q and k come with their signs.

    `reached`: see `reached_table` in channel_launches.py.

    Tiles are loaded again for every use, as many as fit in the registers at once: the barriers are there so
    that the compiler does not keep them. Loops of one step, and of the products a delay by one level, keep
    products apart that feed each other: in one block of code Triton would give every warp whole rows of their
    results, and twice the registers.
    """
    rows, HK = tl.minimum(rows, C).to(tl.int32), H * K
    one = tl.minimum(rows, 1)
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j, valid = ic[:, None], ic[None, :], ic < rows
    at, last = ic * HK, tl.minimum(ic, rows - 1) * HK
    start, values = (first * H + h) * K, (first * H + h) * V
    q, k, L = q + start, k + start, L + start
    states, dstates = states + slot * K * V, dstates + slot * K * V
    dA, dN, reached = dA + slot * C * C, dN + slot * C * C, reached + i * C + j
    b = load_beta(beta + first * H + h, ic * H, valid, BETA_FROM_LOGITS, HARD_BETA)
    r_k = tl.load(inverse_norms + slot * 2 * C + ic)
    r_q = tl.load(inverse_norms + slot * 2 * C + C + ic)

    # what passes through the states
    dQ, dK = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
    dK_out, SD = tl.zeros((C, BK), tl.float32), tl.zeros((BK,), tl.float32)
    for columns in tl.range(0, (V + BV - 1) // BV, num_stages=1, disable_licm=True):
        iv = columns * BV + tl.arange(0, BV)
        cell, inside = iv[:, None] * K + ik[None, :], (iv < V)[:, None] & (ik < K)[None, :]
        S = tl.load(states + cell, mask=inside, other=0.0)
        D = tl.load(dstates + cell, mask=inside, other=0.0)
        dQ = dot_out(load_tile(dout + values, ic * (H * V), iv, valid, V, BV, BF16), S, dQ, BF16, OUT)
        dK = dot_out(load_tile(dv + values, ic * (H * V), iv, valid, V, BV, BF16), S, dK, BF16, OUT)
        U = b[:, None] * load_tile(E + values, ic * (H * V), iv, valid, V, BV, False)
        dK_out = dot_out(U, D, dK_out, BF16, OUT)
        SD += tl.sum(S.to(tl.float32) * D.to(tl.float32), axis=0)
    L_end = tl.load(L + (rows - 1) * HK + ik, mask=ik < K, other=0.0)
    L_c = load_sums(L, last, ik, K, BK)
    P = power_of_two(-L_c)
    dQ *= P * (scale * r_q)[:, None]
    dK *= P * -r_k[:, None]
    X = power_of_two(L_c - L_end[None, :])
    dK_out *= with_sign(X * r_k[:, None], L_end[None, :], SIGNED)
    whole_chunk = with_sign(power_of_two(-L_end) * SD, L_end, SIGNED)
    x = load_tile(k, at, ik, valid, K, BK, False)
    if EXACT:
        dL = tl.zeros((C, BK), tl.float32)
        for _ in tl.range(0, one):
            dL = dot_out(tl.where(j < i, 1.0, 0.0), x * dK_out, dL, BF16, OUT)
        x = x * dK + load_tile(q, at, ik, valid, K, BK, False) * dQ
        for _ in tl.range(0, one):
            dL = dot_out(tl.where(j >= i, 1.0, 0.0), x, dL, BF16, OUT)
    else:  # the difference of what k gave as a later and as an earlier step
        whole_chunk += tl.sum(x * dK_out, axis=0)
        dL = dK - dK_out
    dK += dK_out
    tl.debug_barrier()
    diagonal, L_c = tl.load(dA + ic * C + ic).to(tl.float32)[:, None], load_sums(L, last, ik, K, BK)
    dQ += diagonal * load_tile(k, at, ik, valid, K, BK, False)
    x = diagonal * load_tile(q, at, ik, valid, K, BK, False)
    dK += x
    if not EXACT:
        dL -= x

    # what passes between the steps
    moved = tl.zeros((C, BK), dA.dtype.element_ty)  # of the last level: added one level later
    for level in tl.range(0, LEVELS, num_stages=1, disable_licm=True):
        tl.debug_barrier()
        if EXACT:
            dL = dot_out(tl.load(reached + tl.maximum(level - 1, 0) * C * C), moved, dL, BF16, OUT)
        second, r = ((ic >> level) & 1) == 1, last_of_first_block(ic, level, rows) * HK
        L_c = load_sums(L, last, ik, K, BK)
        F = gates_to(L_c, load_sums(L, r, ik, K, BK), ic, level)
        row = tl.where(second, q + at, k + at)
        x = tl.load(row[:, None] + ik[None, :], mask=valid[:, None] & (ik < K)[None, :], other=0.0)
        x = x.to(tl.float32)
        corners = (i ^ j) >> level == 1
        M = tl.load(dA + i * C + j)
        Y = F * dot_out(tl.where(corners, M, 0.0).to(M.dtype), x * F, None, BF16, OUT)
        dQ += tl.where(second[:, None], Y, 0.0)
        if EXACT:
            from_q = x * Y
        x = load_tile(k, at, ik, valid, K, BK, False)
        M = tl.load(dN + i * C + j)
        Z = F * dot_out(tl.where(corners, M, 0.0).to(M.dtype), x * F, None, BF16, OUT)
        if EXACT:
            moved = (from_q + x * Z).to(moved.dtype)
        Z += tl.where(second[:, None], 0.0, Y)
        dK += Z
        if not EXACT:
            dL += tl.where(second, 1.0, -1.0)[:, None] * Z
    tl.debug_barrier()
    if EXACT:
        for _ in tl.range(0, one):
            dL = dot_out(tl.load(reached + (LEVELS - 1) * C * C), moved, dL, BF16, OUT)
    L_c = load_sums(L, last, ik, K, BK)
    if not EXACT:
        x = load_tile(q, at, ik, valid, K, BK, False) * dQ
        x += load_tile(k, at, ik, valid, K, BK, False) * dL
        dL = tl.zeros((C, BK), tl.float32)
        after = tl.where(j >= i, 1.0, 0.0)
        if BF16:
            high, low = split_high_low(x, BF16_LAST_BIT)
            for _ in tl.range(0, one):
                dL = tl.dot(after.to(tl.bfloat16), low.to(tl.bfloat16), dL)
            for _ in tl.range(0, one):
                dL = tl.dot(after.to(tl.bfloat16), high.to(tl.bfloat16), dL)
        else:
            dL = dot_tf32x3(after, x, dL)
    dL += whole_chunk[None, :]
    offsets = start + at[:, None] + ik[None, :]
    l, negative = load_gates(gate, sign, offsets, valid[:, None] & (ik < K)[None, :], GATE)
    store_tile(dgate + start, gate_gradient(dL, l, negative, GATE), at, ik, valid, K, BK)
    if L2NORM:  # the norms that q and k were divided by move with them
        x = load_tile(q, at, ik, valid, K, BK, False)
        dQ -= x * (r_q * r_q * tl.sum(x * dQ, axis=1))[:, None]
        x = load_tile(k, at, ik, valid, K, BK, False)
        dK -= x * (r_k * r_k * tl.sum(x * dK, axis=1))[:, None]
    store_tile(dq + start, with_sign(dQ, L_c, SIGNED), at, ik, valid, K, BK)
    store_tile(dk + start, with_sign(dK, L_c, SIGNED), at, ik, valid, K, BK)


@triton.jit
def gradients_kernel(
    q, k, beta, gate, sign, L, steepest, inverse_norms, E, dv, dA, dN, reached, states, dstates, dout, dq, dk,
    dgate, chunk_table, T, H, scale, pairs,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, GATE: tl.constexpr, EXACT: tl.constexpr, SIGNED: tl.constexpr,
    PACKED: tl.constexpr, L2NORM: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr,
    BF16: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """A program has a chunk of one head. With EXACT it looks for those of its kind among many of the `pairs`
    of a chunk and a head: usually there are few, and a program of its own for each of the others takes longer
    to start than to end."""
    ik = tl.arange(0, BK)
    if EXACT:
        pair = tl.program_id(0)
        while pair < pairs:
            chunk, h = pair // H, pair % H
            first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
            slot = (chunk * H + h).to(tl.int64)
            if rows > 0:  # noqa: SIM102 -- `and` would read the gates of a chunk that is not there
                if not taken_by_other(steepest + slot * K + ik, ik < K, GATE, EXACT):
                    chunk_gradients(
                        first, rows, slot, h, q, k, beta, gate, sign, L, inverse_norms, E, dv, dA, dN,
                        reached, states, dstates, dout, dq, dk, dgate, H, scale, K, V, BK, BV, C, LEVELS,
                        GATE, EXACT, SIGNED, L2NORM, BETA_FROM_LOGITS, HARD_BETA, BF16, OUT,
                    )  # fmt: skip
            pair += tl.num_programs(0)
    else:
        chunk, h = tl.program_id(0), tl.program_id(1)
        first, rows = chunk_rows(chunk_table, chunk, T, C, 1, PACKED)
        if rows <= 0:
            return
        slot = (chunk * H + h).to(tl.int64)
        if taken_by_other(steepest + slot * K + ik, ik < K, GATE, EXACT):
            return
        chunk_gradients(
            first, rows, slot, h, q, k, beta, gate, sign, L, inverse_norms, E, dv, dA, dN, reached, states,
            dstates, dout, dq, dk, dgate, H, scale, K, V, BK, BV, C, LEVELS, GATE, EXACT, SIGNED, L2NORM,
            BETA_FROM_LOGITS, HARD_BETA, BF16, OUT,
        )  # fmt: skip
