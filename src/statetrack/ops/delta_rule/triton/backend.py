"""The Triton backend of the delta rule: two `torch.library` ops, forward and backward, around the kernels."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.call_cache import CallCache
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.delta_rule.reference import floor_decay
from statetrack.ops.delta_rule.triton.launches import (
    Case,
    ChunkedBackward,
    ChunkedForward,
    FusedBackward,
    FusedForward,
    make_room,
)
from statetrack.ops.triton_runtime.compile_ahead import compile_ahead

FORWARD_CALLS, BACKWARD_CALLS = CallCache(), CallCache()


def delta_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor | None,
    *,
    scale: float,
    householders: int,
    l2norm: bool,
    cu_seqlens: Tensor | None,
    beta_from_logits: float | None,
    final: bool,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Same arguments and results as `delta_rule_reference`; outputs come in the dtype of v."""
    if q.numel() == 0 or v.numel() == 0:
        from statetrack.ops.delta_rule.chunked import delta_rule_chunked

        rest = {"scale": scale, "householders": householders, "l2norm": l2norm, "cu_seqlens": cu_seqlens}
        return delta_rule_chunked(q, k, v, beta, g, state, beta_from_logits=beta_from_logits, **rest)
    if not q.dtype == k.dtype == v.dtype:
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    g = None if g is None else floor_decay(g.float())
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    options = scale, householders, l2norm, beta_from_logits or 0.0, max_seqlen or 0
    inputs = q, k, v, beta, g, state, cu_seqlens
    if needs_gradient(inputs):
        return _DeltaRule.apply(*inputs, options, final)
    forward = without_dispatcher(q, _forward, torch.ops.statetrack.delta_rule_forward)
    o, *rest = forward(*inputs, *options, False, final)
    return o, rest[0] if final else None


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, g, state, cu_seqlens, options, final):
        forward = without_dispatcher(q, _forward, torch.ops.statetrack.delta_rule_forward)
        o, *rest = forward(q, k, v, beta, g, state, cu_seqlens, *options, True, final)
        S, kept = (rest[0], rest[1:]) if final else (None, rest)
        ctx.save_for_backward(q, k, v, beta, g, state, cu_seqlens, *kept)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return o, S

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dfinal):
        q, k, v, beta, g, state, cu_seqlens, *kept = ctx.saved_tensors
        if dout is None:
            dout = v.new_zeros(*q.shape[:-1], v.shape[-1])
        backward = without_dispatcher(q, _backward, torch.ops.statetrack.delta_rule_backward)
        gradients = backward(q, k, v, beta, g, state, cu_seqlens, kept, dout, dfinal, *ctx.options)
        return *_spread(gradients, g, state), None, None, None


def _spread(gradients: list[Tensor], g: Tensor | None, state: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, beta, g and the state: None for the last two where there is no such input."""
    dq, dk, dv, dbeta, *rest = gradients
    return dq, dk, dv, dbeta, None if g is None else rest[0], None if state is None else rest[-1]


def _tables(cu_seqlens: Tensor | None, case: Case) -> tuple[Tensor, Tensor, Tensor] | None:
    """First row and number of rows of every chunk, first chunk of every packed sequence, and the offsets."""
    if cu_seqlens is None:
        return None
    if case.plan.fused is not None:  # reads the offsets alone
        return cu_seqlens, cu_seqlens, cu_seqlens
    C, n = case.plan.C, case.n
    bounds = cu_seqlens.long() * n
    per_sequence = (bounds.diff() + C - 1) // C
    last = per_sequence.cumsum(0)
    first_chunk = last - per_sequence
    chunk = torch.arange(case.chunks, device=cu_seqlens.device)
    sequence = torch.searchsorted(last, chunk, right=True)
    unused = sequence == last.numel()
    sequence = sequence.clamp(max=last.numel() - 1)
    within = (chunk - first_chunk[sequence]) * C
    start = torch.where(unused, 0, bounds[sequence] + within)
    rows = torch.where(unused, 0, bounds[sequence + 1] - start).clamp(max=C)
    return torch.stack([start, rows], dim=1), first_chunk, cu_seqlens


def _key(q, v, beta, g, state, cu_seqlens) -> tuple:
    """All of the inputs that a call depends on: the others are contiguous, and of the same shape or dtype."""
    packed = None if cu_seqlens is None else (cu_seqlens.shape, cu_seqlens.dtype)
    first = None if state is None else state.dtype
    return q.shape, v.shape, q.dtype, beta.dtype, q.get_device(), g is None, first, packed


def _forward(
    q, k, v, beta, g, state, cu_seqlens, scale, n, l2norm, sigmoid, longest, save, want_final
) -> list[Tensor]:
    """Outputs, last states if wanted, and what the backward reads."""
    q, k, v, beta = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous()
    options = save, want_final, scale, l2norm, sigmoid

    def make() -> FusedForward | ChunkedForward:
        inputs = q, k, v, beta, g, state, cu_seqlens
        named = {"scale": scale, "n": n, "l2norm": l2norm, "sigmoid": sigmoid, "longest": longest}
        compile_ahead(lambda: _both_ways(inputs, save, want_final, **named))
        case = Case(q, v, g, state, cu_seqlens, n, longest)
        return (ChunkedForward if case.plan.fused is None else FusedForward)(case, *options)

    call = FORWARD_CALLS.get_or_make((n, longest, options, *_key(q, v, beta, g, state, cu_seqlens)), make)
    results = make_room(q, call.room)
    out, *kept = results
    final = kept.pop(0) if want_final else None
    gate, first = beta if g is None else g.contiguous(), None if state is None else state.contiguous()
    call.run(q, k, v, beta, gate, first, _tables(cu_seqlens, call.case), out, final, kept)
    return results


def _forward_fake(
    q, k, v, beta, g, state, cu_seqlens, scale, n, l2norm, sigmoid, longest, save, want_final
) -> list[Tensor]:
    return make_room(q, Case(q, v, g, state, cu_seqlens, n, longest).room(save, want_final))


def _backward(
    q, k, v, beta, g, state, cu_seqlens, kept, dout, dfinal, scale, n, l2norm, sigmoid, longest
) -> list[Tensor]:
    """Gradients of q, k, v, beta, and of g and the first state if there were any."""
    q, k, v, beta, dout = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous(), dout.contiguous()
    options = dfinal is not None, scale, l2norm, sigmoid

    def make() -> FusedBackward | ChunkedBackward:
        case = Case(q, v, g, state, cu_seqlens, n, longest)
        return (ChunkedBackward if case.plan.fused is None else FusedBackward)(case, *options)

    dtypes = dout.dtype, None if dfinal is None else dfinal.dtype
    call = BACKWARD_CALLS.get_or_make(
        (n, longest, options, dtypes, *_key(q, v, beta, g, state, cu_seqlens)), make
    )
    gradients = _gradients(q, k, v, beta, g, state)
    gate, first = beta if g is None else g.contiguous(), None if state is None else state.contiguous()
    last = None if dfinal is None else dfinal.contiguous()
    tables = _tables(cu_seqlens, call.case)
    call.run(q, k, beta, gate, first, tables, kept, dout, last, *_spread(gradients, g, state))
    return gradients


def _both_ways(inputs: tuple, save: bool, want_final: bool, **options: Any) -> None:
    """All launches for these inputs: the forward's, and the backward's if one will follow."""
    out, *kept = _forward(*inputs, **options, save=save, want_final=want_final)
    if save:
        kept = kept[int(want_final) :]
        _backward(*inputs, **options, kept=kept, dout=torch.empty_like(out), dfinal=None)


def _gradients(q, k, v, beta, g, state, *_) -> list[Tensor]:
    """Room for the gradients of q, k, v, beta, and of g and the state if there are any."""
    inputs = q, k, v, beta, g, state
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs if x is not None]


_SHARED = "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, Tensor? state, Tensor? cu_seqlens"
_OPTIONS = "float scale, int n, bool l2norm, float sigmoid, int longest"
register_op(
    f"delta_rule_forward({_SHARED}, {_OPTIONS}, bool save, bool want_final) -> Tensor[]",
    _forward,
    _forward_fake,
)
register_op(
    f"delta_rule_backward({_SHARED}, Tensor[] kept, Tensor dout, Tensor? dfinal, {_OPTIONS}) -> Tensor[]",
    _backward,
    _gradients,
)
