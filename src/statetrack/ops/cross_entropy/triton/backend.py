"""The Triton backend of cross-entropy: `torch.library` ops around the kernels."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only
from statetrack.ops.cross_entropy.triton.kernels import (
    cross_entropy_backward_kernel,
    cross_entropy_kernel,
    mean_kernel,
)
from statetrack.ops.custom_ops import register_op
from statetrack.ops.triton_runtime.compile_ahead import launch
from statetrack.ops.triton_runtime.sizes import block

MAX_CLASSES = 1024  # a program holds whole rows
TILE = 1024  # logits of a program
BLOCK = 1024  # sums added at once


def cross_entropy_triton(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    centred: bool = False,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
) -> Tensor:
    """Same arguments and result as `cross_entropy_reference`."""
    logits = logits.flatten(0, -2)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    targets = targets.flatten().contiguous()
    return torch.ops.statetrack.cross_entropy(logits, targets, ignore_index, centred, z_loss, smoothing)[0]


def refuses(logits: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if logits.shape[-1] > MAX_CLASSES:
        return f"there are {logits.shape[-1]} classes, more than {MAX_CLASSES}"
    if logits.numel() == 0:
        return "the input is empty"
    return "float64 is not offered there" if logits.dtype == torch.float64 else None


def constants(N: int, readable: int) -> dict[str, Any]:
    """What the kernels are compiled for, given the number of classes and of values a row may be read for."""
    BN = block(N)
    return {"N": N, "READ": min(readable, BN), "BN": BN, "ROWS": TILE // BN, "num_warps": 4}


def _readable(logits: Tensor) -> int:
    """How many values from the start of every row are in memory, where rows are padded."""
    rows, stride = len(logits), logits.stride(0)
    held = logits.untyped_storage().nbytes() // logits.element_size() - logits.storage_offset()
    return stride if stride >= logits.shape[1] and rows * stride <= held else logits.shape[1]


def _forward(
    logits: Tensor, targets: Tensor, ignore_index: int, centred: bool, z_loss: float, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The loss, and how many rows count."""
    (rows, N), device = logits.shape, logits.device
    constant = constants(N, _readable(logits)) | {"Z_LOSS": z_loss, "SMOOTHING": smoothing}
    programs = -(-rows // constant["ROWS"])
    sums = torch.empty(programs, dtype=torch.float32, device=device)
    counted = torch.empty(programs, dtype=torch.int32, device=device)
    launch(cross_entropy_kernel, (programs,))(
        logits, targets, sums, counted, rows, logits.stride(0), ignore_index, **constant
    )
    loss, count = _empty_outputs(logits, targets, ignore_index, centred, z_loss, smoothing)
    mean_constants: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": 4}
    launch(mean_kernel, (1,))(sums, counted, loss, count, programs, **mean_constants)
    return loss, count


def _empty_outputs(logits, targets, ignore_index, centred, z_loss, smoothing):
    """Uninitialised loss and number of rows that count."""
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    return loss, torch.empty((), dtype=torch.int32, device=logits.device)


def _backward(
    logits: Tensor,
    targets: Tensor,
    count: Tensor,
    dloss: Tensor,
    ignore_index: int,
    centred: bool,
    z_loss: float,
    smoothing: float,
) -> Tensor:
    rows, N = logits.shape
    dlogits = torch.empty(rows, N, dtype=logits.dtype, device=logits.device)
    options = {"CENTRED": centred, "Z_LOSS": z_loss, "SMOOTHING": smoothing}
    constant = constants(N, _readable(logits)) | options
    launch(cross_entropy_backward_kernel, (-(-rows // constant["ROWS"]),))(
        logits, targets, count, dloss, dlogits, rows, logits.stride(0), ignore_index, **constant
    )
    return dlogits


def _backward_fake(logits, targets, count, dloss, ignore_index, centred, z_loss, smoothing):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


_OPTIONS = "int ignore_index, bool centred, float z_loss, float smoothing"
register_op(
    f"cross_entropy(Tensor logits, Tensor targets, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward,
    _empty_outputs,
)
register_op(
    f"cross_entropy_backward(Tensor logits, Tensor targets, Tensor count, Tensor dloss, {_OPTIONS}) "
    "-> Tensor",
    _backward,
    _backward_fake,
)


def _setup_context(ctx, inputs, output):
    logits, targets, *ctx.options = inputs
    ctx.save_for_backward(logits, targets, output[1])
    ctx.mark_non_differentiable(output[1])


@first_derivative_only
def _gradients(ctx, dloss, _):
    logits, targets, count = ctx.saved_tensors
    backward = torch.ops.statetrack.cross_entropy_backward
    return backward(logits, targets, count, dloss, *ctx.options), None, None, None, None, None


torch.library.register_autograd("statetrack::cross_entropy", _gradients, setup_context=_setup_context)
