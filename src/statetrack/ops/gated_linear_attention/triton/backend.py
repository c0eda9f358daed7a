"""The Triton backend of gated linear attention: two `torch.library` ops, forward and backward."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.call_cache import CallCache
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.delta_rule.triton.backend import chunk_tables
from statetrack.ops.gated_linear_attention.rotation import both_of_pair, fold_angles
from statetrack.ops.gated_linear_attention.triton.launches import Backward, Case, Decode, Forward, Inputs
from statetrack.ops.triton_runtime.compile_ahead import compile_ahead

FORWARD_CALLS, BACKWARD_CALLS = CallCache(), CallCache()


def gated_linear_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    a: Tensor | None,
    sign: Tensor | None,
    angle: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Same as `gated_linear_attention_reference`, but the gate comes as the caller gave it: as g or as a."""
    gate = g if a is None else a
    assert gate is not None
    if q.numel() == 0 or v.numel() == 0:
        from statetrack.ops.gated_linear_attention.chunked import gated_linear_attention_chunked

        value = gate.float() if a is not None else gate.float().exp() * (1.0 if sign is None else sign)
        return gated_linear_attention_chunked(q, k, v, value, angle, initial_state, cu_seqlens, scale)
    if not q.dtype == k.dtype == v.dtype:
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    unfold = None
    if angle is not None:
        q, k, unfold = fold_angles(q, k, angle, cu_seqlens)
        gate = gate if gate.ndim == 3 else both_of_pair(gate)
        sign = sign if sign is None or sign.ndim == 3 else both_of_pair(sign)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    inputs = Inputs(q, k, v, gate, sign, initial_state, cu_seqlens)
    if needs_gradient(inputs):
        o, state = _GatedLinearAttention.apply(*inputs, a is None, scale)
    else:
        o, state = without_dispatcher(q, _forward, _forward_op)(inputs, a is None, scale, False)
    return o, state if unfold is None else unfold(state)


class _GatedLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, gate, sign, initial_state, cu_seqlens, is_log, scale):
        inputs = Inputs(q, k, v, gate, sign, initial_state, cu_seqlens)
        o, state, *saved = without_dispatcher(q, _forward, _forward_op)(inputs, is_log, scale, True)
        ctx.save_for_backward(*inputs, *saved)
        ctx.is_log, ctx.scale = is_log, scale
        ctx.set_materialize_grads(False)
        return o, state

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dstate):
        kept = ctx.saved_tensors  # read once: a checkpointed block computes them again to give them
        inputs, saved = Inputs(*kept[:7]), list(kept[7:])
        if dout is None:
            dout = torch.zeros_like(inputs.v)
        backward = without_dispatcher(inputs.q, _backward, _backward_op)
        dq, dk, dv, dgate, *rest = backward(inputs, saved, dout, dstate, ctx.is_log, ctx.scale)
        return dq, dk, dv, dgate, None, rest[0] if rest else None, None, None, None


def _tables(cu_seqlens: Tensor | None, case: Case, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tables of packed sequences; for others no kernel reads them."""
    return chunk_tables(cu_seqlens, case.plan.C, 1, case.chunks) or (like, like, like)


def _contiguous(inputs: Inputs) -> Inputs:
    return Inputs(*[None if x is None else x.contiguous() for x in inputs])


def _key(inputs: Inputs) -> tuple:
    return tuple([None if x is None else (x.shape, x.dtype, x.get_device()) for x in inputs])


def _forward(inputs: Inputs, is_log: bool, scale: float, save: bool) -> list[Tensor]:
    """Outputs, last states, and with `save` what the backward reads."""
    inputs = _contiguous(inputs)

    def make() -> Forward | Decode:
        compile_ahead(lambda: _both_ways(inputs, is_log, scale, save))
        case = Case(inputs, is_log, scale)
        return Decode(case) if case.T == 1 and not case.packed and not save else Forward(case)

    call = FORWARD_CALLS.get_or_make((is_log, scale, save, *_key(inputs)), make)
    case, v = call.case, inputs.v
    o, state = case.results(v)
    saved = case.saved(v) if isinstance(call, Forward) else []
    call.run(inputs, _tables(inputs.cu_seqlens, case, o), saved, o, state)
    return [o, state, *saved] if save else [o, state]


def _backward(
    inputs: Inputs, saved: list[Tensor], dout: Tensor, dstate: Tensor | None, is_log: bool, scale: float
) -> list[Tensor]:
    """Gradients of q, k, v, the gate, and the initial state if there is one."""
    inputs, dout = _contiguous(inputs), dout.contiguous()
    dstate = None if dstate is None else dstate.contiguous()
    dtypes = dout.dtype, None if dstate is None else dstate.dtype
    call = BACKWARD_CALLS.get_or_make(
        (is_log, scale, dtypes, *_key(inputs)),
        lambda: Backward(Case(inputs, is_log, scale), dstate is not None),
    )
    gradients = _new_gradients(inputs)
    tables = _tables(inputs.cu_seqlens, call.case, dout)
    call.run(inputs, tables, saved, dout, dstate, gradients)
    return gradients


def _new_gradients(inputs: Inputs) -> list[Tensor]:
    of = inputs.q, inputs.k, inputs.v, inputs.gate, inputs.initial_state
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in of if x is not None]


def _both_ways(inputs: Inputs, is_log: bool, scale: float, save: bool) -> None:
    """All launches for these inputs: the forward's, and the backward's if one will follow."""
    o, _, *saved = _forward(inputs, is_log, scale, save)
    if save:
        _backward(inputs, saved, torch.empty_like(o), None, is_log, scale)


# The kernels read logarithms and signs as they are given, without a pass that multiplies them out.
gated_linear_attention_triton.separate_gates = True  # type: ignore[attr-defined]


# The same as `torch.library` ops, whose inputs are one by one.


def _forward_op(inputs: Inputs, *options: Any) -> list[Tensor]:
    return torch.ops.statetrack.gated_linear_attention_forward(*inputs, *options)


def _backward_op(inputs: Inputs, *rest: Any) -> list[Tensor]:
    return torch.ops.statetrack.gated_linear_attention_backward(*inputs, *rest)


def _forward_real(*arguments: Any) -> list[Tensor]:
    return _forward(Inputs(*arguments[:7]), *arguments[7:])


def _forward_fake(*arguments: Any) -> list[Tensor]:
    inputs, (is_log, scale, save) = Inputs(*arguments[:7]), arguments[7:]
    case = Case(inputs, is_log, scale)
    return case.results(inputs.v) + (case.saved(inputs.v) if save else [])


def _backward_real(*arguments: Any) -> list[Tensor]:
    return _backward(Inputs(*arguments[:7]), *arguments[7:])


def _backward_fake(*arguments: Any) -> list[Tensor]:
    return _new_gradients(Inputs(*arguments[:7]))


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor gate, Tensor? sign, Tensor? initial_state, Tensor? cu_seqlens"
register_op(
    f"gated_linear_attention_forward({_INPUTS}, bool is_log, float scale, bool save) -> Tensor[]",
    _forward_real,
    _forward_fake,
)
register_op(
    f"gated_linear_attention_backward({_INPUTS}, Tensor[] saved, Tensor dout, Tensor? dstate, bool is_log, "
    "float scale) -> Tensor[]",
    _backward_real,
    _backward_fake,
)
