"""The sLSTM: a scalar memory whose gates see the last output. Not linear, so it stays a loop over time."""

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.autograd import run_backend
from statetrack.ops.backends import load, no_triton, pick_backend
from statetrack.ops.padded_rows import OPEN, SHUT, PaddedRows
from statetrack.ops.slstm.reference import SLSTMCell, fresh_cell

# "chunked" is the name of the plain PyTorch backend that "auto" takes; here its chunks are single steps.
BACKENDS = {
    "reference": "statetrack.ops.slstm.reference:slstm_reference",
    "chunked": "statetrack.ops.slstm.chunked:slstm_chunked",
    "triton": "statetrack.ops.slstm.triton.backend:slstm_triton",
}


def _triton_refuses(x: Tensor) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    return no_triton(x) or load("statetrack.ops.slstm.triton.backend:refuses")(x)


def slstm(
    x: Tensor,
    R: Tensor,
    *,
    bias: Tensor | None = None,
    initial_state: SLSTMCell | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, SLSTMCell]:
    """Apply the sLSTM (Beck et al. 2024) along time: an LSTM with an exponential input gate.

        (i, f, z, o)_t = x_t + b + R h_{t-1}
        c_t = sigmoid(f_t) c_{t-1} + exp(i_t) tanh(z_t)
        n_t = sigmoid(f_t) n_{t-1} + exp(i_t)
        h_t = sigmoid(o_t) c_t / n_t

    Shapes: x (B, T, H, 4, D), the input's part of the gates i, f, z, o before their activation functions;
    R (H, D, 4 D), one matrix per head; the bias b (H, 4, D), 0 when None. The gates depend on the last
    output, so the recurrence is not linear and stays a loop over time. c and n are kept divided by exp(m_t),
    m_t = max(log sigmoid(f_t) + m_{t-1}, i_t), which cancels in h.

    Returns h (B, T, H, D) in the wider dtype of x and R, and the last state, an `SLSTMCell` of h, c, n and m
    (B, H, D) in float32 (float64 if x is), which a later call takes as `initial_state`. `backend` is "auto",
    "reference", "chunked" or "triton" (GPU).

    `cu_seqlens` (S + 1 offsets, B = 1) packs S sequences into one row: h is (1, N, H, D), and there is one
    state per sequence, (S, ...), in `initial_state` and in the result. Inside they are padded to
    `max_seqlen`, at least the longest sequence, which is looked up if it is not given.

    >>> x, R = torch.randn(2, 16, 4, 4, 32), torch.randn(4, 32, 128) / 32       # B, T, H, D = 2, 16, 4, 32
    >>> h, state = slstm(x, R)
    >>> h.shape, state.c.shape
    (torch.Size([2, 16, 4, 32]), torch.Size([2, 4, 32]))
    """
    op = "slstm"
    checks.require_tensors(op, x=x, R=R)
    if x.ndim != 5 or x.shape[3] != 4:
        raise UserError(f"{op}: x has shape {tuple(x.shape)}, expected (batch, time, heads, 4 gates, width).")
    H, D = x.shape[2], x.shape[4]
    checks.check_floating(op, x.device, x=x, R=R)
    checks.check_shape(op, "R", R, (H, D, 4 * D), "(heads, width, 4 * width)")
    if bias is not None:
        checks.require_tensors(op, bias=bias)
        checks.check_floating(op, x.device, bias=bias)
        checks.check_shape(op, "bias", bias, (H, 4, D), "(heads, 4 gates, width)")
    if cu_seqlens is not None:
        return _packed(PaddedRows(op, cu_seqlens, max_seqlen, x), x, R, bias, initial_state, backend)
    checks.check_offsets(op, cu_seqlens, max_seqlen, x.shape[1])
    shape = (x.shape[0], H, D)
    cell = checks.check_cell(op, initial_state, x, h=shape, c=shape, n=shape, m=shape)
    if checks.is_checked():
        checks.check_finite(op, time=1, x=x)
        checks.check_finite(op, R=R)
    run = pick_backend(op, backend, x.device, BACKENDS, {"triton": lambda: _triton_refuses(x)})
    h, state = run_backend(op, run, x.device, x, R, None if cell is None else SLSTMCell(*cell), bias)
    return h.to(torch.promote_types(x.dtype, R.dtype)), state


def _packed(
    rows: PaddedRows,
    x: Tensor,
    R: Tensor,
    bias: Tensor | None,
    initial_state: SLSTMCell | None,
    backend: str,
) -> tuple[Tensor, SLSTMCell]:
    """Packed sequences as a padded batch: steps behind the last one of a sequence keep c, n and m, not h."""
    dtype = torch.promote_types(x.dtype, R.dtype)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    i, f, z, o = x.unbind(-2)
    gates = (rows.padded(i, SHUT), rows.padded(f, OPEN), rows.padded(z), rows.padded(o))
    x = torch.stack(gates, dim=-2)
    h, state = slstm(x, R, bias=bias, initial_state=initial_state, backend=backend)
    if x.shape[1] > 0:
        last = (rows.lengths - 1).clamp(min=0)
        state = state._replace(h=h[torch.arange(len(h), device=h.device), last].to(state.c.dtype))
    before = fresh_cell(x) if initial_state is None else initial_state
    state = SLSTMCell(*(rows.kept_where_empty(s, y) for s, y in zip(state, before, strict=True)))
    return rows.packed(h).to(dtype), state


__all__ = ["SLSTMCell", "slstm"]
