"""The mLSTM: a matrix memory with scalar gates, sigmoid(f) in (0, 1) or 2 sigmoid(f) - 1 in (-1, 1)."""

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.autograd import run_backend
from statetrack.ops.backends import load, no_triton, pick_backend
from statetrack.ops.mlstm.reference import MLSTMCell, fresh_cell
from statetrack.ops.padded_rows import OPEN, SHUT, PaddedRows

BACKENDS = {
    "reference": "statetrack.ops.mlstm.reference:mlstm_reference",
    "chunked": "statetrack.ops.mlstm.chunked:mlstm_chunked",
    "native": "statetrack.ops.mlstm.native:mlstm_native",
    "triton": "statetrack.ops.mlstm.triton.backend:mlstm_triton",
}
JOINED_BACKENDS = {
    "reference": "statetrack.ops.mlstm.joined:mlstm_joined_reference",
    "chunked": "statetrack.ops.mlstm.joined:mlstm_joined_chunked",
    "native": "statetrack.ops.mlstm.joined:mlstm_joined_native",
    "triton": "statetrack.ops.mlstm.triton.backend:mlstm_joined_triton",
}


def _triton_refuses(q: Tensor, v: Tensor, state: MLSTMCell | None, signed: bool) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    return no_triton(q) or load("statetrack.ops.mlstm.triton.backend:refuses")(q, v, state, signed)


def _refusals(q: Tensor, v: Tensor, state: MLSTMCell | None, signed: bool) -> dict:
    """For `pick_backend`."""
    native = "statetrack.ops.gated_linear_attention.native:refuses"
    return {
        "native": lambda: load(native)(q, v),
        "triton": lambda: _triton_refuses(q, v, state, signed),
    }


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    signed: bool = False,
    initial_state: MLSTMCell | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, MLSTMCell]:
    """Apply the mLSTM (Beck et al. 2024) along time: a matrix memory with scalar gates.

        C_t = sigmoid(f_t) C_{t-1} + exp(i_t) k_t v_t^T / sqrt(K)
        n_t = sigmoid(f_t) n_{t-1} + exp(i_t) k_t / sqrt(K)
        h_t = C_t^T q_t / max(|n_t . q_t|, 1)

    Shapes, with time before heads: q, k (B, T, H, K); v (B, T, H, V); i, f (B, T, H), the gates before
    their exp and sigmoid, any real numbers. C and n are kept divided by exp(m_t), m_t = max(log
    sigmoid(f_t) + m_{t-1}, i_t), so that large gates do not overflow; m cancels in h.

    `signed` puts the gate a_t = 2 sigmoid(f_t) - 1 = tanh(f_t / 2), in (-1, 1), in the place of sigmoid(f_t),
    in C and in n alike. h_t stays a ratio of two sums with the same weights, but these now have signs: where
    they cancel, |n_t . q_t| falls below 1 and h_t is no longer a mean of values. The sign of C_t^T q_t is
    kept, since only the size of n_t . q_t divides it. m_t follows the sizes, log |a_t|, and is a constant for
    the gradient, which is exact at a_t = 0 too. Without a normaliser there is no m either, and the mLSTM is
    `gated_linear_attention`: docs/gates.md. NaN or infinity at step t leaves earlier outputs alone on a CPU;
    on a GPU, other outputs of the same chunk may become NaN with it. Inside `statetrack.checked()` it is
    refused, with the first bad step.

    Returns h (B, T, H, V) in the dtype of v, and the last state, an `MLSTMCell` of C (B, H, K, V), n (B, H,
    K) and m (B, H) in float32 (float64 if q is), which a later call takes as `initial_state`. `backend` is
    "auto", "reference", "chunked", "native" (CPU) or "triton" (GPU; up to 64 steps from an empty state).

    `cu_seqlens` (S + 1 offsets, B = 1) packs S sequences into one row: h is (1, N, H, V), and there is one
    state per sequence, (S, ...), in `initial_state` and in the result. Inside they are padded to
    `max_seqlen`, at least the longest sequence, which is looked up if it is not given.

    >>> q, k, v = torch.randn(3, 2, 16, 4, 32).unbind()              # B, T, H, K = 2, 16, 4, 32
    >>> i, f = torch.randn(2, 2, 16, 4).unbind()
    >>> h, state = mlstm(q, k, v, i, f)
    >>> h.shape, state.C.shape
    (torch.Size([2, 16, 4, 32]), torch.Size([2, 4, 32, 32]))
    """
    op = "mlstm"
    checks.require_tensors(op, q=q, k=k, v=v, i=i, f=f)
    checks.check_flags(op, signed=signed)
    checks.check_heads(op, q, v, "Time comes before heads in this library.")
    checks.check_floating(op, q.device, q=q, k=k, v=v, i=i, f=f)
    checks.check_shape(op, "k", k, tuple(q.shape), "the shape of q")
    checks.check_shape(op, "v", v, (*q.shape[:3], v.shape[-1]), "(batch, time, heads, V)")
    _check_gates(op, q, i, f)
    if cu_seqlens is not None:
        rows = PaddedRows(op, cu_seqlens, max_seqlen, q)
        return _packed(rows, q, k, v, i, f, signed, initial_state, backend)
    checks.check_offsets(op, cu_seqlens, max_seqlen, q.shape[1])
    state = _checked_state(op, q, v, initial_state)
    if checks.is_checked():
        checks.check_finite(op, time=1, q=q, k=k, v=v, i=i, f=f)
    run = pick_backend(op, backend, q.device, BACKENDS, _refusals(q, v, state, signed))
    h, state = run_backend(op, run, q.device, q, k, v, i, f, state, signed)
    return h.to(v.dtype), state


def mlstm_joined(
    qkv: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    signed: bool = False,
    initial_state: MLSTMCell | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, MLSTMCell]:
    """`mlstm` of the parts q, k and v of qkv (B, T, 3, H, K), as one product of the input gives them.

    The Triton kernels read them where they are, and write one gradient: nothing is copied apart or together.
    """
    op = "mlstm_joined"
    checks.require_tensors(op, qkv=qkv, i=i, f=f)
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise UserError(f"{op}: qkv has shape {tuple(qkv.shape)}, expected (batch, time, 3, heads, width).")
    checks.check_flags(op, signed=signed)
    checks.check_floating(op, qkv.device, qkv=qkv, i=i, f=f)
    q, k, v = qkv.unbind(2)
    _check_gates(op, q, i, f)
    if cu_seqlens is not None:
        rows = PaddedRows(op, cu_seqlens, max_seqlen, q)
        return _packed(rows, q, k, v, i, f, signed, initial_state, backend)
    checks.check_offsets(op, cu_seqlens, max_seqlen, q.shape[1])
    state = _checked_state(op, q, v, initial_state)
    if checks.is_checked():
        checks.check_finite(op, time=1, qkv=qkv, i=i, f=f)
    run = pick_backend(op, backend, qkv.device, JOINED_BACKENDS, _refusals(q, v, state, signed))
    h, state = run_backend(op, run, qkv.device, qkv, i, f, state, signed)
    return h.to(qkv.dtype), state


def _check_gates(op: str, q: Tensor, i: Tensor, f: Tensor) -> None:
    for name, gate in (("i", i), ("f", f)):
        checks.check_shape(op, name, gate, tuple(q.shape[:3]), "(batch, time, heads)")


def _checked_state(op: str, q: Tensor, v: Tensor, state: MLSTMCell | None) -> MLSTMCell | None:
    """The state in the dtype of the recurrence; one of another shape is refused."""
    (B, _, H, K), V = q.shape, v.shape[-1]
    cell = checks.check_cell(op, state, q, C=(B, H, K, V), n=(B, H, K), m=(B, H))
    return None if cell is None else MLSTMCell(*cell)


def _packed(
    rows: PaddedRows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    signed: bool,
    initial_state: MLSTMCell | None,
    backend: str,
) -> tuple[Tensor, MLSTMCell]:
    """Packed sequences as a padded batch, whose steps behind the last one of a sequence keep its state."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = rows.padded(q), rows.padded(k), rows.padded(v)
    i, f = rows.padded(i.to(dtype), SHUT), rows.padded(f.to(dtype), OPEN)
    h, state = mlstm(q, k, v, i, f, signed=signed, initial_state=initial_state, backend=backend)
    before = fresh_cell(q, v) if initial_state is None else initial_state
    state = MLSTMCell(*(rows.kept_where_empty(x, y) for x, y in zip(state, before, strict=True)))
    return rows.packed(h), state


__all__ = ["MLSTMCell", "mlstm", "mlstm_joined"]
