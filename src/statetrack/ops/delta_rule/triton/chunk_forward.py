"""The delta rule over any length, in chunks, forward: two or three Triton kernels.

Per chunk of C steps, with state S entering (docs/internals/delta_rule.md, "Chunks"):

    prepare   inverse = (I + N)^-1,  N = strictly_lower(K K^T o e^(G_i - G_j)) diag(b)
              A = lower(Q K^T o e^(G_i - G_j))
    sweep     E = inverse (V - e^G K S),  U = b E
              O = e^G Q S + A U,  S <- e^(G_C) S + (e^(G_C - G) K)^T U
    outputs   O, in place of `sweep` where sequences are few

Grids: prepare and outputs have a program per (chunk, head) and need no order. sweep has one per sequence,
head and slice of BV columns of v: columns of S are independent of each other. It goes through the chunks in
order.

Registers: sweep holds its slice of S, transposed (BV x BK), for the whole sequence; all other tiles live
for one chunk. Shared memory holds the operands of products that come from device memory, STAGES chunks
ahead.

q and k are loaded as they are. Norms, decays and scale multiply rows of results instead: k_in = e^G / ||k||,
k_out = e^(G_C - G) / ||k||, q_in = scale e^G / ||q||. With signed gates the stored 1 / ||k|| and
scale / ||q|| carry the product of all signs of the sequence so far: so q and k become those of the rule
without signs (docs/gates.md). A row is one step; a token has HOUSEHOLDERS rows, decays at its first and is
read at its last. `slot` is the place of a (chunk, head) in inverse, A, inverse_norms, states.
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
    BF16_LAST_BIT,
    chunk_rows,
    dot_input,
    dot_inverse,
    dot_out,
    dot_state,
    inverse_norm,
    load_beta,
    load_decay,
    load_inverse,
    load_tile,
    row_tokens,
    split_high_low,
    squared_norm,
    store_tile,
    unit_lower_inverse,
)


@triton.jit
def prepare_kernel(
    q, k, beta, g, inverse, A, inverse_norms, chunk_table, signs, T, H, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, HOUSEHOLDERS: tl.constexpr, GATED: tl.constexpr,
    SIGNED: tl.constexpr, PACKED: tl.constexpr, L2NORM: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr,
    HARD_BETA: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, HOUSEHOLDERS, PACKED)
    if rows <= 0:  # the grid is sized for the largest number of chunks that packed sequences can have
        return
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    step = (first % HOUSEHOLDERS).to(tl.int32) + ic
    valid, token, read = row_tokens(ic, step, rows, HOUSEHOLDERS)
    k += (first * H + h) * K
    q += (first // HOUSEHOLDERS * H + h) * K
    KK, QK = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    kk, qq = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for slice in tl.static_range(0, (K + BK - 1) // BK):
        column = slice * BK + ik
        k_c = load_tile(k, ic * H * K, column, valid, K, BK, BF16)
        q_c = load_tile(q, token * H * K, column, read, K, BK, BF16)
        if BF16:  # products of inputs are exact
            KK = tl.dot(k_c, tl.trans(k_c), KK)
            QK = tl.dot(q_c, tl.trans(k_c), QK)
        else:
            KK = dot_input(k_c, tl.trans(k_c), KK, False)
            QK = dot_out(q_c, tl.trans(k_c), QK, False, OUT)
        kk += squared_norm(k_c)
        qq += squared_norm(q_c)
    r_k, r_q = inverse_norm(kk, L2NORM), inverse_norm(qq, L2NORM)
    if SIGNED:
        sign = tl.load(signs + (first // HOUSEHOLDERS + token) * H + h, mask=valid, other=1.0)
        r_k, r_q = r_k * sign, r_q * sign
    b = load_beta(beta + first * H + h, ic * H, valid, BETA_FROM_LOGITS, HARD_BETA)
    N = KK * r_k[:, None] * (r_k * b)[None, :]
    QK = QK * (scale * r_q)[:, None] * r_k[None, :]
    if GATED:
        G, _ = load_decay(g + first // HOUSEHOLDERS * H + h, token * H, valid & (step % HOUSEHOLDERS == 0))
        decay = tl.exp(tl.where(i >= j, G[:, None] - G[None, :], 0.0))
        N *= decay
        QK *= decay
    slot = (chunk * H + h).to(tl.int64)
    A += slot * C * C
    tl.store(A + i * C + j, tl.where(i >= j, QK, 0.0).to(A.dtype.element_ty))
    tl.store(inverse_norms + slot * 2 * C + ic, r_k)
    tl.store(inverse_norms + slot * 2 * C + C + ic, scale * r_q)
    unit_lower_inverse(inverse + slot * C * C, tl.where(i > j, N, 0.0), C, BF16)


@triton.jit
def sweep_kernel(
    q, k, v, beta, g, initial_state, inverse, A, inverse_norms, out, E, states, final_state, cu_seqlens,
    first_chunk, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HOUSEHOLDERS: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr,
    HARD_BETA: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr, SAVE_STATES: tl.constexpr, OUTPUT_FINAL_STATE: tl.constexpr,
    WRITE_OUTPUTS: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # R, E, U, O and S are transposed, (columns of v) x (rows or columns of k): the result of one product
    # then is the left factor of the next as it lies in the registers.
    sequence, h, iv = sweep_program(H, V, BV)
    first, rows, chunk = sweep_sequence(cu_seqlens, first_chunk, sequence, T, C, HOUSEHOLDERS, PACKED)
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    S, inside, state_offsets = load_state(initial_state, sequence, h, iv, H, K, V, BK, HAS_INITIAL_STATE)
    k += (first * H + h) * K
    v += (first * H + h) * V
    E += (first * H + h) * V
    beta += first * H + h
    q += (first // HOUSEHOLDERS * H + h) * K
    out += (first // HOUSEHOLDERS * H + h) * V
    if GATED:
        g += first // HOUSEHOLDERS * H + h
    chunks = tl.cdiv(rows, C)
    for c in tl.range(0, chunks, num_stages=STAGES, disable_licm=True):
        row = c * C + ic
        valid, token, read = row_tokens(row, row, rows, HOUSEHOLDERS)
        slot = ((chunk + c) * H + h).to(tl.int64)
        k_c = load_tile(k, row * (H * K), ik, valid, K, BK, BF16)
        v_c = load_tile(v, row * (H * V), iv, valid, V, BV, BF16)
        inverse_high, inverse_low = load_inverse(inverse + slot * C * C, i, j, C, BF16)
        b, k_in, k_out, G, G_C = row_factors(
            beta, g, inverse_norms, slot, row, valid, token, H, C, HOUSEHOLDERS, GATED, BETA_FROM_LOGITS,
            HARD_BETA,
        )  # fmt: skip
        if SAVE_STATES:
            cell = slot * K * V + iv[:, None] * K + ik[None, :]
            tl.store(states + cell, S.to(states.dtype.element_ty), mask=inside)
        R = tl.trans(v_c.to(tl.float32)) - k_in[None, :] * dot_state(S, tl.trans(k_c), None, BF16)
        E_c = dot_inverse(R, tl.trans(inverse_high), tl.trans(inverse_low), BF16)
        store_tile(E, tl.trans(E_c), row * (H * V), iv, valid, V, BV)
        U = b[None, :] * E_c
        if WRITE_OUTPUTS:
            q_c = load_tile(q, token * (H * K), ik, read, K, BK, BF16)
            q_in = tl.load(inverse_norms + slot * 2 * C + C + ic)
            if GATED:
                q_in *= tl.exp(G)
            A_c = tl.load(A + slot * C * C + i * C + j)
            if not BF16:
                A_c = A_c.to(tl.float32)
            S_out = S
            if BF16:  # the high term, which dot_state has made already, instead of another rounding
                S_out, _ = split_high_low(S, BF16_LAST_BIT)
            o = q_in[None, :] * dot_out(S_out, tl.trans(q_c), None, BF16, OUT)
            o = dot_out(U, tl.trans(A_c), o, BF16, OUT)
            store_tile(out, tl.trans(o), token * (H * V), iv, read, V, BV)
        if GATED:
            S *= tl.exp(G_C)
        S = dot_state(k_out[None, :] * U, k_c, S, BF16)
    if OUTPUT_FINAL_STATE:
        tl.store(final_state + state_offsets, S, mask=inside)


@triton.jit
def outputs_kernel(
    q, beta, g, A, inverse_norms, E, states, out, chunk_table, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HOUSEHOLDERS: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr,
    HARD_BETA: tl.constexpr,
    BF16: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, rows = chunk_rows(chunk_table, chunk, T, C, HOUSEHOLDERS, PACKED)
    if rows <= 0:
        return
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    step = (first % HOUSEHOLDERS).to(tl.int32) + ic
    valid, token, read = row_tokens(ic, step, rows, HOUSEHOLDERS)
    slot = (chunk * H + h).to(tl.int64)
    E += (first * H + h) * V
    out += (first // HOUSEHOLDERS * H + h) * V
    b = load_beta(beta + first * H + h, ic * H, valid, BETA_FROM_LOGITS, HARD_BETA)
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
        S = tl.load(states + slot * K * V + cell, mask=inside, other=0.0)
        U = b[:, None] * load_tile(E, ic * (H * V), iv, valid, V, BV, False)
        o = q_in[:, None] * dot_out(q_c, tl.trans(S), None, BF16, OUT)
        o = dot_out(A_c, U, o, BF16, OUT)
        store_tile(out, o, token * (H * V), iv, read, V, BV)
