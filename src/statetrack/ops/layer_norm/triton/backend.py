"""The Triton backend of layer normalisation: `torch.library` ops around the two kernels."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only
from statetrack.ops.custom_ops import register_op
from statetrack.ops.layer_norm.triton.kernels import layer_norm_backward_kernel, layer_norm_kernel
from statetrack.ops.partial_gradients import sum_over_programs
from statetrack.ops.rms_norm.triton.backend import backward_grid
from statetrack.ops.triton_runtime.compile_ahead import launch
from statetrack.ops.triton_runtime.sizes import block, processors

MAX_WIDTH = 4096  # values of a row: a program holds whole rows
TILE = 2048  # values of a tile


def layer_norm_triton(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `layer_norm_reference`."""
    return _AddNorm.apply(x, y, weight, bias, eps, out_dtype)


def refuses(x: Tensor, y: Tensor | None) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if x.shape[-1] > MAX_WIDTH:
        return f"rows are {x.shape[-1]} wide, more than {MAX_WIDTH}"
    if x.numel() == 0:
        return "the input is empty"
    dtypes = (x.dtype,) if y is None else (x.dtype, y.dtype)
    return "float64 is not offered there" if torch.float64 in dtypes else None


def constants(N: int) -> dict[str, Any]:
    """Constants of the kernels for rows of N values."""
    BN = block(N)
    return {"N": N, "BN": BN, "ROWS": max(1, TILE // BN), "num_warps": 4 if BN <= TILE else 8}


class _AddNorm(torch.autograd.Function):
    """x + y (x as it came without y) and its norm: the gradients of both meet in the norm's backward."""

    @staticmethod
    def forward(ctx, x, y, weight, bias, eps, dtype):
        given = x.contiguous(), None if y is None else y.contiguous(), weight.contiguous(), bias.contiguous()
        total, out = torch.ops.statetrack.layer_norm(*given, eps, dtype)
        total = x if y is None else total
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.dtypes = eps, (x.dtype, x.dtype if y is None else y.dtype)
        ctx.of_y, ctx.bias_dtype = y is not None, bias.dtype
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @first_derivative_only
    def backward(ctx, dtotal, dout):
        total, weight = ctx.saved_tensors
        if dout is None:
            if dtotal is None:
                return (None,) * 6
            dx, dy = (dtotal.to(dtype) for dtype in ctx.dtypes)
            return dx, dy if ctx.of_y else None, None, None, None, None
        dx, dy, dweight, dbias = torch.ops.statetrack.layer_norm_backward(
            total.contiguous(), weight.contiguous(), dtotal, dout, ctx.eps, *ctx.dtypes
        )
        dy = dy if ctx.dtypes[0] != ctx.dtypes[1] else dx
        dweight, dbias = dweight.to(weight.dtype), dbias.to(ctx.bias_dtype)
        return dx, dy if ctx.of_y else None, dweight, dbias, None, None


def _forward(x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype):
    """s, empty without y, and its norm."""
    total, out = _forward_fake(x, y, weight, bias, eps, dtype)
    rows, constant = x.numel() // x.shape[-1], constants(x.shape[-1])
    launch(layer_norm_kernel, (-(-rows // constant["ROWS"]),))(
        x, x if y is None else y, weight, bias, total, out, rows, eps, HAS_Y=y is not None, **constant
    )
    return total, out


def _forward_fake(x, y, weight, bias, eps, dtype):
    total = x.new_empty(0)
    if y is not None:
        total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, y.dtype))
    return total, torch.empty_like(x, dtype=dtype)


def _backward(
    s: Tensor,
    weight: Tensor,
    dtotal: Tensor | None,
    dout: Tensor,
    eps: float,
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of y (empty where its dtype is that of x: the same), weight and bias in float32."""
    N = s.shape[-1]
    rows, constant = s.numel() // N, constants(N)
    programs, tiles = backward_grid(rows, constant["ROWS"], processors(s.device))
    dx, dy, _, _ = _backward_fake(s, weight, dtotal, dout, eps, x_dtype, y_dtype)
    partial = torch.empty(programs, 2, N, dtype=torch.float32, device=s.device)
    constant |= {"HAS_DTOTAL": dtotal is not None, "HAS_DY": dy.numel() > 0}
    launch(layer_norm_backward_kernel, (programs,))(
        s, weight, s if dtotal is None else dtotal.contiguous(), dout.contiguous(), dx, dy, partial,
        rows, eps, tiles, **constant,
    )  # fmt: skip
    dweight, dbias = sum_over_programs(partial, torch.float32)
    return dx, dy, dweight, dbias


def _backward_fake(s, weight, dtotal, dout, eps, x_dtype, y_dtype):
    dx = torch.empty(s.shape, dtype=x_dtype, device=s.device)
    dy = torch.empty(s.shape if y_dtype != x_dtype else (0,), dtype=y_dtype, device=s.device)
    dweight, dbias = torch.empty(2, s.shape[-1], dtype=torch.float32, device=s.device)
    return dx, dy, dweight, dbias


register_op(
    "layer_norm(Tensor x, Tensor? y, Tensor weight, Tensor bias, float eps, ScalarType dtype)"
    " -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
register_op(
    "layer_norm_backward(Tensor s, Tensor weight, Tensor? dtotal, Tensor dout, float eps, ScalarType x_dtype,"
    " ScalarType y_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
