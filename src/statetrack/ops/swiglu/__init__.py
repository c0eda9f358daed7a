"""The gated activation of an MLP: silu(gate) * up, alone or with the linear map that follows."""

from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import load, no_triton, pick_backend

BACKENDS = {
    "reference": "statetrack.ops.swiglu.reference:swiglu_reference",
    "triton": "statetrack.ops.swiglu.triton.backend:swiglu_triton",
}
PRODUCT_BACKENDS = {
    "reference": "statetrack.ops.swiglu.reference:swiglu_product_reference",
    "triton": "statetrack.ops.swiglu.triton.backend:swiglu_product_triton",
}


def _triton_refuses(x: Tensor) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    return no_triton(x) or load("statetrack.ops.swiglu.triton.backend:refuses")(x)


def swiglu(x: Tensor, *, backend: str = "auto") -> Tensor:
    """silu(gate) * up with x = [gate, up], halves of the last axis. Shapes: x (..., 2 w), result (..., w)."""
    _check("swiglu", x)
    run = pick_backend("swiglu", backend, x.device, BACKENDS, {"triton": lambda: _triton_refuses(x)})
    return run(x)


def swiglu_product(x: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """swiglu(x) W^T; on a GPU the activation is not kept for the backward pass, but computed again.

    Shapes: x (..., 2 w); weight W (n, w); result (..., n).
    """
    op = "swiglu_product"
    _check(op, x)
    checks.require_tensors(op, weight=weight)
    checks.check_floating(op, x.device, weight=weight)
    if weight.ndim != 2 or 2 * weight.shape[1] != x.shape[-1]:
        raise UserError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected (n, {x.shape[-1] // 2}) from x "
            f"{tuple(x.shape)}."
        )
    refusals = {"triton": lambda: _triton_refuses(x)}
    return pick_backend(op, backend, x.device, PRODUCT_BACKENDS, refusals)(x, weight)


def _check(op: str, x: Tensor) -> None:
    checks.require_tensors(op, x=x)
    checks.check_floating(op, x.device, x=x)
    if x.shape[-1] % 2:
        raise UserError(
            f"{op}: x has shape {tuple(x.shape)}, expected an even last axis: gates, then as many values."
        )


__all__ = ["swiglu", "swiglu_product"]
