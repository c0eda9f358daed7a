"""The Triton backend of the split: `torch.library` ops around the two kernels."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.derivatives import first_derivative_only
from statetrack.ops.dispatch import define
from statetrack.ops.silu_split.triton_kernels import backward_kernel, forward_kernel

BN, ROWS = 128, 16  # columns and rows of a program


def silu_split_triton(x: Tensor, widths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same arguments and results as `silu_split_reference`; the results are contiguous."""
    return torch.ops.statetrack.silu_split(x.contiguous(), widths)


def refuses(x: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if x.numel() == 0:
        return "the input is empty"
    return "float64 is not offered there" if x.dtype == torch.float64 else None


def constants(N: int, widths: list[int]) -> dict[str, Any]:
    """What the kernels are compiled for."""
    return dict(zip("QKVR", widths, strict=True)) | {"N": N, "BN": BN, "ROWS": ROWS, "num_warps": 4}


def _launch(kernel, x: Tensor, widths: list[int], *others: Tensor) -> None:
    N = x.shape[-1]
    rows = x.numel() // N
    kernel[(-(-rows // ROWS), -(-N // BN))](x, *others, rows, **constants(N, widths))


def _forward(x: Tensor, widths: list[int]):
    parts = _parts(x, widths)
    _launch(forward_kernel, x, widths, *parts)
    return parts


def _parts(x: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(*x.shape[:-1], width) for width in widths)


def _backward(x: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dr: Tensor, widths: list[int]) -> Tensor:
    dx = torch.empty_like(x)
    _launch(backward_kernel, x, widths, *(g.contiguous() for g in (dq, dk, dv, dr)), dx)
    return dx


def _backward_fake(x, dq, dk, dv, dr, widths):
    return torch.empty_like(x)


define("silu_split(Tensor x, int[] widths) -> (Tensor, Tensor, Tensor, Tensor)", _forward, _parts)
define(
    "silu_split_backward(Tensor x, Tensor dq, Tensor dk, Tensor dv, Tensor dr, int[] widths) -> Tensor",
    _backward,
    _backward_fake,
)


def _setup_context(ctx, inputs, output):
    x, ctx.widths = inputs
    ctx.save_for_backward(x)


@first_derivative_only
def _gradients(ctx, *gradients):
    return torch.ops.statetrack.silu_split_backward(*ctx.saved_tensors, *gradients, ctx.widths), None


torch.library.register_autograd("statetrack::silu_split", _gradients, setup_context=_setup_context)
