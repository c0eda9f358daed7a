"""Launch a Triton kernel with little Python in between: its own launcher inspects every argument anew."""

from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple, Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple,
    constants: tuple,
    warps: int,
) -> None:
    """Run `kernel` with its arguments in order: tensors, run-time numbers, constexprs.

    A compiled kernel is kept for every case Triton compiles anew: other constants or dtypes, tensors that do
    not start at 16 bytes, integers that are one or no multiple of 16.
    """
    arguments = (*tensors, *numbers, *constants)
    if not tensors[0].is_cuda:  # interpreted
        kernel[grid](*arguments, num_warps=warps)
        return
    device = tensors[0].device.index
    key = (
        id(kernel),
        device,
        constants,
        warps,
        tuple([(x.dtype, x.data_ptr() % 16 == 0) for x in tensors]),
        tuple([(x == 1, x % 16 == 0) for x in numbers if isinstance(x, int)]),
    )
    ready = _compiled.get(key)
    if ready is not None and device == torch.cuda.current_device():
        ready[(*grid, 1)](*arguments)
        return
    with torch.cuda.device(device):
        _compiled[key] = kernel[grid](*arguments, num_warps=warps)
