"""Root-mean-square normalisation of rows, of a tensor or of a sum, so that a residual is added on the way."""

import torch
from torch import Tensor

from statetrack.ops import checks
from statetrack.ops.backends import load, no_triton, pick_backend

BACKENDS = {
    "reference": "statetrack.ops.rms_norm.reference:rms_norm_reference",
    "triton": "statetrack.ops.rms_norm.triton.backend:rms_norm_triton",
}


def _triton_refuses(x: Tensor, y: Tensor | None) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    return no_triton(x) or load("statetrack.ops.rms_norm.triton.backend:refuses")(x, y)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), the mean over the last axis.

    Shapes: x and the result (..., n), weight (n,). Computed in float32 (float64 stays); the result is in
    `out_dtype`, that of x when None.
    """
    return _run("rms_norm", x, None, weight, eps, out_dtype, backend)[1]


def add_rms_norm(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """s = x + y, or x when y is None, and weight * s / sqrt(mean(s^2) + eps), the mean over the last axis.

    Shapes: x, y and both results (..., n), weight (n,). The second result is in `out_dtype`, that of s when
    None. The gradients of both results are added in one pass.
    """
    checks.require_tensors("add_rms_norm", x=x)
    if y is not None:
        checks.check_tensors("add_rms_norm", y=y)
        checks.check_shape("add_rms_norm", "y", y, tuple(x.shape), "the shape of x")
        checks.check_floating("add_rms_norm", x.device, y=y)
    return _run("add_rms_norm", x, y, weight, eps, out_dtype, backend)


def _run(
    op: str,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    eps: float,
    out_dtype: torch.dtype | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    checks.require_tensors(op, x=x, weight=weight)
    checks.check_floating(op, x.device, x=x, weight=weight)
    checks.check_shape(op, "weight", weight, tuple(x.shape[-1:]), "the last axis of x")
    if out_dtype is None:
        out_dtype = x.dtype if y is None else torch.promote_types(x.dtype, y.dtype)
    run = pick_backend(op, backend, x.device, BACKENDS, {"triton": lambda: _triton_refuses(x, y)})
    return run(x, y, weight, eps, out_dtype)


__all__ = ["add_rms_norm", "rms_norm"]
