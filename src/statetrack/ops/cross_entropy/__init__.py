"""The training loss: mean cross-entropy over the positions that count."""

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
    logits: Tensor, targets: Tensor, ignore_index: int = -100, *, backend: str = "auto"
) -> Tensor:
    """Mean of log(sum_c exp(logits_c)) - logits_target over positions whose target is not `ignore_index`.

    Shapes: logits (..., classes), targets (...), integers. Returns a scalar, in float32 for half-precision
    logits too; nan if no position counts.
    """
    op = "cross_entropy"
    checks.check_floating(op, logits.device, logits=logits)
    checks.check_shape(
        op, "targets", targets, tuple(logits.shape[:-1]), "the shape of logits but for classes"
    )
    if targets.is_floating_point() or targets.device != logits.device:
        raise UserError(
            f"{op}: targets are {targets.dtype} on {targets.device}, "
            f"expected whole numbers on {logits.device}."
        )
    run = pick_backend(op, backend, logits.device, BACKENDS, {"triton": lambda: _triton_refuses(logits)})
    return run(logits, targets, ignore_index)


__all__ = ["cross_entropy"]
