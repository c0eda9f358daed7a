"""The Triton backend of the rotated split: `torch.library` ops around one kernel, which goes both ways."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only
from statetrack.ops.custom_ops import register_op
from statetrack.ops.rotary.triton.kernels import rotated_split_kernel
from statetrack.ops.triton_runtime.compile_ahead import launch

PAIRS = 64  # of channels in a program
ROWS = 32  # steps of a program


def rotated_split_triton(
    qkv: Tensor, heads: int, kv_heads: int, base: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Same arguments and results as `rotated_split_reference`; the results are contiguous."""
    q, k, v = _RotatedSplit.apply(qkv, heads, kv_heads, base)
    return q, k, v


def refuses(qkv: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if qkv.numel() == 0:
        return "the input is empty"
    return "float64 is not offered there" if qkv.dtype == torch.float64 else None


class _RotatedSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, heads, kv_heads, base):
        ctx.base = base
        return tuple(torch.ops.statetrack.rotated_split(qkv.contiguous(), heads, kv_heads, base))

    @staticmethod
    @first_derivative_only
    def backward(ctx, dq, dk, dv):
        parts = dq.contiguous(), dk.contiguous(), dv.contiguous()
        return torch.ops.statetrack.rotated_split_backward(*parts, ctx.base), None, None, None


def constants(heads: int, kv_heads: int, K: int) -> dict[str, Any]:
    return {
        "HEADS": heads, "KV_HEADS": kv_heads, "HALF": K // 2, "BP": PAIRS, "ROWS": ROWS, "num_warps": 4
    }  # fmt: skip


def turns_per_step(half: int, base: float, device: torch.device) -> Tensor:
    """base^(-j / half) / (2 pi) for j = 0, ..., half - 1, float64: one kernel, which a graph can hold."""
    first = -math.log2(2 * math.pi)
    last = first - (half - 1) / half * math.log2(base)
    return torch.logspace(first, last, half, base=2.0, dtype=torch.float64, device=device)


def _launch(qkv: Tensor, parts: Sequence[Tensor], base: float, backward: bool) -> None:
    B, T, heads, K = parts[0].shape
    constant = constants(heads, parts[1].shape[2], K)
    pairs = (heads + 2 * parts[1].shape[2]) * (K // 2)
    grid = -(-B * T // ROWS), -(-pairs // PAIRS)
    rates = turns_per_step(K // 2, base, qkv.device)
    launch(rotated_split_kernel, grid)(qkv, *parts, rates, B * T, T, BACKWARD=backward, **constant)


def _forward(qkv: Tensor, heads: int, kv_heads: int, base: float) -> list[Tensor]:
    parts = _forward_fake(qkv, heads, kv_heads, base)
    _launch(qkv, parts, base, backward=False)
    return parts


def _forward_fake(qkv, heads, kv_heads, base):
    K = qkv.shape[-1] // (heads + 2 * kv_heads)
    return [qkv.new_empty(*qkv.shape[:2], n, K) for n in (heads, kv_heads, kv_heads)]


def _backward(dq: Tensor, dk: Tensor, dv: Tensor, base: float) -> Tensor:
    dqkv = _backward_fake(dq, dk, dv, base)
    _launch(dqkv, (dq, dk, dv), base, backward=True)
    return dqkv


def _backward_fake(dq, dk, dv, base):
    return dq.new_empty(*dq.shape[:2], (dq.shape[2] + 2 * dk.shape[2]) * dq.shape[3])


register_op(
    "rotated_split(Tensor qkv, int heads, int kv_heads, float base) -> Tensor[]", _forward, _forward_fake
)
register_op(
    "rotated_split_backward(Tensor dq, Tensor dk, Tensor dv, float base) -> Tensor", _backward, _backward_fake
)
