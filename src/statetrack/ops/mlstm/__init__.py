"""The mLSTM: a matrix memory with scalar gates. Its transition sigmoid(f) I has no negative eigenvalue."""

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import pick_backend
from statetrack.ops.mlstm.reference import MLSTMCell


def _reference():
    from statetrack.ops.mlstm.reference import mlstm_reference

    return mlstm_reference


def _chunked():
    from statetrack.ops.mlstm.chunked import mlstm_chunked

    return mlstm_chunked


BACKENDS = {"reference": _reference, "chunked": _chunked}


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    initial_state: MLSTMCell | None = None,
    backend: str = "auto",
) -> tuple[Tensor, MLSTMCell]:
    """Apply the mLSTM along time. Equation and shapes: `reference.mlstm_reference`.

    Outputs come in the dtype of v, states in float32 (float64 when q is).
    """
    op = "mlstm"
    if q.ndim != 4 or v.ndim != 4:
        raise UserError(
            f"{op}: q has shape {tuple(q.shape)} and v {tuple(v.shape)}, expected four axes "
            "(batch, time, heads, width). Time comes before heads in this library."
        )
    checks.check_floating(op, q.device, q=q, k=k, v=v, i=i, f=f)
    checks.check_shape(op, "k", k, tuple(q.shape), "the shape of q")
    checks.check_shape(op, "v", v, (*q.shape[:3], v.shape[-1]), "(batch, time, heads, V)")
    for name, gate in (("i", i), ("f", f)):
        checks.check_shape(op, name, gate, tuple(q.shape[:3]), "(batch, time, heads)")
    if checks.is_checked():
        checks.check_finite(op, q=q, k=k, v=v, i=i, f=f)
    run = pick_backend(op, backend, q.device, BACKENDS)
    # Autocast would run the products inside in half precision.
    with torch.autocast(q.device.type, enabled=False):
        h, state = run(q, k, v, i, f, initial_state)
    return h.to(v.dtype), state


__all__ = ["MLSTMCell", "mlstm"]
