"""The Triton backend of the gated activation: `torch.library` ops around the two kernels.

With the linear map that follows, the backward computes the activation again, in the kernel that computes the
gradient of its input, instead of keeping it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.custom_ops import register_op
from statetrack.ops.swiglu.triton.kernels import swiglu_backward_kernel, swiglu_kernel
from statetrack.ops.triton_runtime.compile_ahead import launch
from statetrack.ops.triton_runtime.sizes import block

TILE = 2048  # values of each half in a program


def swiglu_triton(x: Tensor) -> Tensor:
    """Same argument and result as `swiglu_reference`."""
    return torch.ops.statetrack.swiglu(x.contiguous())


def swiglu_product_triton(x: Tensor, weight: Tensor) -> Tensor:
    """Same arguments and result as `swiglu_product_reference`."""
    x = x.contiguous()
    if needs_gradient((x, weight)):
        return _Product.apply(x, weight)
    return F.linear(torch.ops.statetrack.swiglu(x), weight)


def refuses(x: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if x.numel() == 0:
        return "the input is empty"
    return "float64 is not offered there" if x.dtype == torch.float64 else None


def constants(W: int) -> dict[str, Any]:
    """What the kernels are compiled for, given the width of a half."""
    BW = min(512, block(W))
    return {"W": W, "BW": BW, "ROWS": TILE // BW, "num_warps": 4}


def _launch(kernel, x: Tensor, *others: Tensor, **flags: bool) -> None:
    rows, constant = x.numel() // x.shape[-1], constants(x.shape[-1] // 2)
    grid = -(-rows // constant["ROWS"]), -(-constant["W"] // constant["BW"])
    launch(kernel, grid)(x, *others, rows, **constant, **flags)


def _forward(x: Tensor) -> Tensor:
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    _launch(swiglu_kernel, x, out)
    return out


def _backward(x: Tensor, dout: Tensor) -> Tensor:
    dx = torch.empty_like(x)
    _launch(swiglu_backward_kernel, x, dout.contiguous(), dx, OUT_AGAIN=False)
    return dx


def _backward_with_out(x: Tensor, dout: Tensor) -> Tensor:
    """dx, and swiglu(x) written over `dout`."""
    dx = torch.empty_like(x)
    _launch(swiglu_backward_kernel, x, dout, dx, OUT_AGAIN=True)
    return dx


def _fake(x):
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _backward_fake(x, dout):
    return torch.empty_like(x)


register_op("swiglu(Tensor x) -> Tensor", _forward, _fake)
register_op("swiglu_backward(Tensor x, Tensor dout) -> Tensor", _backward, _backward_fake)

register_op(
    "swiglu_backward_with_out(Tensor x, Tensor(a!) dout) -> Tensor", _backward_with_out, _backward_fake
)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@first_derivative_only
def _gradients(ctx, dout):
    return torch.ops.statetrack.swiglu_backward(*ctx.saved_tensors, dout)


torch.library.register_autograd("statetrack::swiglu", _gradients, setup_context=_setup_context)


class _Product(torch.autograd.Function):
    """swiglu(x) W^T. Under autocast the weight may be float32: it is rounded to the dtype of x."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(torch.ops.statetrack.swiglu(x), weight.to(x.dtype))

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = dy.flatten(0, -2)
        activation = (dy @ weight.to(x.dtype)).view(*x.shape[:-1], -1)  # its gradient, up to the next line
        dx = torch.ops.statetrack.swiglu_backward_with_out(x, activation)
        return dx, (dy.T @ activation.flatten(0, -2)).to(weight.dtype)
