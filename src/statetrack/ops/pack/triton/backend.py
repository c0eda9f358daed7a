"""The Triton backend of packing: two kernels, and a cumulative sum of PyTorch between them."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.pack.triton.kernels import lengths_kernel, pack_kernel
from statetrack.ops.triton_runtime.compile_ahead import launch
from statetrack.ops.triton_runtime.sizes import block

SEQUENCES = 4  # of a program


def constants(W: int) -> dict[str, Any]:
    """What the kernels are compiled for."""
    return {"W": W, "BW": block(W), "SEQUENCES": SEQUENCES, "num_warps": 1}


def pack_triton(
    inputs: Tensor, targets: Tensor, ignore: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same arguments and results as `pack_reference`."""
    (B, W), constant = inputs.shape, constants(inputs.shape[1])
    inputs, targets = inputs.contiguous(), targets.contiguous()
    fillers = -(-rows // W)  # further sequences, so that every row belongs to one
    lengths, at = (targets.new_empty(B, dtype=torch.int64) for _ in range(2))
    answers = targets.new_empty(B)
    tokens = inputs.new_empty(rows)
    bounds = torch.empty(B + fillers + 1, dtype=torch.int32, device=inputs.device)
    launch(lengths_kernel, (-(-B // SEQUENCES),))(targets, lengths, answers, ignore, B, **constant)
    ends = lengths.cumsum(0)
    launch(pack_kernel, (-(-(B + fillers) // SEQUENCES),))(
        inputs, lengths, ends, tokens, bounds, at, answers, ignore, B, fillers, rows, **constant
    )
    return tokens, bounds, at, answers
