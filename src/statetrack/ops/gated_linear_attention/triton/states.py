"""The states of all chunks from what each chunk adds: the one kernel that goes along time.

    forward    S_{c+1} = P_C o S_c + U_c          U = (X o K)^T V, replaced by S_c, the state that enters
    backward   D_{c-1} = P_C o D_c + W_c          W = (P o Q)^T dO, replaced by D_c, the gradient of S_{c+1}

Entries of a state do not depend on each other: a program has a few rows of one, and only moves memory.
"""

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.chunk_state import sweep_sequence


@triton.jit
def sweep_kernel(
    states, kept, start, end, cu_seqlens, first_chunk, T, H,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PER_HEAD: tl.constexpr, PACKED: tl.constexpr, BACKWARD: tl.constexpr, HAS_START: tl.constexpr,
    HAS_END: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    slices: tl.constexpr = (K + ROWS - 1) // ROWS
    columns: tl.constexpr = (V + BV - 1) // BV
    part = tl.program_id(0) % (slices * columns)
    sequence_head = tl.program_id(0) // (slices * columns)
    sequence, h = sequence_head // H, sequence_head % H
    _, rows, chunk = sweep_sequence(cu_seqlens, first_chunk, sequence, T, C, 1, PACKED)
    ik = (part // columns) * ROWS + tl.arange(0, ROWS)
    iv = (part % columns) * BV + tl.arange(0, BV)
    inside = (ik < K)[:, None] & (iv < V)[None, :]
    cell = ik[:, None] * V + iv[None, :]
    place = sequence_head.to(tl.int64) * K * V + cell
    S = tl.zeros((ROWS, BV), tl.float32)
    if HAS_START:
        S = tl.load(start + place, mask=inside, other=0.0).to(tl.float32)
    chunks = tl.cdiv(rows, C)
    for step in tl.range(0, chunks, num_stages=STAGES):
        c = chunks - 1 - step if BACKWARD else step
        slot = ((chunk + c) * H + h).to(tl.int64)
        added = tl.load(states + slot * K * V + cell, mask=inside, other=0.0).to(tl.float32)
        if PER_HEAD:
            P_C = tl.load(kept + slot)
        else:
            P_C = tl.load(kept + slot * K + ik, mask=ik < K, other=0.0)[:, None]
        tl.store(states + slot * K * V + cell, S.to(states.dtype.element_ty), mask=inside)
        S = P_C * S + added
    if HAS_END:
        tl.store(end + place, S.to(end.dtype.element_ty), mask=inside)
