"""The short causal convolution in front of a recurrence, with its SiLU: each channel over its last values.

Alone, and of several parts of one product at once.
"""

from collections.abc import Sequence

from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import no_triton, pick_backend


def _reference():
    from statetrack.ops.short_convolution.reference import short_convolution_reference

    return short_convolution_reference


def _triton():
    from statetrack.ops.short_convolution.triton.backend import short_convolution_triton

    return short_convolution_triton


def _split_reference():
    from statetrack.ops.short_convolution.reference import convolved_split_reference

    return convolved_split_reference


def _split_triton():
    from statetrack.ops.short_convolution.triton.backend import convolved_split_triton

    return convolved_split_triton


BACKENDS = {"reference": _reference, "triton": _triton}
SPLIT_BACKENDS = {"reference": _split_reference, "triton": _split_triton}


def _triton_refuses(x: Tensor, width: int, parts: int, state: Tensor | None) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    if reason := no_triton(x):
        return reason
    from statetrack.ops.short_convolution.triton.backend import refuses

    return refuses(x, width, parts, state)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Filter each channel over its last `width` values. Equation and shapes: `short_convolution_reference`.

    Time comes before channels, (B, T, C); the output has the dtype of x. `cu_seqlens` (S + 1 offsets, B = 1)
    packs S sequences into one row, none longer than `max_seqlen`, which shares the work out better if given.
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
    if cu_seqlens is not None:
        checks.check_packing(op, cu_seqlens, B, x.device)
        if initial_state is not None:
            raise UserError(
                f"{op}: packed sequences (cu_seqlens) begin from an empty past, not from a state."
            )
    checks.check_offsets(op, cu_seqlens, max_seqlen, x.shape[1])
    refusals = {"triton": lambda: _triton_refuses(x, width, 1, initial_state)}
    run = pick_backend(op, backend, x.device, BACKENDS, refusals)
    return run(x, weight, bias, initial_state, silu=silu, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)


def convolved_split(
    x: Tensor,
    widths: Sequence[int],
    weights: Sequence[Tensor] = (),
    biases: Sequence[Tensor] = (),
    *,
    silu: Sequence[bool] | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Parts of the last axis of x, all but the last after their short convolution, if any, and a SiLU.

    `silu` says which of them have one, if not all. Equation and shapes: `convolved_split_reference`; packed
    sequences as in `short_convolution`. One pass over x, and one over its gradient, where `short_convolution`
    of every part takes a pass each and one more to put their gradients together.
    """
    op, n = "convolved_split", len(widths) - 1
    checks.check_floating(op, x.device, x=x, **{f"weights[{i}]": w for i, w in enumerate(weights)})
    checks.check_floating(op, x.device, **{f"biases[{i}]": b for i, b in enumerate(biases)})
    if x.ndim != 3 or n < 1 or min(widths) < 1 or sum(widths) > x.shape[-1]:
        raise UserError(
            f"{op}: x has shape {tuple(x.shape)} and widths are {tuple(widths)}, expected (batch, time, "
            "columns) and two widths or more, of at least 1 and of at most all columns together."
        )
    if len(weights) not in (0, n) or len(biases) not in (0, len(weights)):
        raise UserError(
            f"{op}: {len(weights)} weights and {len(biases)} biases, expected none or one for each of the "
            f"{n} parts but the last, and biases only with weights."
        )
    activated = [True] * n if silu is None else list(silu)
    if len(activated) != n:
        raise UserError(f"{op}: silu has {len(activated)} entries, expected one for each of the {n} parts.")
    taps = weights[0].shape[-1] if weights else 1
    for i, weight in enumerate(weights):
        checks.check_shape(op, f"weights[{i}]", weight, (widths[i], taps), "(channels, width)")
    for i, bias in enumerate(biases):
        checks.check_shape(op, f"biases[{i}]", bias, (widths[i],), "(channels,)")
    if cu_seqlens is not None:
        checks.check_packing(op, cu_seqlens, x.shape[0], x.device)
    checks.check_offsets(op, cu_seqlens, max_seqlen, x.shape[1])
    refusals = {"triton": lambda: _triton_refuses(x, taps, n, None)}
    run = pick_backend(op, backend, x.device, SPLIT_BACKENDS, refusals)
    return run(x, list(widths), weights, biases, cu_seqlens, max_seqlen, activated)


__all__ = ["convolved_split", "short_convolution"]
