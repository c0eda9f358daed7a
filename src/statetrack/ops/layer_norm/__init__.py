"""Layer normalisation of rows, of a tensor or of a sum, so that a residual is added on the way."""

import torch
from torch import Tensor

from statetrack.ops import checks
from statetrack.ops.backends import load, no_triton, pick_backend

BACKENDS = {
    "reference": "statetrack.ops.layer_norm.reference:layer_norm_reference",
    "triton": "statetrack.ops.layer_norm.triton.backend:layer_norm_triton",
}


def _triton_refuses(x: Tensor, y: Tensor | None) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    return no_triton(x) or load("statetrack.ops.layer_norm.triton.backend:refuses")(x, y)


def add_layer_norm(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """s = x + y, or x when y is None, and weight * (s - mean(s)) / sqrt(var(s) + eps) + bias by rows.

    Shapes: x, y and both results (..., n), weight and bias (n,); mean and variance of n values. Computed in
    float32 (float64 stays). The second result is in `out_dtype`, that of s when None. The gradients of both
    results are added in one pass.
    """
    op = "add_layer_norm"
    checks.require_tensors(op, x=x, weight=weight, bias=bias)
    checks.check_tensors(op, y=y)
    checks.check_floating(op, x.device, x=x, y=y, weight=weight, bias=bias)
    if y is not None:
        checks.check_shape(op, "y", y, tuple(x.shape), "the shape of x")
    for name, parameter in (("weight", weight), ("bias", bias)):
        checks.check_shape(op, name, parameter, tuple(x.shape[-1:]), "the last axis of x")
    if out_dtype is None:
        out_dtype = x.dtype if y is None else torch.promote_types(x.dtype, y.dtype)
    run = pick_backend(op, backend, x.device, BACKENDS, {"triton": lambda: _triton_refuses(x, y)})
    return run(x, y, weight, bias, eps, out_dtype)


__all__ = ["add_layer_norm"]
