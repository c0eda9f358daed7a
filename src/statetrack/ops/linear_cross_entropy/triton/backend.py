"""The Triton backend of the loss of a linear read-out: products by cuBLAS, one kernel on the logits."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.linear_cross_entropy.by_chunks import register, run_op
from statetrack.ops.linear_cross_entropy.triton.kernels import row_losses_kernel
from statetrack.ops.triton_runtime.compile_ahead import launch
from statetrack.ops.triton_runtime.sizes import block

MAX_LOGITS = 2**27  # at a time, 256 MB in bfloat16: chunks of thousands of rows keep cuBLAS efficient
MAX_BLOCK = 4096  # logits of a program at a time


def linear_cross_entropy_triton(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Same arguments and result as `linear_cross_entropy_reference`."""
    return run_op("triton", x, weight, targets, ignore_index)


def refuses(x: Tensor) -> str | None:
    """Why the kernel cannot take these inputs, or None."""
    return "float64 is not offered there" if x.dtype == torch.float64 else None


def constants(N: int) -> dict[str, Any]:
    """Constants of the kernel for N classes."""
    BN = min(MAX_BLOCK, block(N))
    return {"N": N, "BN": BN, "num_warps": max(1, BN // 512)}


def _losses(z: Tensor, targets: Tensor, ignore_index: int, gradient: bool) -> Tensor:
    """The loss of every row of logits z; with `gradient`, z becomes softmax(z) - one_hot(target)."""
    losses = torch.empty(len(z), dtype=torch.float32, device=z.device)
    launch(row_losses_kernel, (len(z),))(
        z, targets, losses, ignore_index, z.stride(0), **constants(z.shape[1]), GRADIENT=gradient
    )
    return losses


register("triton", _losses, lambda: MAX_LOGITS)
