"""The short causal convolution in front of a recurrence, with its SiLU: each channel over its last values."""

from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import no_triton, pick_backend


def _reference():
    from statetrack.ops.short_convolution.reference import short_convolution_reference

    return short_convolution_reference


def _triton():
    from statetrack.ops.short_convolution.triton_backend import short_convolution_triton

    return short_convolution_triton


BACKENDS = {"reference": _reference, "triton": _triton}


def _triton_refuses(x: Tensor, weight: Tensor, state: Tensor | None) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    from statetrack.ops.short_convolution.triton_backend import refuses

    return no_triton(x) or refuses(x, weight, state)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
    initial_state: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Filter each channel over its last `width` values. Equation and shapes: `short_convolution_reference`.

    Time comes before channels, (B, T, C); the output has the dtype of x.
    """
    op = "short_convolution"
    if x.ndim != 3 or weight.ndim != 2:
        raise UserError(
            f"{op}: x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}, expected (batch, time, "
            "channels) and (channels, width). Time comes before channels in this library."
        )
    (B, _, C), width = x.shape, weight.shape[1]
    checks.check_floating(op, x.device, x=x, weight=weight, bias=bias, initial_state=initial_state)
    checks.check_shape(op, "weight", weight, (C, width), "(channels, width)")
    if bias is not None:
        checks.check_shape(op, "bias", bias, (C,), "(channels,)")
    if initial_state is not None:
        checks.check_shape(
            op, "initial_state", initial_state, (B, C, width - 1), "(batch, channels, width - 1)"
        )
    refusals = {"triton": lambda: _triton_refuses(x, weight, initial_state)}
    run = pick_backend(op, backend, x.device, BACKENDS, refusals)
    return run(x, weight, bias, initial_state, silu=silu)


__all__ = ["short_convolution"]
