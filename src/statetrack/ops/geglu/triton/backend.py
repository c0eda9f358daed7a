"""The Triton backend of the gated activation with GELU: `torch.library` ops around the two kernels."""

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only
from statetrack.ops.custom_ops import register_op
from statetrack.ops.geglu.triton.kernels import geglu_backward_kernel, geglu_kernel
from statetrack.ops.swiglu.triton.backend import constants
from statetrack.ops.triton_runtime.compile_ahead import launch


def geglu_triton(x: Tensor) -> Tensor:
    """Same argument and result as `geglu_reference`."""
    return torch.ops.statetrack.geglu(x.contiguous())


def _launch(kernel, x: Tensor, *others: Tensor) -> None:
    rows, constant = x.numel() // x.shape[-1], constants(x.shape[-1] // 2)
    grid = -(-rows // constant["ROWS"]), -(-constant["W"] // constant["BW"])
    launch(kernel, grid)(x, *others, rows, **constant)


def _forward(x: Tensor) -> Tensor:
    out = _fake(x)
    _launch(geglu_kernel, x, out)
    return out


def _backward(x: Tensor, dout: Tensor) -> Tensor:
    dx = torch.empty_like(x)
    _launch(geglu_backward_kernel, x, dout.contiguous(), dx)
    return dx


def _fake(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _backward_fake(x: Tensor, dout: Tensor) -> Tensor:
    return torch.empty_like(x)


register_op("geglu(Tensor x) -> Tensor", _forward, _fake)
register_op("geglu_backward(Tensor x, Tensor dout) -> Tensor", _backward, _backward_fake)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@first_derivative_only
def _gradients(ctx, dout):
    return torch.ops.statetrack.geglu_backward(*ctx.saved_tensors, dout)


torch.library.register_autograd("statetrack::geglu", _gradients, setup_context=_setup_context)
