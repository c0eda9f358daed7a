"""What the sweeps of the delta rule share: which part a program does, and the factors of a chunk's rows.

Letters and row factors: triton_chunk_kernels.py.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.tiles import _betas, _decays, _span


@triton.jit
def _program(H, V: tl.constexpr, BV: tl.constexpr):
    """Which sequence, head and columns of v a program of a sweep does."""
    slices: tl.constexpr = tl.cdiv(V, BV)  # one axis: a second one of a grid ends at 65,535
    pair = tl.program_id(0) // slices
    return pair // H, pair % H, (tl.program_id(0) % slices) * BV + tl.arange(0, BV)


@triton.jit
def _sequence(cu_seqlens, first_chunk, sequence, T, C: tl.constexpr, n: tl.constexpr, PACKED: tl.constexpr):
    """First row, number of rows, and first chunk of a sequence."""
    first, rows = _span(cu_seqlens, sequence, T, n, PACKED)
    if PACKED:
        chunk = tl.load(first_chunk + sequence).to(tl.int32)
    else:
        chunk = sequence * tl.cdiv(T * n, C)
    return first, rows, chunk


@triton.jit
def _state(
    given, sequence, h, iv, H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, GIVEN: tl.constexpr
):
    """A program's part of a state, on its side (columns of v, rows of k): `given`, or else zero.

    And which of its cells there are, and where they are among the states of all sequences and heads.
    """
    ik = tl.arange(0, BK)
    inside = (iv < V)[:, None] & (ik < K)[None, :]
    cells = (sequence * H + h).to(tl.int64) * K * V + ik[None, :] * V + iv[:, None]
    S = tl.zeros(inside.shape, tl.float32)
    if GIVEN:
        S = tl.load(given + cells, mask=inside, other=0.0).to(tl.float32)
    return S, inside, cells


@triton.jit
def _factors(
    beta, g, norms, saved, row, valid, token, H, C: tl.constexpr, n: tl.constexpr,
    GATED: tl.constexpr, LOGITS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """Of a chunk's rows: b, k_in, k_out; and the log-decay from its start to each row and across all."""
    b = _betas(beta, row * H, valid, LOGITS, SIGMOID)
    k_norm = tl.load(norms + saved * 2 * C + tl.arange(0, C))
    k_in, k_out, G, end = k_norm, k_norm, 0.0, 0.0
    if GATED:
        G, end = _decays(g, token * H, valid & (row % n == 0))
        k_in, k_out = k_norm * tl.exp(G), k_norm * tl.exp(end - G)
    return b, k_in, k_out, G, end
