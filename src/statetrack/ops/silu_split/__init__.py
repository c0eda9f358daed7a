"""One product split into queries, keys and values after their SiLU, and what needs none."""

from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import no_triton, pick_backend


def _reference():
    from statetrack.ops.silu_split.reference import silu_split_reference

    return silu_split_reference


def _triton():
    from statetrack.ops.silu_split.triton_backend import silu_split_triton

    return silu_split_triton


BACKENDS = {"reference": _reference, "triton": _triton}


def _triton_refuses(x: Tensor) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    if reason := no_triton(x):
        return reason
    from statetrack.ops.silu_split.triton_backend import refuses

    return refuses(x)


def silu_split(
    x: Tensor, widths: tuple[int, int, int, int], *, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four contiguous parts of the last axis, the first three after a SiLU: `silu_split_reference`."""
    op = "silu_split"
    checks.check_floating(op, x.device, x=x)
    if len(widths) != 4 or min(widths) < 1 or sum(widths) > x.shape[-1]:
        raise UserError(
            f"{op}: widths are {tuple(widths)}, expected four of at least 1 and of at most {x.shape[-1]} "
            f"together, from x {tuple(x.shape)}."
        )
    run = pick_backend(op, backend, x.device, BACKENDS, {"triton": lambda: _triton_refuses(x)})
    return run(x, list(widths))


__all__ = ["silu_split"]
