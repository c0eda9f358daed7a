"""The gated activation of an MLP: silu(gate) * up."""

from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import load, no_triton, pick_backend

BACKENDS = {
    "reference": "statetrack.ops.swiglu.reference:swiglu_reference",
    "triton": "statetrack.ops.swiglu.triton.backend:swiglu_triton",
}


def _triton_refuses(x: Tensor) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    return no_triton(x) or load("statetrack.ops.swiglu.triton.backend:refuses")(x)


def swiglu(x: Tensor, *, backend: str = "auto") -> Tensor:
    """silu(gate) * up with x = [gate, up], halves of the last axis. Shapes: x (..., 2 w), result (..., w)."""
    checks.check_floating("swiglu", x.device, x=x)
    if x.shape[-1] % 2:
        raise UserError(
            f"swiglu: x has shape {tuple(x.shape)}, expected an even last axis: gates, then as many values."
        )
    run = pick_backend("swiglu", backend, x.device, BACKENDS, {"triton": lambda: _triton_refuses(x)})
    return run(x)


__all__ = ["swiglu"]
