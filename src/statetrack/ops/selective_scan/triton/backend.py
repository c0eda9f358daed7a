"""The Triton backend of the selective scan: two `torch.library` ops, forward and backward, and autograd.

The ops take the ten tensors of `ScanInputs` and plain booleans, as schemas of `torch.library` ask for.
"""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.call_cache import CallCache
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.selective_scan.arguments import ScanInputs, ScanOptions
from statetrack.ops.selective_scan.triton.launches import BackwardCall, DecodeCall, ForwardCall
from statetrack.ops.selective_scan.triton.plan import (
    call_key,
    is_sorted,
    partition_for,
    saved_size,
    saves_y,
    sequence_count,
)
from statetrack.ops.triton_runtime.compile_ahead import compile_ahead

MAX_STATES = 256
MAX_NUMBERS = 1 << 30  # in one sequence: offsets inside it are 32-bit
LONG = 1 << 12  # steps: those of shorter sequences would have to be half a million numbers apart
MAX_SEQUENCES = 65535  # the limit of a grid's second axis
INPUTS = len(ScanInputs._fields)
FORWARD_CALLS, BACKWARD_CALLS = CallCache(), CallCache()


def selective_scan_triton(inputs: ScanInputs, options: ScanOptions) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `selective_scan_reference`; the output has the dtype of u.

    Packed sequences need no `max_seqlen`: programs read the offsets, and buffers are indexed by step.
    """
    u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens = inputs
    B, C = B[:, 0] if B.ndim == 4 else B, C[:, 0] if C.ndim == 4 else C
    if B.dtype != C.dtype:
        B, C = B.float(), C.float()
    initial_state = None if initial_state is None else initial_state.float()
    D, delta_bias, cu_seqlens = (None if x is None else x.contiguous() for x in (D, delta_bias, cu_seqlens))
    if u.shape[2] >= LONG:
        u, delta, B, C, z = map(within_32_bits, (u, delta, B, C, z))
    tensors = (u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens)
    save = needs_gradient(tensors)
    forward = without_dispatcher(
        u, _Scan.apply if save else _forward, torch.ops.statetrack.selective_scan_forward
    )
    out, last_state, *_ = forward(*tensors, options.delta_softplus, options.signed(), save)
    return out, last_state


def within_32_bits(x: Tensor | None) -> Tensor | None:
    """x (B, ., T), or a copy where its numbers are too far apart for the kernels' offsets in a sequence."""
    if x is None or sum(s * (n - 1) for s, n in zip(x.stride()[1:], x.shape[1:], strict=True)) < 2**31:
        return x
    return x.contiguous()


def refuses(u: Tensor, A: Tensor, cu_seqlens: Tensor | None = None) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if A.shape[1] > MAX_STATES:
        return f"A has {A.shape[1]} states per channel, more than {MAX_STATES}"
    if u.numel() == 0:
        return "the input is empty"
    if (sequences := sequence_count(u, cu_seqlens)) > MAX_SEQUENCES:
        return f"there are {sequences} sequences, more than {MAX_SEQUENCES}"
    if max(u.shape[1], A.shape[1]) * u.shape[2] > MAX_NUMBERS:
        return f"a sequence has more than {MAX_NUMBERS} numbers"
    return "float64 is not offered there" if u.dtype == torch.float64 else None


def _empty_outputs(inputs: ScanInputs, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised out, last states (channels innermost), y before the gate, and the order by length."""
    u, cu_seqlens = inputs.u, inputs.cu_seqlens
    sequences, channels, N = sequence_count(u, cu_seqlens), u.shape[1], inputs.A.shape[1]
    last_state = u.new_empty_strided(
        (sequences, channels, N), (channels * N, 1, channels), dtype=torch.float32
    )
    saved_y = torch.empty_like(u) if save and saves_y(u, inputs.z, cu_seqlens) else u.new_empty(0)
    longest_first = last_state.new_empty(sequences if is_sorted(cu_seqlens) else 0, dtype=torch.int32)
    return torch.empty_like(u), last_state, saved_y, longest_first


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out and the last states; and for the backward, saved states, y before the gate, the order by length.

    Arguments: the tensors of `ScanInputs`, then delta_softplus, signed and save.
    """
    inputs, flags = ScanInputs(*arguments[:INPUTS]), arguments[INPUTS:]
    out, last_state, saved_y, longest_first = _empty_outputs(inputs, flags[2])
    key = (*flags, *call_key(inputs))
    call = FORWARD_CALLS.get_or_make(key, lambda: _make_forward(inputs, out, *flags))
    saved_states = call.run(inputs, out, last_state, saved_y, longest_first)
    return out, last_state, saved_states, saved_y, longest_first


def _make_forward(
    inputs: ScanInputs, out: Tensor, delta_softplus: bool, signed: bool, save: bool
) -> DecodeCall | ForwardCall:
    compile_ahead(lambda: _launch_all(inputs, delta_softplus, signed, save))
    if _is_decoding(inputs, save):
        return DecodeCall(inputs, out, delta_softplus, signed)
    return ForwardCall(inputs, out, delta_softplus, signed, save)


def _is_decoding(inputs: ScanInputs, save: bool) -> bool:
    return inputs.u.shape[2] == 1 and inputs.cu_seqlens is None and not save


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs, save = ScanInputs(*arguments[:INPUTS]), arguments[-1]
    out, last_state, saved_y, longest_first = _empty_outputs(inputs, save)
    size = 0 if _is_decoding(inputs, save) else saved_size(inputs.u, inputs.A, inputs.cu_seqlens, save)
    return out, last_state, last_state.new_empty(size), saved_y, longest_first


def _empty_gradients(inputs: ScanInputs, segments: int) -> tuple[Tensor, ...]:
    """Uninitialised gradients of u, delta, A, B, C, D, z, delta_bias and of the state before each segment."""
    u, delta, A, B, C, D, z, delta_bias, _, cu_seqlens = inputs
    channels, N = u.shape[1], A.shape[1]
    du = torch.empty_like(u)
    dA = torch.empty_like(A, memory_format=torch.contiguous_format)
    # the kernel writes these two in any case
    dD, ddelta_bias = ((dA if x is None else x).new_empty(channels) for x in (D, delta_bias))
    # these two are written where du is, so they share its strides
    ddelta = torch.empty_like(du, dtype=delta.dtype)
    dz = du.new_empty(0) if z is None else torch.empty_like(du, dtype=z.dtype)
    dstate = dA.new_empty(sequence_count(u, cu_seqlens), segments, N, channels, dtype=torch.float32)
    return du, ddelta, dA, torch.empty_like(B), torch.empty_like(C), dD, dz, ddelta_bias, dstate


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of u, delta, A, B, C, D, z, delta_bias and initial_state, whether or not these were given.

    Arguments: the tensors of `ScanInputs`, saved_states, saved_y, longest_first, dout, dlast_state, then
    delta_softplus and signed.
    """
    inputs = ScanInputs(*arguments[:INPUTS])
    *saved, dout, dlast_state, delta_softplus, signed = arguments[INPUTS:]
    key = (delta_softplus, signed, *call_key(inputs, dout, dlast_state))
    call = BACKWARD_CALLS.get_or_make(
        key, lambda: BackwardCall(inputs, dout, dlast_state, delta_softplus, signed)
    )
    gradients = _empty_gradients(inputs, call.segments)
    call.run(inputs, saved, gradients, dout, dlast_state)
    return *gradients[:-1], _first_segment(gradients[-1], inputs.initial_state)


def _launch_all(inputs: ScanInputs, delta_softplus: bool, signed: bool, save: bool) -> None:
    """All launches for these inputs: the forward's, and the backward's if one will follow."""
    out, _, *saved = _forward(*inputs, delta_softplus, signed, save)
    if save:
        _backward(*inputs, *saved, torch.empty_like(out), None, delta_softplus, signed)


def _first_segment(dstate: Tensor, initial_state: Tensor | None) -> Tensor:
    """The gradient of initial_state: that of the state entering the first segment. All if none was given."""
    return dstate if initial_state is None else dstate[:, 0].mT


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    inputs = ScanInputs(*arguments[:INPUTS])
    segments = partition_for(inputs.u, inputs.cu_seqlens).segments
    *gradients, dstate = _empty_gradients(inputs, segments)
    return *gradients, _first_segment(dstate, inputs.initial_state)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.delta_softplus, ctx.signed, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)


@first_derivative_only
def _backward_formula(ctx, dout, dlast_state, *_saved):
    tensors = ctx.saved_tensors
    inputs = tensors[:INPUTS]
    dout = torch.zeros_like(inputs[0]) if dout is None else dout
    backward = without_dispatcher(dout, _backward, torch.ops.statetrack.selective_scan_backward)
    gradients = backward(*tensors, dout, dlast_state, ctx.delta_softplus, ctx.signed)
    given = [None if x is None else dx for x, dx in zip(inputs[:-1], gradients, strict=True)]
    return *given, None, None, None, None  # none for cu_seqlens and the three booleans


class _Scan(torch.autograd.Function):
    """What `register_autograd` does below, at a third of its cost per call."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output[:2]

    backward = staticmethod(_backward_formula)


_INPUTS = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, "
_INPUTS += "Tensor? D, Tensor? z, Tensor? delta_bias, Tensor? initial_state, Tensor? cu_seqlens"
_SAVED = "Tensor saved_states, Tensor saved_y, Tensor longest_first"
_OPTIONS = "bool delta_softplus, bool signed"
register_op(
    f"selective_scan_forward({_INPUTS}, {_OPTIONS}, bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)
register_op(
    f"selective_scan_backward({_INPUTS}, {_SAVED}, Tensor dout, Tensor? dlast_state, {_OPTIONS}) -> ("
    + ", ".join(["Tensor"] * 9)
    + ")",
    _backward,
    _backward_fake,
)
torch.library.register_autograd(
    "statetrack::selective_scan_forward", _backward_formula, setup_context=_setup_context
)
