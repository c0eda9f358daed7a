"""The training loss: mean cross-entropy over the positions that count."""

import math

from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import load, no_triton, pick_backend

BACKENDS = {
    "reference": "statetrack.ops.cross_entropy.reference:cross_entropy_reference",
    "triton": "statetrack.ops.cross_entropy.triton.backend:cross_entropy_triton",
}


def _triton_refuses(logits: Tensor) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    return no_triton(logits) or load("statetrack.ops.cross_entropy.triton.backend:refuses")(logits)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    *,
    centred: bool = False,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Mean of L - (1 - e) logits_target - e mean_c logits_c + z L^2 where the target is not `ignore_index`.

        L = log(sum_c exp(logits_c))        z = `z_loss`        e = `smoothing`

    Shapes: logits (..., classes), targets (...), integers. Returns a scalar, in float32 for half-precision
    logits too; nan if no position counts.

    - `centred` changes the rounding of the gradient only: that of the target's logit is minus the sum of the
      others, so that they sum to zero. As softmax - 1 it would be 0 once the softmax rounds to 1, while the
      others are not.
    - `z_loss` keeps L near 0, and so the logits from growing together.
    - `smoothing` e is label smoothing: the probabilities asked for are 1 - e + e / classes of the target and
      e / classes of the others, so that the loss has its least value at finite logits.
    """
    op = "cross_entropy"
    checks.require_tensors(op, logits=logits, targets=targets)
    checks.check_floating(op, logits.device, logits=logits)
    checks.check_shape(
        op, "targets", targets, tuple(logits.shape[:-1]), "the shape of logits but for classes"
    )
    if targets.is_floating_point() or targets.device != logits.device:
        raise UserError(
            f"{op}: targets are {targets.dtype} on {targets.device}, "
            f"expected whole numbers on {logits.device}."
        )
    if not (z_loss >= 0 and math.isfinite(z_loss)):
        raise UserError(f"{op}: z_loss is {z_loss}, expected 0 (none) or more.")
    if not 0 <= smoothing < 1:
        raise UserError(f"{op}: smoothing is {smoothing}, expected at least 0 (none) and below 1.")
    run = pick_backend(op, backend, logits.device, BACKENDS, {"triton": lambda: _triton_refuses(logits)})
    return run(logits, targets, ignore_index, centred, float(z_loss), float(smoothing))


__all__ = ["cross_entropy"]
