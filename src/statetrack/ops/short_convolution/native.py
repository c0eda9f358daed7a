"""The native CPU backend of the short convolution: `torch.library` ops around the kernels of ops/native."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from statetrack.ops.autograd import autocast_is_on, first_derivative_only, needs_gradient, run_backend
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.native import library

MAX_WIDTH = 8
ROWS = 256  # steps of a work item: with 64 channels, its inputs and their gradients fit in the cache


def short_convolution_native(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: None,
    *,
    silu: bool,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Same arguments and results as `short_convolution_reference`, in float32 whatever the inputs."""
    return run_backend("short_convolution", _run, x.device, x, weight, bias, silu, cu_seqlens)


def convolved_split_native(
    x: Tensor,
    widths: list[int],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    silu: list[bool],
) -> tuple[Tensor, ...]:
    """Same arguments and results as `convolved_split_reference`; each part is read where it lies in x."""
    *parts, rest = x[..., : sum(widths)].split(widths, dim=-1)
    if not weights:
        return *(F.silu(p) if s else p for p, s in zip(parts, silu, strict=True)), rest
    each = zip(parts, weights, biases or [None] * len(parts), silu, strict=True)
    return *(
        run_backend("convolved_split", _run, x.device, p, w, b, s, cu_seqlens) for p, w, b, s in each
    ), rest


def refuses(
    x: Tensor, others: Sequence[Tensor | None], width: int, initial_state: Tensor | None
) -> str | None:
    """Why the kernels cannot take these inputs, or None; `others` are the weights and biases."""
    if initial_state is not None:
        return "there is an initial state"
    if width > MAX_WIDTH:
        return f"it is {width} wide, more than {MAX_WIDTH}"
    if x.device.type != "cpu":
        return f"the inputs are on {x.device}, not on a CPU"
    if x.numel() == 0:
        return "the input is empty"
    if any(y is not None and y.dtype == torch.float64 for y in (x, *others)):
        return "float64 is not offered there"
    if autocast_is_on(x.device):
        return "autocast is on, which has a dtype of its own for convolutions"
    reason = library.ABSENT
    if reason is None and "convolution_forward" not in library.CALL:
        return "the library is from before it had the short convolution: reinstall the package"
    return reason


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cu_seqlens: Tensor | None) -> Tensor:
    single = [y if y is None or y.dtype == torch.float32 else y.float() for y in (x, weight, bias)]
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.long().contiguous()
    if needs_gradient(single):
        y = _Native.apply(*single, cu_seqlens, bool(silu))
    else:
        y = without_dispatcher(x, _forward, convolution_forward)(*single, cu_seqlens, bool(silu))
    return y if y.dtype == x.dtype else y.to(x.dtype)


def _contiguous_rows(x: Tensor) -> Tensor:
    """x with its channels contiguous, as the kernels read it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _call(name: str, x: Tensor, dout: Tensor | None, cu_seqlens, weight, bias, silu: bool, *results) -> None:
    (B, T, C), width = x.shape, weight.shape[1]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    threads = library.threads(8 * B * T * C * (width + 2))
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    library.CALL[name](
        library.CONVOLUTION.pack(
            B, T, C, width, silu, ROWS, sequences, threads,
            *library.strided(x), *library.strided(dout),
            *map(library.address, (cu_seqlens, weight, bias, *results)),
        )
    )  # fmt: skip


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, silu: bool) -> Tensor:
    out = x.new_empty(x.shape)
    library.expect_writes(out)
    results = out, None, None, None, None
    _call("convolution_forward", _contiguous_rows(x), None, cu_seqlens, weight, bias, silu, *results)
    return out


def _new_gradients(x: Tensor, weight: Tensor, needed: Sequence[bool]) -> list[Tensor]:
    """Contiguous buffers for the gradients of x, weight and bias; empty ones where not needed."""
    shapes = x.shape, weight.shape, weight.shape[:1]
    return [x.new_empty(shape if need else 0) for shape, need in zip(shapes, needed, strict=True)]


def _backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    dout: Tensor,
    silu: bool,
    needed: Sequence[bool],
) -> list[Tensor]:
    """Gradients of x, weight and bias; empty ones where not `needed`."""
    for_x, for_parameters = needed[0], needed[1] or needed[2]
    gradients = _new_gradients(x, weight, needed)
    dx, dweight, dbias = gradients
    partial = None
    if for_parameters:  # the kernel gives both
        blocks = -(-x.shape[0] * x.shape[1] // ROWS)
        partial = x.new_empty(blocks, weight.shape[1] + 1, x.shape[2])
        dweight = dweight if needed[1] else torch.empty_like(weight)
        dbias = dbias if needed[2] else x.new_empty(x.shape[2])
    library.expect_writes(dx)
    x, dout = _contiguous_rows(x), _contiguous_rows(dout)
    results = None, dx if for_x else None, dweight, dbias, partial
    _call("convolution_backward", x, dout, cu_seqlens, weight, bias, silu, *results)
    return gradients


class _Native(torch.autograd.Function):
    """Autograd around the two ops. `torch.library.register_autograd` takes three times as long per call."""

    @staticmethod
    def forward(ctx, x, weight, bias, cu_seqlens, silu):
        ctx.save_for_backward(x, weight, bias, cu_seqlens)
        ctx.silu = silu
        return without_dispatcher(x, _forward, convolution_forward)(x, weight, bias, cu_seqlens, silu)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout):
        saved = ctx.saved_tensors
        backward = without_dispatcher(saved[0], _backward, convolution_backward)
        needed = ctx.needs_input_grad[:3]
        gradients = backward(*saved, dout, ctx.silu, needed)
        return *(g if need else None for g, need in zip(gradients, needed, strict=True)), None, None


def _forward_fake(x, weight, bias, cu_seqlens, silu):
    return x.new_empty(x.shape)


def _backward_fake(x, weight, bias, cu_seqlens, dout, silu, needed) -> list[Tensor]:
    return _new_gradients(x, weight, needed)


INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens"
register_op(
    f"native_convolution_forward({INPUTS}, bool silu) -> Tensor", _forward, _forward_fake, devices=("CPU",)
)
register_op(
    f"native_convolution_backward({INPUTS}, Tensor dout, bool silu, bool[] needed) -> Tensor[]",
    _backward,
    _backward_fake,
    devices=("CPU",),
)
convolution_forward = torch.ops.statetrack.native_convolution_forward.default
convolution_backward = torch.ops.statetrack.native_convolution_backward.default
