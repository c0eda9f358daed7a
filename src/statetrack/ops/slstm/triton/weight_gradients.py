"""The gradients of the sLSTM's recurrent matrices and of its bias: sums over all steps of all sequences.

    dR_gate = sum_{b, t} h_{t-1} dG_gate^T        dbias_gate = sum_{b, t} dG_gate

One pass over h and dG. Grid: (programs, heads); program p takes the tiles of ROWS steps p, p + programs, ...
and leaves one partial gradient, the rows of dR and then that of the bias. Registers: the four sums (D, D).
Products are float32; with BF16, dG in bfloat16, h counts with sixteen bits.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from statetrack.ops.delta_rule.triton.tiles import dot_state


@triton.jit
def _load_gradient(dgates, place, inside, BF16: tl.constexpr):
    g = tl.load(dgates + place, mask=inside, other=0.0)
    if not BF16:
        g = g.to(tl.float32)
    return g


@triton.jit
def weight_gradients_kernel(
    h0, h, dgates, partial, B, T, H,
    D: tl.constexpr, BD: tl.constexpr, SH: tl.constexpr, SG: tl.constexpr, ROWS: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    """partial (programs, H, D + 1, 4 D) from h0 (B, H, D), h (B, T, H, D) and dgates."""
    head = tl.program_id(1)
    d = tl.arange(0, BD)
    dR_i, dR_f = tl.zeros((BD, BD), tl.float32), tl.zeros((BD, BD), tl.float32)
    dR_z, dR_o = tl.zeros((BD, BD), tl.float32), tl.zeros((BD, BD), tl.float32)
    db_i, db_f = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    db_z, db_o = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    start = tl.program_id(0) * ROWS
    while start < B * T:
        step = start + tl.arange(0, ROWS)
        t, b = step % T, step // T
        inside = (step < B * T)[:, None] & (d < D)[None, :]
        before = ((step.to(tl.int64) - 1) * H + head)[:, None] * D + d[None, :]
        entered = (b.to(tl.int64) * H + head)[:, None] * D + d[None, :]
        h_before = tl.load(h + before, mask=inside & (t > 0)[:, None], other=0.0)
        h_before += tl.load(h0 + entered, mask=inside & (t == 0)[:, None], other=0.0)
        h_before = tl.trans(h_before)
        place = step.to(tl.int64)[:, None] * H * 4 * D + head * SH + d[None, :]
        g = _load_gradient(dgates, place, inside, BF16)
        dR_i = dot_state(h_before, g, dR_i, BF16)
        db_i += tl.sum(g.to(tl.float32), 0)
        g = _load_gradient(dgates, place + SG, inside, BF16)
        dR_f = dot_state(h_before, g, dR_f, BF16)
        db_f += tl.sum(g.to(tl.float32), 0)
        g = _load_gradient(dgates, place + 2 * SG, inside, BF16)
        dR_z = dot_state(h_before, g, dR_z, BF16)
        db_z += tl.sum(g.to(tl.float32), 0)
        g = _load_gradient(dgates, place + 3 * SG, inside, BF16)
        dR_o = dot_state(h_before, g, dR_o, BF16)
        db_o += tl.sum(g.to(tl.float32), 0)
        start += tl.num_programs(0) * ROWS
    own = partial + (tl.program_id(0).to(tl.int64) * H + head) * (D + 1) * 4 * D
    at = d[:, None] * 4 * D + d[None, :]
    inside = (d < D)[:, None] & (d < D)[None, :]
    tl.store(own + at, dR_i, mask=inside)
    tl.store(own + at + D, dR_f, mask=inside)
    tl.store(own + at + 2 * D, dR_z, mask=inside)
    tl.store(own + at + 3 * D, dR_o, mask=inside)
    own += D * 4 * D + d
    tl.store(own, db_i, mask=d < D)
    tl.store(own + D, db_f, mask=d < D)
    tl.store(own + 2 * D, db_z, mask=d < D)
    tl.store(own + 3 * D, db_o, mask=d < D)
