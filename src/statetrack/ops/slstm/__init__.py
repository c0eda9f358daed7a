"""The sLSTM: a scalar memory whose gates see the last output. Not linear, so it stays a loop over time."""

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import no_triton, pick_backend
from statetrack.ops.slstm.reference import SLSTMCell


def _reference():
    from statetrack.ops.slstm.reference import slstm_reference

    return slstm_reference


def _scan():
    from statetrack.ops.slstm.scan import slstm_scan

    return slstm_scan


def _triton():
    from statetrack.ops.slstm.triton.backend import slstm_triton

    return slstm_triton


# "chunked" is the name of the plain PyTorch backend that "auto" takes; here its chunks are single steps.
BACKENDS = {"reference": _reference, "chunked": _scan, "triton": _triton}


def _triton_refuses(x: Tensor) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    if reason := no_triton(x):
        return reason
    from statetrack.ops.slstm.triton.backend import refuses

    return refuses(x)


def slstm(
    x: Tensor, R: Tensor, *, initial_state: SLSTMCell | None = None, backend: str = "auto"
) -> tuple[Tensor, SLSTMCell]:
    """Apply the sLSTM along time. Equation and shapes: `reference.slstm_reference`.

    Outputs come in the dtype of x, states in float32 (float64 when x is).
    """
    op = "slstm"
    if x.ndim != 5 or x.shape[3] != 4:
        raise UserError(f"{op}: x has shape {tuple(x.shape)}, expected (batch, time, heads, 4 gates, width).")
    H, D = x.shape[2], x.shape[4]
    checks.check_floating(op, x.device, x=x, R=R)
    checks.check_shape(op, "R", R, (H, D, 4 * D), "(heads, width, 4 * width)")
    if checks.is_checked():
        checks.check_finite(op, x=x, R=R)
    run = pick_backend(op, backend, x.device, BACKENDS, {"triton": lambda: _triton_refuses(x)})
    # Autocast would run the products inside in half precision.
    with torch.autocast(x.device.type, enabled=False):
        h, state = run(x, R, initial_state)
    return h.to(x.dtype), state


__all__ = ["SLSTMCell", "slstm"]
