"""The Triton backend of the delta rule with a gate per key channel: two `torch.library` ops, and autograd."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.call_cache import CallCache
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.delta_rule.options import OPTIONS_SCHEMA, DeltaRuleOptions
from statetrack.ops.delta_rule.triton.backend import chunk_tables
from statetrack.ops.delta_rule.triton.channel_launches import Backward, Case, Forward, Inputs
from statetrack.ops.triton_runtime.compile_ahead import compile_ahead

FORWARD_CALLS, BACKWARD_CALLS = CallCache(), CallCache()


def delta_rule_channel_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gate: Tensor,
    sign: Tensor | None,
    is_log: bool,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: DeltaRuleOptions,
) -> tuple[Tensor, Tensor]:
    """As `delta_rule_reference` with one step per token; outputs in the dtype of v.

    `gate` (B, T, H, K) is the logarithm of the sizes of the gates, with their signs in `sign` (None for
    all +1), or if not `is_log` the gates themselves.
    """
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if sign is not None:
        sign = (sign if sign.ndim == 4 else sign[..., None]).expand_as(gate)
    inputs = Inputs(q, k, v, beta, gate, sign, initial_state, cu_seqlens)
    if needs_gradient(inputs):
        return _ChannelRule.apply(*inputs, is_log, options)
    out, final_state = without_dispatcher(q, _forward, _forward_op)(inputs, is_log, options, False)
    return out, final_state


class _ChannelRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, gate, sign, initial_state, cu_seqlens, is_log, options):
        inputs = Inputs(q, k, v, beta, gate, sign, initial_state, cu_seqlens)
        out, final, *saved = without_dispatcher(q, _forward, _forward_op)(inputs, is_log, options, True)
        ctx.save_for_backward(*inputs, *saved)
        ctx.is_log, ctx.options = is_log, options
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dfinal_state):
        kept = ctx.saved_tensors  # read once: a checkpointed block computes them again to give them
        inputs, saved = Inputs(*kept[:8]), list(kept[8:])
        dout = torch.zeros_like(inputs.v) if dout is None else dout
        backward = without_dispatcher(inputs.q, _backward, _backward_op)
        gradients = backward(inputs, saved, dout, dfinal_state, ctx.is_log, ctx.options)
        return *gradients[:5], None, None if inputs.initial_state is None else gradients[5], None, None, None


def _contiguous(inputs: Inputs) -> Inputs:
    return Inputs(*[None if x is None else x.contiguous() for x in inputs])


def _key(inputs: Inputs) -> tuple:
    return tuple([None if x is None else (x.shape, x.dtype, x.get_device()) for x in inputs])


def _tables(cu_seqlens: Tensor | None, case: Case, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tables of packed sequences; for others no kernel reads them."""
    return chunk_tables(cu_seqlens, case.plan.C, 1, case.chunks) or (like, like, like)


def _forward(inputs: Inputs, is_log: bool, options: DeltaRuleOptions, save: bool) -> list[Tensor]:
    """Outputs, last states, and with `save` what the backward reads."""
    inputs = _contiguous(inputs)

    def make() -> Forward:
        compile_ahead(lambda: _both_ways(inputs, is_log, options, save))
        return Forward(Case(inputs, is_log, options))

    call = FORWARD_CALLS.get_or_make((is_log, options, save, *_key(inputs)), make)
    out, final_state = call.case.results(inputs.v)
    saved = call.case.saved(inputs.v)
    call.run(inputs, _tables(inputs.cu_seqlens, call.case, out), saved, out, final_state)
    return [out, final_state, *saved] if save else [out, final_state]


def _backward(
    inputs: Inputs,
    saved: list[Tensor],
    dout: Tensor,
    dfinal_state: Tensor | None,
    is_log: bool,
    options: DeltaRuleOptions,
) -> list[Tensor]:
    """Gradients of q, k, v, beta, the gate, and of the initial state if there is one."""
    inputs, dout = _contiguous(inputs), dout.contiguous()
    dfinal_state = None if dfinal_state is None else dfinal_state.contiguous()
    dtypes = dout.dtype, None if dfinal_state is None else dfinal_state.dtype
    call = BACKWARD_CALLS.get_or_make(
        (is_log, options, dtypes, *_key(inputs)),
        lambda: Backward(Case(inputs, is_log, options), dfinal_state is not None),
    )
    gradients = _new_gradients(inputs)
    call.run(
        inputs, _tables(inputs.cu_seqlens, call.case, dout), saved, dout, dfinal_state, gradients
    )  # fmt: skip
    return gradients


def _both_ways(inputs: Inputs, is_log: bool, options: DeltaRuleOptions, save: bool) -> None:
    """All launches for these inputs: the forward's, and the backward's if one will follow."""
    out, _, *saved = _forward(inputs, is_log, options, save)
    if save:
        _backward(inputs, saved, torch.empty_like(out), None, is_log, options)


def _new_gradients(inputs: Inputs) -> list[Tensor]:
    of = (*inputs[:5], inputs.initial_state)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in of if x is not None]


# The same as `torch.library` ops, whose inputs and options are one by one.


def _forward_op(inputs: Inputs, is_log: bool, options: DeltaRuleOptions, save: bool) -> list[Tensor]:
    return torch.ops.statetrack.channel_delta_rule_forward(*inputs, is_log, *options, save)


def _backward_op(inputs: Inputs, saved, dout, dfinal_state, is_log, options) -> list[Tensor]:
    arguments = *inputs, saved, dout, dfinal_state, is_log, *options
    return torch.ops.statetrack.channel_delta_rule_backward(*arguments)


def _forward_real(*arguments: Any) -> list[Tensor]:
    options = DeltaRuleOptions(*arguments[9:-1])
    return _forward(Inputs(*arguments[:8]), arguments[8], options, arguments[-1])


def _forward_fake(*arguments: Any) -> list[Tensor]:
    inputs, is_log, (*options, save) = Inputs(*arguments[:8]), arguments[8], arguments[9:]
    case = Case(inputs, is_log, DeltaRuleOptions(*options))
    return case.results(inputs.v) + (case.saved(inputs.v) if save else [])


def _backward_real(*arguments: Any) -> list[Tensor]:
    saved, dout, dfinal_state, is_log, *options = arguments[8:]
    return _backward(
        Inputs(*arguments[:8]), saved, dout, dfinal_state, is_log, DeltaRuleOptions(*options)
    )  # fmt: skip


def _backward_fake(*arguments: Any) -> list[Tensor]:
    return _new_gradients(Inputs(*arguments[:8]))


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor gate, Tensor? sign, Tensor? initial_state, "
    "Tensor? cu_seqlens"
)
register_op(
    f"channel_delta_rule_forward({_INPUTS}, bool is_log, {OPTIONS_SCHEMA}, bool save) -> Tensor[]",
    _forward_real,
    _forward_fake,
)
register_op(
    f"channel_delta_rule_backward({_INPUTS}, Tensor[] saved, Tensor dout, Tensor? dfinal_state, bool is_log, "
    f"{OPTIONS_SCHEMA}) -> Tensor[]",
    _backward_real,
    _backward_fake,
)
