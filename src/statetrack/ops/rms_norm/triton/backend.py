"""The Triton backend of RMS normalisation: `torch.library` ops around the two kernels."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only
from statetrack.ops.custom_ops import register_op
from statetrack.ops.partial_gradients import sum_over_programs
from statetrack.ops.rms_norm.triton.kernels import rms_norm_backward_kernel, rms_norm_kernel
from statetrack.ops.triton_runtime.compile_ahead import launch
from statetrack.ops.triton_runtime.sizes import block, processors

MAX_WIDTH = 4096  # values of a row: a program holds whole rows
TILE = 2048  # values of a tile
PROGRAMS_PER_PROCESSOR = 4  # of the backward; each leaves one row of partial gradients of the weight
# Where the result is in bfloat16 and the tensors are this large, the backward reads it instead of what was
# normalised: the linear map that follows keeps it anyway, and a float32 stream is not kept at all. The
# gradient of the weight is then as precise as bfloat16, so small models keep what was normalised.
FROM_OUT = torch.bfloat16
FROM_OUT_VALUES = 2**24


def rms_norm_triton(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `rms_norm_reference`."""
    if y is None:
        return _Norm.apply(x, weight, eps, out_dtype)
    given = x.contiguous(), y.contiguous(), weight.contiguous()
    return torch.ops.statetrack.add_rms_norm(*given, eps, out_dtype)[:2]


def reads_result(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the backward of a norm of x with results of `dtype` reads these instead of x."""
    return dtype == FROM_OUT and x.numel() >= FROM_OUT_VALUES


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


def backward_grid(rows: int, ROWS: int, processors: int) -> tuple[int, int]:
    """Programs of the backward, and tiles of ROWS rows per program."""
    tiles = -(-rows // ROWS)
    tiles_per_program = -(-tiles // (PROGRAMS_PER_PROCESSOR * processors))
    return -(-tiles // tiles_per_program), tiles_per_program


def _add_forward(x: Tensor, y: Tensor, weight: Tensor, eps: float, dtype: torch.dtype):
    return _forward(x, y, weight, eps, dtype)


def _plain_forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _forward(x, None, weight, eps, dtype)[1:]


def _forward(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype):
    """s, its norm, and 1 / rms(s) for the backward, empty where that reads s."""
    rows = x.numel() // x.shape[-1]
    constant = constants(x.shape[-1]) | {"HAS_Y": y is not None, "FROM_OUT": reads_result(x, dtype)}
    total, out, inverses = _empty_results(x, y, dtype)
    launch(rms_norm_kernel, (-(-rows // constant["ROWS"]),))(
        x, x if y is None else y, weight, total, out, inverses, rows, eps, **constant
    )
    return total, out, inverses


def _empty_results(x: Tensor, y: Tensor | None, dtype: torch.dtype):
    total = x if y is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, y.dtype))
    inverses = x.new_empty(x.shape[:-1] if reads_result(x, dtype) else (0,), dtype=torch.float32)
    return total, torch.empty_like(x, dtype=dtype), inverses


def _backward(
    s: Tensor,
    inverses: Tensor,
    weight: Tensor,
    dtotal: Tensor | None,
    dout: Tensor,
    eps: float,
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of y (empty where its dtype is that of x: it is the same) and of the weight.

    `s` is the norm's output if there are `inverses`, else the sum that was normalised.
    """
    rows = s.numel() // s.shape[-1]
    constant = constants(s.shape[-1]) | {"FROM_OUT": inverses.numel() > 0}
    programs, tiles = backward_grid(rows, constant["ROWS"], processors(s.device))
    dx, dy, _ = _empty_gradients(s, inverses, weight, dtotal, dout, eps, x_dtype, y_dtype)
    dweights = torch.empty(programs, s.shape[-1], dtype=torch.float32, device=s.device)
    constant |= {"HAS_DTOTAL": dtotal is not None, "HAS_DY": dy.numel() > 0}
    launch(rms_norm_backward_kernel, (programs,))(
        s, inverses, weight, s if dtotal is None else dtotal.contiguous(), dout.contiguous(), dx, dy,
        dweights, rows, eps, tiles, **constant,
    )  # fmt: skip
    return dx, dy, sum_over_programs(dweights, weight.dtype)


def _empty_gradients(s, inverses, weight, dtotal, dout, eps, x_dtype, y_dtype):
    dx = torch.empty(s.shape, dtype=x_dtype, device=s.device)
    dy = torch.empty(s.shape if y_dtype != x_dtype else (0,), dtype=y_dtype, device=s.device)
    return dx, dy, torch.empty_like(weight)


def _fake(x, weight, eps, dtype):
    return _empty_results(x, None, dtype)[1:]


def _add_fake(x, y, weight, eps, dtype):
    return _empty_results(x, y, dtype)


register_op(
    "rms_norm(Tensor x, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)",
    _plain_forward,
    _fake,
)
register_op(
    "add_rms_norm(Tensor x, Tensor y, Tensor weight, float eps, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)",
    _add_forward,
    _add_fake,
)
register_op(
    "rms_norm_backward(Tensor s, Tensor inverses, Tensor weight, Tensor? dtotal, Tensor dout, float eps,"
    " ScalarType x_dtype, ScalarType y_dtype) -> (Tensor, Tensor, Tensor)",
    _backward,
    _empty_gradients,
)


class _Norm(torch.autograd.Function):
    """x as it came, and its norm: the gradients of both are added where the norm's is computed."""

    @staticmethod
    def forward(ctx, x, weight, eps, dtype):
        out, inverses = torch.ops.statetrack.rms_norm(x.contiguous(), weight.contiguous(), eps, dtype)
        ctx.save_for_backward(out if reads_result(x, dtype) else x, inverses, weight)
        ctx.eps, ctx.dtype = eps, x.dtype
        ctx.set_materialize_grads(False)
        return x, out

    @staticmethod
    @first_derivative_only
    def backward(ctx, dx, dout):
        kept, inverses, weight = ctx.saved_tensors
        if dout is None:
            return dx, None, None, None
        dx, _, dweight = torch.ops.statetrack.rms_norm_backward(
            kept.contiguous(), inverses, weight.contiguous(), dx, dout, ctx.eps, ctx.dtype, ctx.dtype
        )
        return dx, dweight, None, None


def _add_setup_context(ctx, inputs, output):
    x, y, weight, eps, dtype = inputs
    total, out, inverses = output
    ctx.save_for_backward(out if reads_result(total, dtype) else total, inverses, weight)
    ctx.mark_non_differentiable(inverses)
    ctx.eps, ctx.dtypes = eps, (x.dtype, y.dtype)
    ctx.set_materialize_grads(False)


@first_derivative_only
def _add_gradients(ctx, dtotal, dout, _):
    kept, inverses, weight = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(kept)
    dx, dy, dweight = torch.ops.statetrack.rms_norm_backward(
        kept, inverses, weight, dtotal, dout, ctx.eps, *ctx.dtypes
    )
    return dx, dx if ctx.dtypes[0] == ctx.dtypes[1] else dy, dweight, None, None


torch.library.register_autograd("statetrack::add_rms_norm", _add_gradients, setup_context=_add_setup_context)
