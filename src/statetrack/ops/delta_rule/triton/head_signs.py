"""Signed gates per head: the logarithms of their sizes and their cumulated signs, in one pass over (B, T, H).

The kernels of the delta rule then need no other q and k: the inverse norms that `prepare` leaves, and that
all later kernels multiply rows of q and k by, carry the cumulated signs (chunk_forward.py).
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.delta_rule.gates import LOG_OF_ZERO
from statetrack.ops.delta_rule.triton.tiles import sequence_rows
from statetrack.ops.triton_runtime.launcher import Launcher
from statetrack.ops.triton_runtime.sizes import block

ZERO = tl.constexpr(LOG_OF_ZERO)
SMALLEST = tl.constexpr(math.exp(LOG_OF_ZERO))
MOST_STEPS = 4096  # at a time


@triton.jit
def head_signs_kernel(
    gate, log, signs, cu_seqlens, T, H,
    STEPS: tl.constexpr, VALUE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """A program has one sequence and head. VALUE: `gate` is a, and log |a| is wanted; else it is the sign."""
    sequence, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, rows = sequence_rows(cu_seqlens, sequence, T, 1, PACKED)
    start = first * H + h
    flips = 0
    for before in tl.range(0, rows, STEPS):
        step = before + tl.arange(0, STEPS)
        x = tl.load(gate + start + step * H, mask=step < rows, other=1.0).to(tl.float32)
        negative = (x < 0.0).to(tl.int32)
        odd = (tl.cumsum(negative, axis=0) + flips) & 1
        tl.store(signs + start + step * H, tl.where(odd == 1, -1.0, 1.0), mask=step < rows)
        flips += tl.sum(negative, axis=0)
        if VALUE:  # written with `where`, which keeps NaN
            zero = tl.abs(x) < SMALLEST
            l = tl.where(zero, ZERO, tl.log(tl.where(zero, 1.0, tl.abs(x))))
            tl.store(log + start + step * H, l, mask=step < rows)


def cumulated_head_signs(sign: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The product of `sign` (B, T, H) up to each step of its sequence, in float32."""
    return without_dispatcher(sign, _signs, _signs_op)(sign.detach(), cu_seqlens, False)[0]


class SignsAndLogs(torch.autograd.Function):
    """Of a (B, T, H): log |a|, at least LOG_OF_ZERO, and the cumulated signs, both in float32.

    The gradient of the number a is the quotient of that of log |a|, which the kernels give to its own
    relative accuracy however small a is, and a.
    """

    @staticmethod
    def forward(ctx, a: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        signs, log = without_dispatcher(a, _signs, _signs_op)(a, cu_seqlens, True)
        ctx.save_for_backward(a, log)
        ctx.mark_non_differentiable(signs)
        return log, signs

    @staticmethod
    @first_derivative_only
    def backward(ctx, dlog, _):
        a, log = ctx.saved_tensors
        return (dlog * torch.where(a < 0, -1.0, 1.0) * torch.exp(-log)).to(a.dtype), None


def _signs(gate: Tensor, cu_seqlens: Tensor | None, is_value: bool) -> list[Tensor]:
    """The cumulated signs, and the logarithms if `gate` is a."""
    gate = gate.contiguous()
    results = _new(gate, cu_seqlens, is_value)
    B, T, H = gate.shape
    sequences = B if cu_seqlens is None else cu_seqlens.numel() - 1
    constants = min(block(T), MOST_STEPS), is_value, cu_seqlens is not None
    launch = Launcher(head_signs_kernel, gate.get_device(), (sequences * H, 1), (T, H), constants, warps=4)
    launch(gate, results[-1], results[0], gate if cu_seqlens is None else cu_seqlens.contiguous())
    return results


def _new(gate: Tensor, cu_seqlens: Tensor | None, is_value: bool) -> list[Tensor]:
    kind: Any = {"dtype": torch.float32, "memory_format": torch.contiguous_format}
    return [torch.empty_like(gate, **kind) for _ in range(2 if is_value else 1)]


def _signs_op(gate: Tensor, cu_seqlens: Tensor | None, is_value: bool) -> list[Tensor]:
    return torch.ops.statetrack.head_signs(gate, cu_seqlens, is_value)


register_op("head_signs(Tensor gate, Tensor? cu_seqlens, bool is_value) -> Tensor[]", _signs, _new)
