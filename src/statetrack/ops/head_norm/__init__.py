"""Layer normalisation of heads, with the skip and the output gate that follow it in the mLSTM."""

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import load, no_triton, pick_backend

BACKENDS = {
    "reference": "statetrack.ops.head_norm.reference:head_norm_reference",
    "triton": "statetrack.ops.head_norm.triton.backend:head_norm_triton",
}


def _triton_refuses(h: Tensor, c: Tensor | None, z: Tensor | None) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    return no_triton(h) or load("statetrack.ops.head_norm.triton.backend:refuses")(h, c, z)


def head_norm(
    h: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    skip: Tensor | None = None,
    c: Tensor | None = None,
    z: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """weight * u, or with all of skip, c and z (weight * u + skip * c) silu(z); u the heads of h, normalised.

        u = (h - mean(h)) / sqrt(var(h) + eps)        of each head

    Shapes: h (..., H, D); weight and skip (H D,); c, z and the result (..., H D). Computed in float32
    (float64 stays); the result is in `out_dtype`, that of h when None.
    """
    op = "head_norm"
    checks.require_tensors(op, h=h, weight=weight)
    checks.check_tensors(op, skip=skip, c=c, z=z)
    checks.check_floating(op, h.device, h=h, weight=weight, skip=skip, c=c, z=z)
    if h.ndim < 2:
        raise UserError(f"{op}: h has shape {tuple(h.shape)}, expected (..., heads, width).")
    if len({skip is None, c is None, z is None}) > 1:
        raise UserError(f"{op}: some of skip, c and z are missing, expected all of them or none.")
    width = h.shape[-2] * h.shape[-1]
    for name, parameter in (("weight", weight), ("skip", skip)):
        if parameter is not None:
            checks.check_shape(op, name, parameter, (width,), "(heads * width,)")
    for name, branch in (("c", c), ("z", z)):
        if branch is not None:
            checks.check_shape(op, name, branch, (*h.shape[:-2], width), "(..., heads * width)")
    run = pick_backend(op, backend, h.device, BACKENDS, {"triton": lambda: _triton_refuses(h, c, z)})
    return run(h, weight, eps, skip, c, z, h.dtype if out_dtype is None else out_dtype)


__all__ = ["head_norm"]
