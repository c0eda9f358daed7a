"""Root-mean-square normalisation of rows, alone or of a sum: a residual is added where it is next read."""

import torch
from torch import Tensor

from statetrack.ops import checks
from statetrack.ops.backends import no_triton, pick_backend


def _reference():
    from statetrack.ops.rms_norm.reference import rms_norm_reference

    return rms_norm_reference


def _triton():
    from statetrack.ops.rms_norm.triton.backend import rms_norm_triton

    return rms_norm_triton


BACKENDS = {"reference": _reference, "triton": _triton}


def _triton_refuses(x: Tensor, y: Tensor | None) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    if reason := no_triton(x):
        return reason
    from statetrack.ops.rms_norm.triton.backend import refuses

    return refuses(x, y)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """x / rms(x) * weight over the last axis, in float32; the result in `out_dtype`, that of x when None.

    Equation: `rms_norm_reference`.
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
    """x + y, or x where y is None, and its `rms_norm`. `out_dtype` None is that of the sum.

    Taking both results from here also adds their gradients in one pass.
    """
    if y is not None:
        checks.check_shape("add_rms_norm", "y", y, tuple(x.shape), "the shape of x")
        checks.check_floating("add_rms_norm", x.device, y=y)
    return _run("add_rms_norm", x, y, weight, eps, out_dtype, backend)


def _run(op, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, out_dtype, backend: str):
    checks.check_floating(op, x.device, x=x, weight=weight)
    checks.check_shape(op, "weight", weight, tuple(x.shape[-1:]), "the last axis of x")
    if out_dtype is None:
        out_dtype = x.dtype if y is None else torch.promote_types(x.dtype, y.dtype)
    run = pick_backend(op, backend, x.device, BACKENDS, {"triton": lambda: _triton_refuses(x, y)})
    return run(x, y, weight, eps, out_dtype)


__all__ = ["add_rms_norm", "rms_norm"]
