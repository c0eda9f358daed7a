"""The delta rule on convolved inputs; the backward pass computes again what is cheaper than its memory.

Kept for it are x, the errors E and the state of every chunk. Computed again are q, k and v, by the
convolution, and the inverses of the chunks, by the first kernel of the rule.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.convolved_delta_rule.reference import convolved_delta_rule_reference
from statetrack.ops.convolved_delta_rule.shapes import Shapes
from statetrack.ops.delta_rule.options import DeltaRuleOptions
from statetrack.ops.delta_rule.triton.backend import can_repeat_inverses
from statetrack.ops.delta_rule.triton.plan import too_large
from statetrack.ops.short_convolution.triton import backend as convolution_backend

KEEP_INVERSES = False  # for benchmarks: 16 KB more per chunk and head, and one kernel less


class Call(NamedTuple):
    """What is no tensor."""

    shapes: Shapes
    silu: list[bool]
    options: DeltaRuleOptions


def convolved_delta_rule_triton(
    x: Tensor,
    weights: list[Tensor],
    shapes: Shapes,
    silu: list[bool],
    beta: tuple[float, bool],
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Same arguments and results as `convolved_delta_rule_reference`."""
    if not needs_gradient((x, *weights)):
        packing = cu_seqlens, max_seqlen
        return convolved_delta_rule_reference(x, weights, shapes, silu, beta, output_final_state, *packing)
    options = DeltaRuleOptions(
        shapes.K**-0.5, shapes.householders, True, beta[0], max_seqlen, output_final_state, beta[1]
    )
    return _ConvolvedDeltaRule.apply(x, cu_seqlens, Call(shapes, silu, options), *weights)


def refuses(x: Tensor, taps: int, shapes: Shapes) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if reason := convolution_backend.refuses(x, taps, 3, None):
        return reason
    heads = (*x.shape[:2], shapes.H)
    steps = x.shape[0], x.shape[1] * shapes.householders, shapes.H
    like = {"device": "meta", "dtype": x.dtype}
    return too_large(torch.empty(*heads, shapes.K, **like), torch.empty(*steps, shapes.V, **like))


def _convolved(x: Tensor, weights: list[Tensor], cu_seqlens: Tensor | None, call: Call) -> tuple[Tensor, ...]:
    """q, k, v and the logits of beta."""
    *widths, rest = call.shapes.widths
    longest = call.options.max_seqlen or x.shape[1]
    parts = torch.ops.statetrack.convolved_split(x, weights, [], cu_seqlens, longest, widths, rest, call.silu)
    return call.shapes.split_heads(*parts)


class _ConvolvedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cu_seqlens, call, *weights):
        inputs = *_convolved(x, list(weights), cu_seqlens, call), None, None, cu_seqlens
        out, *saved = torch.ops.statetrack.delta_rule_forward(*inputs, *call.options, True)
        final_state, saved = (saved[0], saved[1:]) if call.options.output_final_state else (None, saved)
        ctx.call, ctx.weights = call, len(weights)
        ctx.computes_inverses = can_repeat_inverses(saved) and not KEEP_INVERSES
        if ctx.computes_inverses:
            saved = saved[2:]
        ctx.save_for_backward(x, cu_seqlens, *weights, *saved)
        ctx.set_materialize_grads(False)
        return out, final_state

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dfinal_state):
        x, cu_seqlens, *rest = ctx.saved_tensors
        weights, saved, call = rest[: ctx.weights], rest[ctx.weights :], ctx.call
        *widths, others = call.shapes.widths
        inputs = *_convolved(x, weights, cu_seqlens, call), None, None, cu_seqlens
        if ctx.computes_inverses:
            saved = [*torch.ops.statetrack.delta_rule_inverses(*inputs, *call.options), *saved]
        if dout is None:
            dout = x.new_zeros(*x.shape[:2], call.shapes.H, call.shapes.V)
        gradients = torch.ops.statetrack.delta_rule_backward(
            *inputs, saved, dout, dfinal_state, *call.options
        )
        del saved
        dparts = [
            gradient.view(*x.shape[:2], width)
            for gradient, width in zip(gradients, call.shapes.widths, strict=True)
        ]
        longest = call.options.max_seqlen or x.shape[1]
        dx, total = torch.ops.statetrack.convolved_split_backward(
            x, weights, [], dparts, cu_seqlens, longest, widths, others, call.silu
        )
        parts = total.split([weight.numel() for weight in weights])
        dweights = [part.view(w.shape).to(w.dtype) for part, w in zip(parts, weights, strict=True)]
        return dx, None, None, *dweights
