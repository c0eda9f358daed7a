"""What the sweeps over chunks share: the part of the work a program does, and the factors of rows.

Equations, letters and row factors: chunk_forward.py.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.tiles import load_beta, load_decay, sequence_rows


@triton.jit
def sweep_program(H, V: tl.constexpr, BV: tl.constexpr):
    """The sequence, head and columns of v of a program; the grid has one axis, since others end at 65,535."""
    slices: tl.constexpr = tl.cdiv(V, BV)
    sequence_head = tl.program_id(0) // slices
    return sequence_head // H, sequence_head % H, (tl.program_id(0) % slices) * BV + tl.arange(0, BV)


@triton.jit
def sweep_sequence(
    cu_seqlens, first_chunk, sequence, T, C: tl.constexpr, HOUSEHOLDERS: tl.constexpr, PACKED: tl.constexpr
):
    """First row, number of rows, and first chunk of a sequence."""
    first, rows = sequence_rows(cu_seqlens, sequence, T, HOUSEHOLDERS, PACKED)
    if PACKED:
        chunk = tl.load(first_chunk + sequence).to(tl.int32)
    else:
        chunk = sequence * tl.cdiv(T * HOUSEHOLDERS, C)
    return first, rows, chunk


@triton.jit
def load_state(
    state, sequence, h, iv, H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, PRESENT: tl.constexpr
):
    """A program's part of a state, transposed (columns of v, columns of k): zero unless PRESENT.

    Also the mask of its entries, and their offsets among the states of all sequences and heads.
    """
    ik = tl.arange(0, BK)
    inside = (iv < V)[:, None] & (ik < K)[None, :]
    offsets = (sequence * H + h).to(tl.int64) * K * V + ik[None, :] * V + iv[:, None]
    S = tl.zeros(inside.shape, tl.float32)
    if PRESENT:
        S = tl.load(state + offsets, mask=inside, other=0.0).to(tl.float32)
    return S, inside, offsets


@triton.jit
def row_factors(
    beta, g, inverse_norms, slot, row, valid, token, H, C: tl.constexpr, HOUSEHOLDERS: tl.constexpr,
    GATED: tl.constexpr, BETA_FROM_LOGITS: tl.constexpr, HARD_BETA: tl.constexpr,
):  # fmt: skip
    """b, k_in and k_out of a chunk's rows, the log-decay G up to each row, and G_C at the chunk's end."""
    b = load_beta(beta, row * H, valid, BETA_FROM_LOGITS, HARD_BETA)
    r_k = tl.load(inverse_norms + slot * 2 * C + tl.arange(0, C))
    k_in, k_out, G, G_C = r_k, r_k, 0.0, 0.0
    if GATED:
        G, G_C = load_decay(g, token * H, valid & (row % HOUSEHOLDERS == 0))
        k_in, k_out = r_k * tl.exp(G), r_k * tl.exp(G_C - G)
    return b, k_in, k_out, G, G_C
