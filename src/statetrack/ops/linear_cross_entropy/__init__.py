"""The loss of a language model: a linear read-out and cross-entropy in one, without all logits in memory."""

from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.autograd import autocast_is_on
from statetrack.ops.backends import load, no_triton, pick_backend

BACKENDS = {
    "reference": "statetrack.ops.linear_cross_entropy.reference:linear_cross_entropy_reference",
    "chunked": "statetrack.ops.linear_cross_entropy.chunked:linear_cross_entropy_chunked",
    "triton": "statetrack.ops.linear_cross_entropy.triton.backend:linear_cross_entropy_triton",
}


def _triton_refuses(x: Tensor) -> str | None:
    """Why the Triton kernel cannot take these inputs, or None."""
    return no_triton(x) or load("statetrack.ops.linear_cross_entropy.triton.backend:refuses")(x)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, *, backend: str = "auto"
) -> Tensor:
    """Sum of log(sum_c exp(z_c)) - z_target, z = W x, over positions whose target is not `ignore_index`.

    Shapes: x (..., D); weight W (classes, D); targets (...), integers. Returns a scalar, in float32 for
    half-precision inputs too; 0 if no position counts. Under autocast the product is computed in its dtype.

    All backends but the reference take the rows of x in chunks and hold the logits of one chunk at a time:
    the gradients are computed in the forward pass, where they are needed, and multiplied in the backward.
    """
    op = "linear_cross_entropy"
    checks.require_tensors(op, x=x, weight=weight, targets=targets)
    checks.check_floating(op, x.device, x=x, weight=weight)
    checks.check_shape(op, "targets", targets, tuple(x.shape[:-1]), "the shape of x but for its last axis")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise UserError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected (classes, {x.shape[-1]}) from x "
            f"{tuple(x.shape)}."
        )
    if targets.is_floating_point() or targets.device != x.device:
        raise UserError(
            f"{op}: targets are {targets.dtype} on {targets.device}, expected whole numbers on {x.device}."
        )
    if x.dtype != weight.dtype and not autocast_is_on(x.device):
        raise UserError(
            f"{op}: x is {x.dtype} and weight {weight.dtype}, expected one dtype. Convert one of them, or "
            "call it under autocast."
        )
    run = pick_backend(op, backend, x.device, BACKENDS, {"triton": lambda: _triton_refuses(x)})
    return run(x, weight, targets, ignore_index)


__all__ = ["linear_cross_entropy"]
