"""Padded sequences of mixed lengths packed one after the other into one row."""

from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import no_triton, pick_backend

BACKENDS = {
    "reference": "statetrack.ops.pack.reference:pack_reference",
    "triton": "statetrack.ops.pack.triton.backend:pack_triton",
}


def pack(
    inputs: Tensor, targets: Tensor, ignore: int, rows: int, *, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pack sequences, each up to its answer (the first target that is not `ignore`), into one row.

        tokens = [inputs[0, :length_0], inputs[1, :length_1], ..., 0, ..., 0]        `rows` tokens in total

    Shapes: inputs, targets (b, w), integers. Returns tokens (rows,); the bounds of the sequences, int32, as
    `cu_seqlens` of the recurrences takes them; the position of each answer (b,); and the answers (b,).
    Padding at the end forms further sequences of at most w steps. A sequence that does not fit is cut, and
    its answer is `ignore`. Nothing is read on the host.
    """
    checks.require_tensors("pack", inputs=inputs, targets=targets)
    if inputs.ndim != 2 or inputs.shape != targets.shape or inputs.numel() == 0:
        raise UserError(
            f"pack: inputs have shape {tuple(inputs.shape)} and targets {tuple(targets.shape)}, expected the "
            "same (batch, time), with at least one sequence and one step."
        )
    run = pick_backend("pack", backend, inputs.device, BACKENDS, {"triton": lambda: no_triton(inputs)})
    return run(inputs, targets, ignore, rows)


__all__ = ["pack"]
