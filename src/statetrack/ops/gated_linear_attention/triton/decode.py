"""Decoding, T = 1 without gradients: the recurrence itself, in one kernel.

    S <- a o S + k v^T        o = scale S^T q

A program has some columns of the state of one sequence and head, with all of its rows: BK holds all of K.
"""

import triton
import triton.language as tl


@triton.jit
def decode_kernel(
    q, k, v, gate, sign, start, o, end, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr,
    PER_HEAD: tl.constexpr, HAS_START: tl.constexpr,
):  # fmt: skip
    """q, k (B, 1, H, K) and v, o (B, 1, H, V); `gate` and `sign` as in gates.py; start, end (B, H, K, V)."""
    slices: tl.constexpr = (V + BV - 1) // BV
    row = (tl.program_id(0) // slices).to(tl.int64)  # of (B, H)
    ik, iv = tl.arange(0, BK), (tl.program_id(0) % slices) * BV + tl.arange(0, BV)
    in_k, in_v = ik < K, iv < V
    inside = in_k[:, None] & in_v[None, :]
    q_t = tl.load(q + row * K + ik, mask=in_k, other=0.0).to(tl.float32)
    k_t = tl.load(k + row * K + ik, mask=in_k, other=0.0).to(tl.float32)
    v_t = tl.load(v + row * V + iv, mask=in_v, other=0.0).to(tl.float32)
    cell = row * K * V + ik[:, None] * V + iv[None, :]
    S = k_t[:, None] * v_t[None, :]
    if HAS_START:
        # a gate per head is read once per channel, from the same place
        place = row + ik * 0 if PER_HEAD else row * K + ik
        a = tl.load(gate + place, mask=in_k, other=0.0).to(tl.float32)
        if GATE != "value":
            a = tl.exp(a)
        if GATE == "log and sign":
            a *= tl.load(sign + place, mask=in_k, other=0.0).to(tl.float32)
        S += a[:, None] * tl.load(start + cell, mask=inside, other=0.0).to(tl.float32)
    tl.store(end + cell, S, mask=inside)
    o_t = scale * tl.sum(q_t[:, None] * S, axis=0)
    tl.store(o + row * V + iv, o_t.to(o.dtype.element_ty), mask=in_v)
