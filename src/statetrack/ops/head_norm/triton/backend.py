"""The Triton backend of the norm of heads: `torch.library` ops around the two kernels."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only
from statetrack.ops.custom_ops import register_op
from statetrack.ops.head_norm.triton.kernels import head_norm_backward_kernel, head_norm_kernel
from statetrack.ops.partial_gradients import sum_over_programs
from statetrack.ops.triton_runtime.compile_ahead import launch
from statetrack.ops.triton_runtime.sizes import block, processors

WIDEST = 1024  # of a head: a program holds whole heads
TILE = 1024  # values of a tile
PROGRAMS_PER_PROCESSOR = 8  # of the backward; each leaves one row of partial gradients
MOST_ROWS = 2**31 - 1


def refuses(h: Tensor, c: Tensor | None, z: Tensor | None) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if h.shape[-1] > WIDEST:
        return f"heads are {h.shape[-1]} wide, more than {WIDEST}"
    if h.numel() == 0:
        return "the input is empty"
    if h.numel() // (h.shape[-1] * h.shape[-2]) > MOST_ROWS:
        return f"there are more than {MOST_ROWS} rows"
    given = [x.dtype for x in (h, c, z) if x is not None]
    return "float64 is not offered there" if torch.float64 in given else None


def head_norm_triton(
    h: Tensor,
    weight: Tensor,
    eps: float,
    skip: Tensor | None,
    c: Tensor | None,
    z: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Same arguments and result as `head_norm_reference`."""
    if c is not None and z is not None and skip is not None:
        c, z, skip = _in_rows(c), _in_rows(z), skip.contiguous()
    return _HeadNorm.apply(h.contiguous(), weight.contiguous(), skip, c, z, eps, out_dtype)


def _in_rows(x: Tensor) -> Tensor:
    """x itself if all its rows are one stride apart, else a copy."""
    evenly = all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.ndim - 2))
    return x if x.stride(-1) == 1 and evenly else x.contiguous()


def _row_stride(x: Tensor | None) -> int:
    return 0 if x is None or x.ndim < 2 else x.stride(-2)


def constants(D: int) -> dict[str, Any]:
    """Constants of the kernels for heads of D channels."""
    BD = block(D)
    return {"D": D, "BD": BD, "ROWS": max(1, TILE // BD), "num_warps": 4}


def _rows_and_heads(h: Tensor) -> tuple[int, int]:
    return h.numel() // (h.shape[-1] * h.shape[-2]), h.shape[-2]


class _HeadNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, skip, c, z, eps, dtype):
        ctx.save_for_backward(h, weight, skip, c, z)
        ctx.eps = eps
        return torch.ops.statetrack.head_norm(h, weight, skip, c, z, eps, dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        h, weight, skip, c, z = ctx.saved_tensors
        dh, dc, dz, dweight, dskip = torch.ops.statetrack.head_norm_backward(
            h, weight, skip, c, z, dy.contiguous(), ctx.eps
        )
        dweight = dweight.to(weight.dtype)
        if skip is None:
            return dh, dweight, None, None, None, None, None
        return dh, dweight, dskip.to(skip.dtype), dc, dz, None, None


def _forward(h: Tensor, weight: Tensor, skip, c, z, eps: float, dtype: torch.dtype) -> Tensor:
    y, constant = _forward_fake(h, weight, skip, c, z, eps, dtype), constants(h.shape[-1])
    rows, H = _rows_and_heads(h)
    pointers = (weight, h, h) if skip is None else (skip, c, z)
    launch(head_norm_kernel, (-(-rows // constant["ROWS"]), H))(
        h,
        weight,
        *pointers,
        y,
        rows,
        H,
        _row_stride(c),
        _row_stride(z),
        eps,
        GATED=skip is not None,
        **constant,
    )
    return y


def _forward_fake(h, weight, skip, c, z, eps, dtype):
    return h.new_empty(*h.shape[:-2], h.shape[-2] * h.shape[-1], dtype=dtype)


def _backward(h: Tensor, weight: Tensor, skip, c, z, dy: Tensor, eps: float):
    """The gradients of h, c and z (empty without skip), weight and skip, these in float32."""
    dh, dc, dz, _, _ = _backward_fake(h, weight, skip, c, z, dy, eps)
    constant, (rows, H) = constants(h.shape[-1]), _rows_and_heads(h)
    programs = max(1, PROGRAMS_PER_PROCESSOR * processors(h.device) // H)
    programs = min(programs, -(-rows // constant["ROWS"]))
    partial = h.new_empty(programs, 2, weight.numel(), dtype=torch.float32)
    pointers = (weight, h, h) if skip is None else (skip, c, z)
    numbers = rows, H, _row_stride(c), _row_stride(z), eps
    launch(head_norm_backward_kernel, (programs, H))(
        h, weight, *pointers, dy, dh, dc, dz, partial, *numbers, GATED=skip is not None, **constant
    )
    dweight, dskip = sum_over_programs(partial, torch.float32)
    return dh, dc, dz, dweight, dskip


def _backward_fake(h, weight, skip, c, z, dy, eps):
    dc = h.new_empty(0) if c is None else torch.empty(c.shape, dtype=c.dtype, device=c.device)
    dz = h.new_empty(0) if z is None else torch.empty(z.shape, dtype=z.dtype, device=z.device)
    dweight, dskip = h.new_empty(2, weight.numel(), dtype=torch.float32)
    return torch.empty_like(h), dc, dz, dweight, dskip


_INPUTS = "Tensor h, Tensor weight, Tensor? skip, Tensor? c, Tensor? z"
register_op(f"head_norm({_INPUTS}, float eps, ScalarType dtype) -> Tensor", _forward, _forward_fake)
register_op(
    f"head_norm_backward({_INPUTS}, Tensor dy, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
