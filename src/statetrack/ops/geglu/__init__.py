"""The gated activation of the sLSTM's MLP: gelu(gate) * up."""

from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import load, no_triton, pick_backend

BACKENDS = {
    "reference": "statetrack.ops.geglu.reference:geglu_reference",
    "triton": "statetrack.ops.geglu.triton.backend:geglu_triton",
}


def _triton_refuses(x: Tensor) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    return no_triton(x) or load("statetrack.ops.swiglu.triton.backend:refuses")(x)


def geglu(x: Tensor, *, backend: str = "auto") -> Tensor:
    """gelu(gate) * up with x = [gate, up], halves of the last axis. Shapes: x (..., 2 w), result (..., w)."""
    checks.require_tensors("geglu", x=x)
    checks.check_floating("geglu", x.device, x=x)
    if x.shape[-1] % 2:
        raise UserError(
            f"geglu: x has shape {tuple(x.shape)}, expected an even last axis: gates, then as many values."
        )
    return pick_backend("geglu", backend, x.device, BACKENDS, {"triton": lambda: _triton_refuses(x)})(x)


__all__ = ["geglu"]
