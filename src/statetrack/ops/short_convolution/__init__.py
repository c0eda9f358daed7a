"""The short causal convolution in front of a recurrence, with its SiLU, of one tensor or of several parts."""

from collections.abc import Callable, Sequence

from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import load, no_triton, pick_backend

BACKENDS = {
    "reference": "statetrack.ops.short_convolution.reference:short_convolution_reference",
    "native": "statetrack.ops.short_convolution.native:short_convolution_native",
    "triton": "statetrack.ops.short_convolution.triton.backend:short_convolution_triton",
}
SPLIT_BACKENDS = {
    "reference": "statetrack.ops.short_convolution.reference:convolved_split_reference",
    "native": "statetrack.ops.short_convolution.native:convolved_split_native",
    "triton": "statetrack.ops.short_convolution.triton.backend:convolved_split_triton",
}


def _refusals(
    x: Tensor, others: Sequence[Tensor | None], width: int, parts: int, initial_state: Tensor | None
) -> dict[str, Callable[[], str | None]]:
    """For each backend, a function that says why it cannot take these inputs; `others` are the parameters."""
    triton = "statetrack.ops.short_convolution.triton.backend:refuses"
    native = "statetrack.ops.short_convolution.native:refuses"
    return {
        "triton": lambda: no_triton(x) or load(triton)(x, width, parts, initial_state),
        "native": lambda: load(native)(x, others, width, initial_state),
    }


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
    """Causal depthwise convolution along time: each channel is filtered over its last `width` values.

        y_t = bias + sum_i weight_i x_{t - width + 1 + i},  i = 0, ..., width - 1    then silu(y_t) if `silu`

    Shapes, with batch b, time t and channels c; time comes before channels:

        x, y             (b, t, c)
        weight           (c, width)       weight[:, -1] multiplies x_t
        bias             (c,)             none when None
        initial_state    (b, c, width - 1), the inputs before the first one; zeros when None

    - `cu_seqlens`: s + 1 offsets in steps, with b = 1: s sequences packed one after the other into one row,
      each starting from zeros; not together with `initial_state`.
    - `max_seqlen`: the length of the longest packed sequence or more; only used to divide the work better.
    - `backend`: "auto", or "reference", "native" (CPU), "triton" (GPU). The kernels of the last two take
      widths up to 8, no `initial_state` and no float64; the native ones do not run under autocast.

    Returns y in the dtype of x.

        >>> import torch
        >>> from statetrack import short_convolution
        >>> x = torch.tensor([[[1.0], [2.0], [3.0]]])
        >>> short_convolution(x, torch.tensor([[10.0, 1.0]]))[0, :, 0]
        tensor([ 1., 12., 23.])
    """
    op = "short_convolution"
    checks.require_tensors(op, x=x, weight=weight)
    checks.check_tensors(op, bias=bias, initial_state=initial_state)
    checks.check_flags(op, silu=silu)
    if x.ndim != 3 or weight.ndim != 2 or 0 in weight.shape:
        raise UserError(
            f"{op}: x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}, expected (batch, time, "
            "channels) and (channels, width), with at least one channel and a width of at least 1. Time "
            "comes before channels in this library."
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
                f"{op}: packed sequences (cu_seqlens) start from zeros and take no initial_state."
            )
    checks.check_offsets(op, cu_seqlens, max_seqlen, x.shape[1])
    refusals = _refusals(x, (weight, bias), width, 1, initial_state)
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
    """Split the last axis of x and convolve every part but the last one, as `short_convolution` does.

        x = [p_1, ..., p_n, r, ...]        results: silu(convolution_i(p_i)) for i = 1, ..., n, and r as it is

    Shapes: x (b, t, columns); `widths` of p_1, ..., p_n and r; `weights[i]` (widths[i], taps); `biases[i]`
    (widths[i],). Results (b, t, widths[i]). Columns beyond the sum of the widths are left out. Without
    `weights` the results are silu(p_i) and r. `silu[i]` says whether part i has a SiLU, all when None.
    Packed sequences (`cu_seqlens`, `max_seqlen`) as in `short_convolution`. The Triton kernels make one pass
    over x and one over its gradient for all parts together.
    """
    op, n = "convolved_split", len(widths) - 1
    checks.require_tensors(op, x=x)
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
    refusals = _refusals(x, (*weights, *biases), taps, n, None)
    run = pick_backend(op, backend, x.device, SPLIT_BACKENDS, refusals)
    return run(x, list(widths), weights, biases, cu_seqlens, max_seqlen, activated)


__all__ = ["convolved_split", "short_convolution"]
