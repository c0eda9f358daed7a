"""The delta rule over any length, in chunks, backward: two to four Triton kernels.

Per chunk, with D the gradient of the state that leaves it, S the state that entered, and E, U, A, `inverse`
of the forward (docs/internals/delta_rule.md, "Chunks"):

    prepare_backward   A^T dO and (e^G Q)^T dO, in place of `sweep_backward` where sequences are few
    sweep_backward     dU = A^T dO + e^(G_C - G) K D,  Z = inverse^T b dU = dV
                       D <- e^(G_C) D + (e^G Q)^T dO - (e^G K)^T Z, last chunk first
    gradients          dq, dk, dbeta, dg from Z, E, S and D

Grids and row factors: as in chunk_forward.py; prepare_backward and gradients have a program per (chunk,
head), sweep_backward one per sequence, head and slice of BV columns of v.

Registers: sweep_backward holds its slice of D, transposed (BV x BK), for the whole sequence. gradients
holds the sums over slices of v, dA and dP (C x C), dq and dk (C x BK). Shared memory holds operands that
come from device memory, STAGES chunks or slices ahead.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.chunk_state import (
    load_state,
    row_factors,
    sweep_program,
    sweep_sequence,
)
from statetrack.ops.delta_rule.triton.tiles import (
    chunk_rows,
    dot_input,
    dot_inverse,
    dot_out,
    dot_state,
    load_beta,
    load_decay,
    load_inverse,
    load_tile,
    relative_slope,
    row_tokens,
    squared_norm,
    store_tile,
)


@triton.jit
def prepare_backward_kernel(
    q, g, A, inverse_norms, dout, dv, dstates, chunk_table, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HOUSEHOLDERS: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, BF16: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    """A^T dO and (e^G Q)^T dO of a chunk, left in dv and dstates, where `sweep_backward` overwrites them."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, HOUSEHOLDERS, PACKED)
    if rows <= 0:
        return
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    step = (first % HOUSEHOLDERS).to(tl.int32) + ic
    valid, token, read = row_tokens(ic, step, rows, HOUSEHOLDERS)
    slot = (chunk * H + h).to(tl.int64)
    dv += (first * H + h) * V
    dout += (first // HOUSEHOLDERS * H + h) * V
    q_in = tl.load(inverse_norms + slot * 2 * C + C + ic)
    if GATED:
        G, _ = load_decay(g + first // HOUSEHOLDERS * H + h, token * H, valid & (step % HOUSEHOLDERS == 0))
        q_in *= tl.exp(G)
    q_c = load_tile(q + (first // HOUSEHOLDERS * H + h) * K, token * (H * K), ik, read, K, BK, BF16)
    A_c = tl.load(A + slot * C * C + i * C + j)
    if not BF16:
        A_c = A_c.to(tl.float32)
    for slice in tl.range(0, (V + BV - 1) // BV, num_stages=1):
        iv = slice * BV + tl.arange(0, BV)
        cell, inside = iv[:, None] * K + ik[None, :], (iv < V)[:, None] & (ik < K)[None, :]
        dO = load_tile(dout, token * (H * V), iv, read, V, BV, BF16)
        dU = dot_out(tl.trans(A_c), dO, None, BF16, OUT)
        store_tile(dv, dU, ic * (H * V), iv, valid, V, BV)
        QdO = dot_out(tl.trans(q_in[:, None] * dO.to(tl.float32)), q_c, None, BF16, OUT)
        tl.store(dstates + slot * K * V + cell, QdO.to(dstates.dtype.element_ty), mask=inside)


@triton.jit
def sweep_backward_kernel(
    q, k, beta, g, inverse, A, inverse_norms, dout, dfinal_state, dv, dstates, dinitial_state, cu_seqlens,
    first_chunk, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HOUSEHOLDERS: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr,
    HARD_BETA: tl.constexpr,
    HAS_DFINAL_STATE: tl.constexpr, HAS_INITIAL_STATE: tl.constexpr, PREPARED: tl.constexpr,
    BF16: tl.constexpr, OUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # dU, Z and D are transposed, as everything in `sweep_kernel`
    sequence, h, iv = sweep_program(H, V, BV)
    first, rows, chunk = sweep_sequence(cu_seqlens, first_chunk, sequence, T, C, HOUSEHOLDERS, PACKED)
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    D, inside, state_offsets = load_state(dfinal_state, sequence, h, iv, H, K, V, BK, HAS_DFINAL_STATE)
    k += (first * H + h) * K
    dv += (first * H + h) * V
    beta += first * H + h
    q += (first // HOUSEHOLDERS * H + h) * K
    dout += (first // HOUSEHOLDERS * H + h) * V
    if GATED:
        g += first // HOUSEHOLDERS * H + h
    chunks = tl.cdiv(rows, C)
    for back in tl.range(0, chunks, num_stages=STAGES, disable_licm=True):
        c = chunks - 1 - back
        row = c * C + ic
        valid, token, read = row_tokens(row, row, rows, HOUSEHOLDERS)
        slot = ((chunk + c) * H + h).to(tl.int64)
        cell = slot * K * V + iv[:, None] * K + ik[None, :]
        k_c = load_tile(k, row * (H * K), ik, valid, K, BK, BF16)
        inverse_high, inverse_low = load_inverse(inverse + slot * C * C, i, j, C, BF16)
        b, k_in, k_out, G, G_C = row_factors(
            beta, g, inverse_norms, slot, row, valid, token, H, C, HOUSEHOLDERS, GATED, BETA_FROM_LOGITS,
            HARD_BETA,
        )  # fmt: skip
        dU = k_out[None, :] * dot_state(D, tl.trans(k_c), None, BF16)
        if PREPARED:  # loaded from where Z and D are stored below
            dU += tl.trans(load_tile(dv, row * (H * V), iv, valid, V, BV, False))
            QdO = tl.load(dstates + cell, mask=inside, other=0.0).to(tl.float32)
        else:
            dO = load_tile(dout, token * (H * V), iv, read, V, BV, BF16)
            A_c = tl.load(A + slot * C * C + i * C + j)
            if not BF16:
                A_c = A_c.to(tl.float32)
            dU = dot_out(tl.trans(dO), A_c, dU, BF16, OUT)
        Z = dot_inverse(b[None, :] * dU, inverse_high, inverse_low, BF16)
        store_tile(dv, tl.trans(Z), row * (H * V), iv, valid, V, BV)
        tl.store(dstates + cell, D.to(dstates.dtype.element_ty), mask=inside)
        if GATED:
            D *= tl.exp(G_C)
        if PREPARED:
            D += QdO
        else:
            # loaded again: kept from above, it would not fit in the registers
            dO = load_tile(dout, token * (H * V), iv, read, V, BV, BF16)
            q_c = load_tile(q, token * (H * K), ik, read, K, BK, BF16)
            q_in = tl.load(inverse_norms + slot * 2 * C + C + ic)
            if GATED:
                q_in *= tl.exp(G)
            D = dot_out(q_in[None, :] * tl.trans(dO).to(tl.float32), q_c, D, BF16, OUT)
        D = dot_state(-k_in[None, :] * Z, k_c, D, BF16)
    if HAS_INITIAL_STATE:
        tl.store(dinitial_state + state_offsets, D, mask=inside)


@triton.jit
def gradients_kernel(
    q, k, beta, g, A, inverse_norms, E, dv, states, dstates, dout, dq, dk, dbeta, dg, dA_saved, chunk_table,
    T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HOUSEHOLDERS: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr,
    BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE_DQ: tl.constexpr, COMPUTE_DK: tl.constexpr,
):  # fmt: skip
    """dq, dk, dbeta and dg of a chunk.

    One launch computes all, or two launches of programs that need fewer registers: the first (COMPUTE_DQ)
    saves dA for the second (COMPUTE_DK). A gate needs both at once.
    """
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, HOUSEHOLDERS, PACKED)
    if rows <= 0:  # the grid is sized for the largest number of chunks that packed sequences can have
        return
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    step = (first % HOUSEHOLDERS).to(tl.int32) + ic
    valid, token, read = row_tokens(ic, step, rows, HOUSEHOLDERS)
    slot = (chunk * H + h).to(tl.int64)
    k += (first * H + h) * K
    dk += (first * H + h) * K
    E += (first * H + h) * V
    dv += (first * H + h) * V
    q += (first // HOUSEHOLDERS * H + h) * K
    dq += (first // HOUSEHOLDERS * H + h) * K
    dout += (first // HOUSEHOLDERS * H + h) * V
    states += slot * K * V
    dstates += slot * K * V
    b = load_beta(beta + first * H + h, ic * H, valid, BETA_FROM_LOGITS, HARD_BETA)
    r_k = tl.load(inverse_norms + slot * 2 * C + ic)
    s = tl.load(inverse_norms + slot * 2 * C + C + ic)  # scale / ||q||
    if GATED:
        G, G_C = load_decay(g + first // HOUSEHOLDERS * H + h, token * H, valid & (step % HOUSEHOLDERS == 0))
        decay = tl.where(i >= j, tl.exp(tl.where(i >= j, G[:, None] - G[None, :], 0.0)), 0.0)

    # One pass over the columns of v. With -U in place of U every product below is added to its sum, as tensor
    # cores do: -dA = dO (-U)^T, dP = Z (-U)^T; the states give dO S^T to dq and -(Z S^T + (-U) D^T) to dk.
    dA, dP = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    dq_c, dk_c = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
    db, SD = tl.zeros((C,), tl.float32), 0.0
    if GATED:  # the two parts of dk have different decays
        dk_out = tl.zeros((C, BK), tl.float32)
    for slice in tl.range(0, (V + BV - 1) // BV, num_stages=STAGES):
        iv = slice * BV + tl.arange(0, BV)
        cell, inside = iv[:, None] * K + ik[None, :], (iv < V)[:, None] & (ik < K)[None, :]
        if COMPUTE_DQ:
            dO = load_tile(dout, token * (H * V), iv, read, V, BV, BF16)
        E_c = load_tile(E, ic * (H * V), iv, valid, V, BV, False)
        S = tl.load(states + cell, mask=inside, other=0.0)
        minus_U = -b[:, None] * E_c
        if COMPUTE_DQ:
            dA = dot_out(dO, tl.trans(minus_U), dA, BF16, OUT)
            dq_c = dot_out(dO, S, dq_c, BF16, OUT)
        if COMPUTE_DK:
            Z = load_tile(dv, ic * (H * V), iv, valid, V, BV, BF16)
            D = tl.load(dstates + cell, mask=inside, other=0.0)
            db += tl.sum(E_c * Z.to(tl.float32), axis=1)
            dP = dot_out(Z, tl.trans(minus_U), dP, BF16, OUT)
            dk_c = dot_out(Z, S, dk_c, BF16, OUT)
        if GATED:
            dk_out = dot_out(minus_U, D, dk_out, BF16, OUT)
            SD += tl.sum(tl.sum(S.to(tl.float32) * D.to(tl.float32), axis=1), axis=0)
        elif COMPUTE_DK:
            dk_c = dot_out(minus_U, D, dk_c, BF16, OUT)
    if COMPUTE_DK:
        if BETA_FROM_LOGITS is not None:
            db *= relative_slope(b, BETA_FROM_LOGITS, HARD_BETA)
        else:
            db = db / b
        tl.store(dbeta + (first + ic) * H + h, db.to(dbeta.dtype.element_ty), mask=valid)
    dA, dP = tl.where(i >= j, -dA, 0.0), tl.where(i > j, dP, 0.0)
    dA_saved += slot * C * C + i * C + j
    if not COMPUTE_DK:
        tl.store(dA_saved, dA.to(dA_saved.dtype.element_ty))
    if not COMPUTE_DQ:
        dA = tl.load(dA_saved).to(tl.float32)

    k_c = load_tile(k, ic * (H * K), ik, valid, K, BK, BF16)
    q_c = load_tile(q, token * (H * K), ik, read, K, BK, BF16)
    if GATED:
        # a product that carries e^(G_i - G_j) adds (value x gradient) to dg_t for i >= t > j; no differences
        # of larger sums, which would lose the digits of dg where a gate is small
        KK = tl.dot(k_c, tl.trans(k_c)) if BF16 else dot_input(k_c, tl.trans(k_c), None, False)
        moved = dP * decay * KK * r_k[:, None] * r_k[None, :]
        moved += dA * tl.load(A + slot * C * C + i * C + j).to(tl.float32)
        from_here = tl.where(i <= j, 1.0, 0.0)
        between = dot_input(from_here.to(tl.bfloat16) if BF16 else from_here, moved, None, BF16)
        dP, dA = dP * decay, dA * decay
        dq_c *= tl.exp(G)[:, None]
        dk_c *= tl.exp(G)[:, None]
        dk_out *= tl.exp(G_C - G)[:, None]
        entering = tl.sum(dq_c * q_c.to(tl.float32), axis=1) * s
        entering -= tl.sum(dk_c * k_c.to(tl.float32), axis=1) * r_k
        leaving = -tl.sum(dk_out * k_c.to(tl.float32), axis=1) * r_k
        dg_c = tl.sum(tl.where(i > j, between + leaving[None, :], entering[None, :]), axis=1)
        dg_c += tl.exp(G_C) * SD
        at = (first // HOUSEHOLDERS + token) * H + h
        tl.store(dg + at, dg_c.to(dg.dtype.element_ty), mask=valid & (step % HOUSEHOLDERS == 0))
        dk_c += dk_out
    if COMPUTE_DQ:
        dq_c = dot_out(dA * r_k[None, :], k_c, dq_c, BF16, OUT)
        if L2NORM:  # s is scale / ||q||, and dq_c the gradient of the scaled unit query
            unit = q_c.to(tl.float32) * tl.rsqrt(squared_norm(q_c) + 1e-6)[:, None]
            dq_c -= unit * tl.sum(unit * dq_c, axis=1)[:, None]
        store_tile(dq, dq_c * s[:, None], token * (H * K), ik, read, K, BK)
    if COMPUTE_DK:
        dk_c = dot_out(tl.trans(dA * -s[:, None]), q_c, dk_c, BF16, OUT)
        dk_c = dot_out((dP + tl.trans(dP)) * -r_k[None, :], k_c, dk_c, BF16, OUT)
        if L2NORM:
            unit = k_c.to(tl.float32) * r_k[:, None]
            dk_c -= unit * tl.sum(unit * dk_c, axis=1)[:, None]
        store_tile(dk, dk_c * -r_k[:, None], ic * (H * K), ik, valid, K, BK)
