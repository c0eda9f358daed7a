"""The Triton backend of the delta rule: two `torch.library` ops, forward and backward, around the kernels."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.call_cache import CallCache
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.delta_rule.options import OPTIONS_SCHEMA, DeltaRuleOptions
from statetrack.ops.delta_rule.reference import floor_decay
from statetrack.ops.delta_rule.triton.launches import (
    CHUNK_BUFFERS,
    Case,
    ChunkBackward,
    ChunkForward,
    ShortBackward,
    ShortForward,
    new_buffers,
)
from statetrack.ops.triton_runtime.compile_ahead import compile_ahead

FORWARD_CALLS, BACKWARD_CALLS = CallCache(), CallCache()


def delta_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: DeltaRuleOptions,
    signs: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Same arguments and results as `delta_rule_reference`; outputs come in the dtype of v.

    With `signs` (B, T, H), in float32, q and k are multiplied by them first; there must be a g then.
    """
    if q.numel() == 0 or v.numel() == 0:
        from statetrack.ops.delta_rule.chunked import delta_rule_chunked

        return delta_rule_chunked(q, k, v, beta, g, initial_state, cu_seqlens, options)
    if not q.dtype == k.dtype == v.dtype:
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    g = None if g is None else floor_decay(g.float())
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    inputs = q, k, v, beta, g, initial_state, cu_seqlens
    if needs_gradient(inputs):
        return _DeltaRule.apply(*inputs, options, signs)
    o, *rest = without_dispatcher(q, _forward, _forward_op)(*inputs, options, False, signs)
    return o, rest[0] if options.output_final_state else None


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, g, initial_state, cu_seqlens, options, signs):
        inputs = q, k, v, beta, g, initial_state, cu_seqlens
        o, *saved = without_dispatcher(q, _forward, _forward_op)(*inputs, options, True, signs)
        # torch.compile gives a tuple here
        final_state, saved = (saved[0], saved[1:]) if options.output_final_state else (None, saved)
        ctx.save_for_backward(*inputs, *saved)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return o, final_state

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dfinal_state):
        kept = ctx.saved_tensors  # read once: a checkpointed block computes them again to give them
        inputs, saved = kept[:7], list(kept[7:])
        q, _, v, _, g, initial_state, _ = inputs
        if dout is None:
            dout = v.new_zeros(*q.shape[:-1], v.shape[-1])
        backward = without_dispatcher(q, _backward, _backward_op)
        gradients = backward(*inputs, saved, dout, dfinal_state, ctx.options)
        return *_by_input(gradients, g, initial_state), None, None, None


def _by_input(
    gradients: list[Tensor], g: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, beta, g and the initial state: None for absent inputs."""
    dq, dk, dv, dbeta, *rest = gradients
    return dq, dk, dv, dbeta, None if g is None else rest[0], None if initial_state is None else rest[-1]


def _tables(cu_seqlens: Tensor | None, case: Case) -> tuple[Tensor, Tensor, Tensor] | None:
    """Of packed sequences: first row and number of rows of every chunk, first chunk of every sequence,
    offsets.

    Made on the GPU, without reading the offsets: chunks beyond the last have no rows.
    """
    if cu_seqlens is None:
        return None
    if case.plan.short_forward is not None:  # whose kernels read the offsets alone
        return cu_seqlens, cu_seqlens, cu_seqlens
    return chunk_tables(cu_seqlens, case.plan.C, case.householders, case.chunks)


def chunk_tables(
    cu_seqlens: Tensor | None, C: int, householders: int, chunks: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The tables for chunks of C steps, of which there are at most `chunks`."""
    if cu_seqlens is None:
        return None
    bounds = cu_seqlens.long() * householders
    per_sequence = (bounds.diff() + C - 1) // C
    last = per_sequence.cumsum(0)
    first_chunk = last - per_sequence
    chunk = torch.arange(chunks, device=cu_seqlens.device)
    sequence = torch.searchsorted(last, chunk, right=True)
    unused = sequence == last.numel()
    sequence = sequence.clamp(max=last.numel() - 1)
    within = (chunk - first_chunk[sequence]) * C
    start = torch.where(unused, 0, bounds[sequence] + within)
    rows = torch.where(unused, 0, bounds[sequence + 1] - start).clamp(max=C)
    return torch.stack([start, rows], dim=1), first_chunk, cu_seqlens


def _key(q, v, beta, g, initial_state, cu_seqlens) -> tuple:
    """All of the inputs that a call depends on: the others are contiguous, and of the same shape or dtype."""
    packed = None if cu_seqlens is None else (cu_seqlens.shape, cu_seqlens.dtype)
    state = None if initial_state is None else initial_state.dtype
    return q.shape, v.shape, q.dtype, beta.dtype, q.get_device(), g is None, state, packed


def _forward(
    q, k, v, beta, g, initial_state, cu_seqlens, options: DeltaRuleOptions, save: bool, signs=None
) -> list[Tensor]:
    """Outputs, last states if asked for, and what the backward reads."""
    q, k, v, beta = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous()
    call = _forward_call(q, k, v, beta, g, initial_state, cu_seqlens, options, save, signs)
    results = new_buffers(q, call.buffers)
    out, *saved = results
    final_state = saved.pop(0) if options.output_final_state else None
    g = beta if g is None else g.contiguous()  # not read without a gate, but a pointer it must be
    initial_state = None if initial_state is None else initial_state.contiguous()
    tables = _tables(cu_seqlens, call.case)
    call.run(q, k, v, beta, g, signs, initial_state, tables, out, final_state, saved)
    return results


def _forward_call(
    q, k, v, beta, g, initial_state, cu_seqlens, options, save, signs=None
) -> ShortForward | ChunkForward:
    """The launches of the forward for such inputs, which are contiguous."""

    def make() -> ShortForward | ChunkForward:
        inputs = q, k, v, beta, g, initial_state, cu_seqlens
        compile_ahead(lambda: _both_ways(inputs, options, save, signs))
        case = Case(q, v, g, initial_state, cu_seqlens, options, signs is not None)
        return (ChunkForward if case.plan.short_forward is None else ShortForward)(case, save)

    key = options, save, signs is None, *_key(q, v, beta, g, initial_state, cu_seqlens)
    return FORWARD_CALLS.get_or_make(key, make)


def can_repeat_inverses(saved: list[Tensor]) -> bool:
    """Whether `delta_rule_inverses` gives the first two of what the forward left for the backward.

    Not for short sequences, nor where the chunks of few sequences are joined in pairs.
    """
    return len(saved) == CHUNK_BUFFERS and saved[-1].numel() == 0


def _inverses(q, k, v, beta, g, initial_state, cu_seqlens, options: DeltaRuleOptions) -> list[Tensor]:
    """The inverse and A of every chunk once more, as the forward made them."""
    q, k, v, beta = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous()
    call = _forward_call(q, k, v, beta, g, initial_state, cu_seqlens, options, True)
    assert isinstance(call, ChunkForward)
    inverse, A, inverse_norms = new_buffers(q, call.buffers[-CHUNK_BUFFERS:][:3])
    tables = _tables(cu_seqlens, call.case)
    gate = beta if g is None else g.contiguous()
    call.prepare(q, k, beta, gate, None, inverse, A, inverse_norms, A if tables is None else tables[0])
    return [inverse, A]


def _backward(
    q, k, v, beta, g, initial_state, cu_seqlens, saved, dout, dfinal_state, options: DeltaRuleOptions
) -> list[Tensor]:
    """Gradients of q, k, v, beta, and of g and the initial state if there are any."""
    q, k, v, beta, dout = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous(), dout.contiguous()

    def make() -> ShortBackward | ChunkBackward:
        case = Case(q, v, g, initial_state, cu_seqlens, options)
        return (ChunkBackward if case.plan.short_forward is None else ShortBackward)(
            case, dfinal_state is not None
        )

    dtypes = dout.dtype, None if dfinal_state is None else dfinal_state.dtype
    key = options, dtypes, *_key(q, v, beta, g, initial_state, cu_seqlens)
    call = BACKWARD_CALLS.get_or_make(key, make)
    gradients = _new_gradients(q, k, v, beta, g, initial_state)
    gate = beta if g is None else g.contiguous()
    dfinal_state = None if dfinal_state is None else dfinal_state.contiguous()
    tables = _tables(cu_seqlens, call.case)
    call.run(q, k, beta, gate, tables, saved, dout, dfinal_state, *_by_input(gradients, g, initial_state))
    return gradients


def _both_ways(inputs: tuple, options: DeltaRuleOptions, save: bool, signs: Tensor | None) -> None:
    """All launches for these inputs: the forward's, and the backward's if one will follow."""
    out, *saved = _forward(*inputs, options, save, signs)
    if save:
        saved = saved[int(options.output_final_state) :]
        _backward(*inputs, saved, torch.empty_like(out), None, options)


def _new_gradients(q, k, v, beta, g, initial_state) -> list[Tensor]:
    """Buffers for the gradients of q, k, v, beta, and of g and the initial state if there are any."""
    inputs = q, k, v, beta, g, initial_state
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs if x is not None]


# The same as `torch.library` ops, whose options are plain scalars.


def _forward_op(*arguments: Any) -> list[Tensor]:
    *inputs, options, save, signs = arguments
    return torch.ops.statetrack.delta_rule_forward(*inputs, *options, save, signs)


def _backward_op(*arguments: Any) -> list[Tensor]:
    *tensors, options = arguments
    return torch.ops.statetrack.delta_rule_backward(*tensors, *options)


def _forward_real(*arguments: Any) -> list[Tensor]:
    *options, save, signs = arguments[7:] if len(arguments) == FORWARD_ARGUMENTS else (*arguments[7:], None)
    return _forward(*arguments[:7], DeltaRuleOptions(*options), save, signs)


def _forward_fake(*arguments: Any) -> list[Tensor]:
    q, _, v, _, g, initial_state, cu_seqlens = arguments[:7]
    *options, save = arguments[7 : FORWARD_ARGUMENTS - 1]
    return new_buffers(q, Case(q, v, g, initial_state, cu_seqlens, DeltaRuleOptions(*options)).buffers(save))


def _inverses_real(*arguments: Any) -> list[Tensor]:
    return _inverses(*arguments[:7], DeltaRuleOptions(*arguments[7:]))


def _inverses_fake(*arguments: Any) -> list[Tensor]:
    q, _, v, _, g, initial_state, cu_seqlens, *options = arguments
    case = Case(q, v, g, initial_state, cu_seqlens, DeltaRuleOptions(*options))
    return new_buffers(q, case.buffers(True)[-CHUNK_BUFFERS:][:2])


def _backward_real(*arguments: Any) -> list[Tensor]:
    return _backward(*arguments[:10], DeltaRuleOptions(*arguments[10:]))


def _backward_fake(*arguments: Any) -> list[Tensor]:
    return _new_gradients(*arguments[:6])


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, Tensor? initial_state, Tensor? cu_seqlens"
FORWARD_ARGUMENTS = 7 + len(DeltaRuleOptions._fields) + 2  # with `signs`, which a caller may leave out
register_op(
    f"delta_rule_forward({_INPUTS}, {OPTIONS_SCHEMA}, bool save, Tensor? signs=None) -> Tensor[]",
    _forward_real,
    _forward_fake,
)
register_op(
    f"delta_rule_backward({_INPUTS}, Tensor[] saved, Tensor dout, Tensor? dfinal_state, {OPTIONS_SCHEMA}) "
    "-> Tensor[]",
    _backward_real,
    _backward_fake,
)
register_op(f"delta_rule_inverses({_INPUTS}, {OPTIONS_SCHEMA}) -> Tensor[]", _inverses_real, _inverses_fake)
