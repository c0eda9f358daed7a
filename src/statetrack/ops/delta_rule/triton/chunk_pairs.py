"""The sweeps over few long sequences, two chunks per step.

Where a sweep has a multiprocessor to itself it waits for its own results: a product with S, one with the
inverse, one with K, each of which needs the one before. Two chunks share these waits once the second needs
nothing of the first but the state before both. With R = V - e^G K S of that state, the inverse of both chunks
together has a corner (docs/internals/delta_rule.md, "Pairs of chunks"):

    join_pairs             corner = -inverse_2 N_21 inverse_1,  N_21 = k_in K_2 (k_out K_1)^T diag(b_1)
    sweep_pairs            E_1 = inverse_1 R_1,  E_2 = inverse_2 R_2 + corner R_1
    sweep_pairs_backward   Z_2 = inverse_2^T b_2 dU_2,  Z_1 = inverse_1^T b_1 dU_1 + corner^T b_2 dU_2

Grids: join_pairs has a program per (pair of chunks, head); the sweeps one per sequence, head and slice of BV
columns of v, as in chunk_forward.py, and hold a transposed slice of S or D in registers. Shared memory
holds the tiles of two chunks, STAGES pairs ahead: it is what limits these kernels.

The state between two chunks is stored too, so `outputs` and `gradients` run over single chunks. An odd last
chunk is paired with one of no rows. Letters and row factors: chunk_forward.py.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.chunk_state import load_state, row_factors, sweep_program
from statetrack.ops.delta_rule.triton.tiles import (
    BF16_LAST_BIT,
    dot_input,
    dot_inverse,
    dot_out,
    dot_state,
    dot_tf32x3,
    load_inverse,
    load_tile,
    row_tokens,
    sequence_rows,
    split_high_low,
    store_inverse,
    store_tile,
)


@triton.jit
def _pair(sequence, pair, chunks, h, H, C: tl.constexpr):
    """Rows of the two chunks of a pair, their slots among all (chunk, head), and that of the pair.

    A second chunk beyond the last has no rows, and the slot of the first.
    """
    c, pairs, ic = 2 * pair, tl.cdiv(chunks, 2), tl.arange(0, C)
    second = tl.minimum(c + 1, chunks - 1)
    slot_1 = ((sequence * chunks + c) * H + h).to(tl.int64)
    slot_2 = ((sequence * chunks + second) * H + h).to(tl.int64)
    return c * C + ic, c * C + C + ic, slot_1, slot_2, ((sequence * pairs + pair) * H + h).to(tl.int64)


@triton.jit
def join_pairs_kernel(
    k, beta, g, inverse, inverse_norms, corner, T, H,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, HOUSEHOLDERS: tl.constexpr, GATED: tl.constexpr,
    BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(T * HOUSEHOLDERS, C)
    pairs = tl.cdiv(chunks, 2)
    h = tl.program_id(1)
    sequence, pair = tl.program_id(0) // pairs, tl.program_id(0) % pairs
    first, rows = sequence_rows(k, sequence, T, HOUSEHOLDERS, False)
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    k += (first * H + h) * K
    beta += first * H + h
    if GATED:
        g += first // HOUSEHOLDERS * H + h
    row_1, row_2, slot_1, slot_2, pair_slot = _pair(sequence, pair, chunks, h, H, C)
    valid_1, token_1, _ = row_tokens(row_1, row_1, rows, HOUSEHOLDERS)
    valid_2, token_2, _ = row_tokens(row_2, row_2, rows, HOUSEHOLDERS)
    b, _, k_out, _, _ = row_factors(
        beta, g, inverse_norms, slot_1, row_1, valid_1, token_1, H, C, HOUSEHOLDERS, GATED, BETA_FROM_LOGITS,
        HARD_BETA,
    )  # fmt: skip
    _, k_in, _, _, _ = row_factors(
        beta, g, inverse_norms, slot_2, row_2, valid_2, token_2, H, C, HOUSEHOLDERS, GATED, BETA_FROM_LOGITS,
        HARD_BETA,
    )  # fmt: skip
    N = tl.zeros((C, C), tl.float32)
    for slice in tl.static_range(0, (K + BK - 1) // BK):
        column = slice * BK + ik
        k_1 = load_tile(k, row_1 * (H * K), column, valid_1, K, BK, BF16)
        k_2 = load_tile(k, row_2 * (H * K), column, valid_2, K, BK, BF16)
        if BF16:  # products of inputs are exact
            N = tl.dot(k_2, tl.trans(k_1), N)
        else:
            N = dot_input(k_2, tl.trans(k_1), N, False)
    N *= k_in[:, None] * (k_out * b)[None, :]
    high, low = load_inverse(inverse + slot_1 * C * C, i, j, C, BF16)
    N = dot_inverse(N, high, low, BF16)
    high, low = load_inverse(inverse + slot_2 * C * C, i, j, C, BF16)
    corner += pair_slot * C * C
    if BF16:
        N_high, N_low = split_high_low(N, BF16_LAST_BIT)
        product = tl.dot(high, N_low.to(tl.bfloat16), tl.dot(low, N_high.to(tl.bfloat16)))
        product = tl.dot(high, N_high.to(tl.bfloat16), product)
    else:
        product = dot_tf32x3(high, N, None)
    store_inverse(corner, -product, i, j, C, BF16)


@triton.jit
def sweep_pairs_kernel(
    k, v, beta, g, initial_state, inverse, corner, inverse_norms, E, states, final_state, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HOUSEHOLDERS: tl.constexpr, GATED: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr,
    HAS_INITIAL_STATE:
    tl.constexpr, OUTPUT_FINAL_STATE: tl.constexpr, BF16: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # R, E and S are transposed, as in `sweep_kernel`
    sequence, h, iv = sweep_program(H, V, BV)
    first, rows = sequence_rows(k, sequence, T, HOUSEHOLDERS, False)
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    S, inside, state_offsets = load_state(initial_state, sequence, h, iv, H, K, V, BK, HAS_INITIAL_STATE)
    k += (first * H + h) * K
    v += (first * H + h) * V
    E += (first * H + h) * V
    beta += first * H + h
    if GATED:
        g += first // HOUSEHOLDERS * H + h
    chunks = tl.cdiv(rows, C)
    pairs = tl.cdiv(chunks, 2)
    cell = iv[:, None] * K + ik[None, :]
    for pair in tl.range(0, pairs, num_stages=STAGES, disable_licm=True):
        row_1, row_2, slot_1, slot_2, pair_slot = _pair(sequence, pair, chunks, h, H, C)
        valid_1, token_1, _ = row_tokens(row_1, row_1, rows, HOUSEHOLDERS)
        valid_2, token_2, _ = row_tokens(row_2, row_2, rows, HOUSEHOLDERS)
        b_1, k_in_1, k_out_1, _, G_C_1 = row_factors(
            beta, g, inverse_norms, slot_1, row_1, valid_1, token_1, H, C, HOUSEHOLDERS, GATED,
            BETA_FROM_LOGITS, HARD_BETA,
        )  # fmt: skip
        b_2, k_in_2, k_out_2, _, G_C_2 = row_factors(
            beta, g, inverse_norms, slot_2, row_2, valid_2, token_2, H, C, HOUSEHOLDERS, GATED,
            BETA_FROM_LOGITS, HARD_BETA,
        )  # fmt: skip
        k_1 = load_tile(k, row_1 * (H * K), ik, valid_1, K, BK, BF16)
        k_2 = load_tile(k, row_2 * (H * K), ik, valid_2, K, BK, BF16)
        v_1 = load_tile(v, row_1 * (H * V), iv, valid_1, V, BV, BF16)
        v_2 = load_tile(v, row_2 * (H * V), iv, valid_2, V, BV, BF16)
        high_1, low_1 = load_inverse(inverse + slot_1 * C * C, i, j, C, BF16)
        high_2, low_2 = load_inverse(inverse + slot_2 * C * C, i, j, C, BF16)
        high, low = load_inverse(corner + pair_slot * C * C, i, j, C, BF16)
        tl.store(states + slot_1 * K * V + cell, S.to(states.dtype.element_ty), mask=inside)
        R_1 = tl.trans(v_1.to(tl.float32)) - k_in_1[None, :] * dot_state(S, tl.trans(k_1), None, BF16)
        if GATED:
            k_in_2 *= tl.exp(G_C_1)
        R_2 = tl.trans(v_2.to(tl.float32)) - k_in_2[None, :] * dot_state(S, tl.trans(k_2), None, BF16)
        E_1 = dot_inverse(R_1, tl.trans(high_1), tl.trans(low_1), BF16)
        E_2 = dot_inverse(R_2, tl.trans(high_2), tl.trans(low_2), BF16)
        E_2 += dot_inverse(R_1, tl.trans(high), tl.trans(low), BF16)
        store_tile(E, tl.trans(E_1), row_1 * (H * V), iv, valid_1, V, BV)
        store_tile(E, tl.trans(E_2), row_2 * (H * V), iv, valid_2, V, BV)
        if GATED:
            S *= tl.exp(G_C_1)
        S = dot_state((k_out_1 * b_1)[None, :] * E_1, k_1, S, BF16)
        second_exists = inside & (2 * pair + 1 < chunks)
        tl.store(states + slot_2 * K * V + cell, S.to(states.dtype.element_ty), mask=second_exists)
        if GATED:
            S *= tl.exp(G_C_2)
        S = dot_state((k_out_2 * b_2)[None, :] * E_2, k_2, S, BF16)
    if OUTPUT_FINAL_STATE:
        tl.store(final_state + state_offsets, S, mask=inside)


@triton.jit
def sweep_pairs_backward_kernel(
    k, beta, g, inverse, corner, inverse_norms, dfinal_state, dv, dstates, dinitial_state, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HOUSEHOLDERS: tl.constexpr, GATED: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr,
    HAS_DFINAL_STATE:
    tl.constexpr, HAS_INITIAL_STATE: tl.constexpr, BF16: tl.constexpr, OUT: tl.constexpr, STAGES:
    tl.constexpr,
):  # fmt: skip
    # dv and dstates hold what `prepare_backward` left there; dU, Z and D are transposed
    sequence, h, iv = sweep_program(H, V, BV)
    first, rows = sequence_rows(k, sequence, T, HOUSEHOLDERS, False)
    ic, ik = tl.arange(0, C), tl.arange(0, BK)
    i, j = ic[:, None], ic[None, :]
    D, inside, state_offsets = load_state(dfinal_state, sequence, h, iv, H, K, V, BK, HAS_DFINAL_STATE)
    k += (first * H + h) * K
    dv += (first * H + h) * V
    beta += first * H + h
    if GATED:
        g += first // HOUSEHOLDERS * H + h
    chunks = tl.cdiv(rows, C)
    pairs = tl.cdiv(chunks, 2)
    cell = iv[:, None] * K + ik[None, :]
    for back in tl.range(0, pairs, num_stages=STAGES, disable_licm=True):
        pair = pairs - 1 - back
        row_1, row_2, slot_1, slot_2, pair_slot = _pair(sequence, pair, chunks, h, H, C)
        second_exists = inside & (2 * pair + 1 < chunks)
        valid_1, token_1, _ = row_tokens(row_1, row_1, rows, HOUSEHOLDERS)
        valid_2, token_2, _ = row_tokens(row_2, row_2, rows, HOUSEHOLDERS)
        b_1, k_in_1, k_out_1, _, G_C_1 = row_factors(
            beta, g, inverse_norms, slot_1, row_1, valid_1, token_1, H, C, HOUSEHOLDERS, GATED,
            BETA_FROM_LOGITS, HARD_BETA,
        )  # fmt: skip
        b_2, k_in_2, k_out_2, _, G_C_2 = row_factors(
            beta, g, inverse_norms, slot_2, row_2, valid_2, token_2, H, C, HOUSEHOLDERS, GATED,
            BETA_FROM_LOGITS, HARD_BETA,
        )  # fmt: skip
        QdO_1 = tl.load(dstates + slot_1 * K * V + cell, mask=inside, other=0.0)
        QdO_2 = tl.load(dstates + slot_2 * K * V + cell, mask=second_exists, other=0.0)
        dU_1 = tl.trans(load_tile(dv, row_1 * (H * V), iv, valid_1, V, BV, False))
        dU_2 = tl.trans(load_tile(dv, row_2 * (H * V), iv, valid_2, V, BV, False))
        k_1 = load_tile(k, row_1 * (H * K), ik, valid_1, K, BK, BF16)
        k_2 = load_tile(k, row_2 * (H * K), ik, valid_2, K, BK, BF16)
        high_1, low_1 = load_inverse(inverse + slot_1 * C * C, i, j, C, BF16)
        high_2, low_2 = load_inverse(inverse + slot_2 * C * C, i, j, C, BF16)
        high, low = load_inverse(corner + pair_slot * C * C, i, j, C, BF16)
        tl.store(dstates + slot_2 * K * V + cell, D.to(dstates.dtype.element_ty), mask=second_exists)
        dU_2 += k_out_2[None, :] * dot_state(D, tl.trans(k_2), None, BF16)
        DK_1 = dot_state(D, tl.trans(k_1), None, BF16)
        if GATED:
            DK_1 *= tl.exp(G_C_2)
            D *= tl.exp(G_C_2)
        dU_1 += k_out_1[None, :] * dot_out(QdO_2, tl.trans(k_1), DK_1, BF16, OUT)
        D += QdO_2.to(tl.float32)
        Z_2 = dot_inverse(b_2[None, :] * dU_2, high_2, low_2, BF16)
        Z_1 = dot_inverse(b_1[None, :] * dU_1, high_1, low_1, BF16)
        Z_1 += dot_inverse(b_2[None, :] * dU_2, high, low, BF16)
        store_tile(dv, tl.trans(Z_2), row_2 * (H * V), iv, valid_2, V, BV)
        store_tile(dv, tl.trans(Z_1), row_1 * (H * V), iv, valid_1, V, BV)
        D = dot_state(-k_in_2[None, :] * Z_2, k_2, D, BF16)
        tl.store(dstates + slot_1 * K * V + cell, D.to(dstates.dtype.element_ty), mask=inside)
        if GATED:
            D *= tl.exp(G_C_1)
        D += QdO_1.to(tl.float32)
        D = dot_state(-k_in_1[None, :] * Z_1, k_1, D, BF16)
    if HAS_INITIAL_STATE:
        tl.store(dinitial_state + state_offsets, D, mask=inside)
