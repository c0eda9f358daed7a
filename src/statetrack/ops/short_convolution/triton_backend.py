"""The Triton backend of the short convolution: `torch.library` ops around the two kernels."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.derivatives import first_derivative_only
from statetrack.ops.dispatch import define
from statetrack.ops.partial_sums import add_up
from statetrack.ops.short_convolution.triton_kernels import backward_kernel, forward_kernel

WIDEST = 8  # taps: each is unrolled
L, CHANNELS = 16, 64  # times and channels of a program


def short_convolution_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: None, *, silu: bool
) -> Tensor:
    """Same arguments and results as `short_convolution_reference`, from an empty past."""
    if x.stride(2) != 1:
        x = x.contiguous()
    return torch.ops.statetrack.short_convolution(x, weight.contiguous(), bias, silu)


def refuses(x: Tensor, weight: Tensor, state: Tensor | None) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if state is not None:
        return "it begins from a state"
    if weight.shape[1] > WIDEST:
        return f"it is {weight.shape[1]} wide, more than {WIDEST}"
    if x.numel() == 0:
        return "the input is empty"
    return "float64 is not offered there" if x.dtype == torch.float64 else None


def _grid(x: Tensor) -> tuple[int, int, int]:
    B, T, C = x.shape
    return B, -(-T // L), -(-C // CHANNELS)


def _constants(weight: Tensor, bias: Tensor | None, silu: bool) -> dict[str, Any]:
    constants = {"W": weight.shape[1], "L": L, "BC": CHANNELS, "HAS_BIAS": bias is not None, "SILU": silu}
    return constants | {"num_warps": 4}


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    forward_kernel[_grid(x)](
        x, weight, weight if bias is None else bias, y, x.shape[1], x.shape[2], x.stride(0), x.stride(1),
        **_constants(weight, bias, silu),
    )  # fmt: skip
    return y


def _backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the weight and of the bias (empty without one)."""
    if dy.stride(2) != 1:
        dy = dy.contiguous()
    (B, tiles, _), (C, width) = _grid(x), weight.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweights = torch.empty(B * tiles, C, width, dtype=torch.float32, device=x.device)
    dbias = torch.empty(B * tiles if bias is not None else 0, C, dtype=torch.float32, device=x.device)
    backward_kernel[_grid(x)](
        x, weight, weight if bias is None else bias, dy, dx, dweights, dbias, x.shape[1], C,
        x.stride(0), x.stride(1), dy.stride(0), dy.stride(1), **_constants(weight, bias, silu),
    )  # fmt: skip
    dbias = dbias.new_empty(0) if bias is None else add_up(dbias, bias.dtype)
    return dx, add_up(dweights, weight.dtype), dbias


def _fake(x, weight, bias, silu):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _backward_fake(x, weight, bias, dy, silu):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return (
        dx,
        torch.empty_like(weight),
        x.new_empty(0, dtype=torch.float32) if bias is None else torch.empty_like(bias),
    )


define("short_convolution(Tensor x, Tensor weight, Tensor? bias, bool silu) -> Tensor", _forward, _fake)
define(
    "short_convolution_backward(Tensor x, Tensor weight, Tensor? bias, Tensor dy, bool silu)"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _setup_context(ctx, inputs, output):
    x, weight, bias, silu = inputs
    ctx.save_for_backward(x, weight, bias)
    ctx.silu = silu


@first_derivative_only
def _gradients(ctx, dy):
    x, weight, bias = ctx.saved_tensors
    dx, dweight, dbias = torch.ops.statetrack.short_convolution_backward(x, weight, bias, dy, ctx.silu)
    return dx, dweight, None if bias is None else dbias, None


torch.library.register_autograd("statetrack::short_convolution", _gradients, setup_context=_setup_context)
