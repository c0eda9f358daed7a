"""The Triton backend of the selective scan: two `torch.library` ops, forward and backward."""

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.call_cache import CallCache
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.selective_scan.triton.launches import BackwardCall, ForwardCall, StepCall
from statetrack.ops.selective_scan.triton.plan import (
    Inputs,
    is_ordered,
    keeps_ungated,
    layout,
    saved_numbers,
    sequences,
    sizes_for,
)
from statetrack.ops.triton_runtime.compile_ahead import compile_ahead

MOST_STATES = 256
MOST_NUMBERS = 1 << 30  # in one sequence: offsets inside it are 32-bit
MOST_SEQUENCES = 65535  # a grid's second side
FORWARD_CALLS, BACKWARD_CALLS = CallCache(), CallCache()


def selective_scan_triton(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    state: Tensor | None,
    *,
    delta_softplus: bool,
    eigenvalues: str,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `selective_scan_reference`; the output has the dtype of u.

    Packed sequences need no bound on their length: programs read the offsets, and buffers lie by step.
    """
    B, C = B[:, 0] if B.ndim == 4 else B, C[:, 0] if C.ndim == 4 else C
    if B.dtype != C.dtype:
        B, C = B.float(), C.float()
    state = None if state is None else state.float()
    D, delta_bias, cu_seqlens = (None if x is None else x.contiguous() for x in (D, delta_bias, cu_seqlens))
    inputs = (u, delta, A, B, C, D, z, delta_bias, state, cu_seqlens)
    save = needs_gradient(inputs)
    forward = without_dispatcher(
        u, _Scan.apply if save else _forward, torch.ops.statetrack.selective_scan_forward
    )
    out, last, *_ = forward(*inputs, delta_softplus, eigenvalues == "[-1,1]", save)
    return out, last


def refuses(u: Tensor, A: Tensor, cu_seqlens: Tensor | None = None) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if A.shape[1] > MOST_STATES:
        return f"A has {A.shape[1]} states per channel, more than {MOST_STATES}"
    if u.numel() == 0:
        return "the input is empty"
    if (number := sequences(u, cu_seqlens)) > MOST_SEQUENCES:
        return f"there are {number} sequences, more than {MOST_SEQUENCES}"
    if u.shape[1] * u.shape[2] > MOST_NUMBERS:
        return f"a sequence has more than {MOST_NUMBERS} numbers"
    return "float64 is not offered there" if u.dtype == torch.float64 else None


def _results(
    u: Tensor, A: Tensor, z: Tensor | None, cu_seqlens: Tensor | None, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for outputs, last states with neighbouring channels, outputs before the gate, and the order."""
    number, channels, N = sequences(u, cu_seqlens), u.shape[1], A.shape[1]
    last = u.new_empty_strided((number, channels, N), (channels * N, 1, channels), dtype=torch.float32)
    ungated = torch.empty_like(u) if save and keeps_ungated(u, z, cu_seqlens) else u.new_empty(0)
    order = last.new_empty(number if is_ordered(cu_seqlens) else 0, dtype=torch.int32)
    return torch.empty_like(u), last, ungated, order


def _forward(u, delta, A, B, C, D, z, bias, state, cu_seqlens, softplus: bool, extended: bool, save: bool):
    """Outputs, last states, and what the backward needs: states, outputs before the gate, and the order."""
    inputs = (u, delta, A, B, C, D, z, bias, state, cu_seqlens)
    out, last, ungated, order = _results(u, A, z, cu_seqlens, save)
    key = (softplus, extended, save, *layout(inputs))
    call = FORWARD_CALLS.get_or_make(key, lambda: _make_forward(inputs, out, softplus, extended, save))
    return out, last, call.run(inputs, out, last, ungated, order), ungated, order


def _make_forward(inputs, out: Tensor, softplus: bool, extended: bool, save: bool) -> StepCall | ForwardCall:
    compile_ahead(lambda: _both_ways(inputs, save, softplus=softplus, extended=extended))
    if out.shape[2] == 1 and inputs[-1] is None and not save:
        return StepCall(inputs, out, softplus, extended)
    return ForwardCall(inputs, out, softplus, extended, save)


def _forward_fake(u, delta, A, B, C, D, z, bias, state, cu_seqlens, softplus, extended, save):
    out, last, ungated, order = _results(u, A, z, cu_seqlens, save)
    one_step = u.shape[2] == 1 and cu_seqlens is None and not save
    numbers = 0 if one_step else saved_numbers(u, A, cu_seqlens, save)
    return out, last, last.new_empty(numbers), ungated, order


def _gradients(u, delta, A, B, C, D, z, bias, cu_seqlens, segments: int):
    """Room for the gradients of u, delta, A, B, C, D, z, the bias and, per segment, the entering state."""
    channels, N = u.shape[1], A.shape[1]
    du = torch.empty_like(u)
    dA = torch.empty_like(A, memory_format=torch.contiguous_format)
    # the kernel writes these two in any case
    dD, dbias = ((dA if x is None else x).new_empty(channels) for x in (D, bias))
    # these two are written where du is, so they share its layout
    ddelta = torch.empty_like(du, dtype=delta.dtype)
    dz = du.new_empty(0) if z is None else torch.empty_like(du, dtype=z.dtype)
    carry = dA.new_empty(sequences(u, cu_seqlens), segments, N, channels, dtype=torch.float32)
    return du, ddelta, dA, torch.empty_like(B), torch.empty_like(C), dD, dz, dbias, carry


def _backward(
    u, delta, A, B, C, D, z, bias, state, cu_seqlens, saved, ungated, order, dout, dlast,
    softplus: bool, extended: bool,
):  # fmt: skip
    """Gradients of u, delta, A, B, C, D, z, the bias and the first state, whether or not there were any."""
    inputs = (u, delta, A, B, C, D, z, bias, state, cu_seqlens)
    key = (softplus, extended, *layout((*inputs, dout, dlast)))
    call = BACKWARD_CALLS.get_or_make(key, lambda: BackwardCall(inputs, dout, dlast, softplus, extended))
    gradients = _gradients(u, delta, A, B, C, D, z, bias, cu_seqlens, call.number)
    call.run(inputs, (saved, ungated, order), gradients, dout, dlast)
    return *gradients[:-1], _first_of(gradients[-1], state)


def _both_ways(inputs: Inputs, save: bool, **flags: bool) -> None:
    """All launches for these inputs: the forward's, and the backward's if one will follow."""
    out, _, saved, ungated, order = _forward(*inputs, **flags, save=save)
    if save:
        dout = torch.empty_like(out)
        _backward(*inputs, **flags, saved=saved, ungated=ungated, order=order, dout=dout, dlast=None)


def _first_of(carry: Tensor, state: Tensor | None) -> Tensor:
    """The gradient of the first state, among those of the states that enter segments; or all, without one."""
    return carry if state is None else carry[:, 0].mT


def _backward_fake(
    u, delta, A, B, C, D, z, bias, state, cu_seqlens, saved, ungated, order, dout, dlast, softplus, extended
):
    segments = sizes_for(u, cu_seqlens).segments
    *gradients, carry = _gradients(u, delta, A, B, C, D, z, bias, cu_seqlens, segments)
    return *gradients, _first_of(carry, state)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.softplus, ctx.extended, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)


@first_derivative_only
def _backward_formula(ctx, dout, dlast, _saved=None, _ungated=None, _order=None):
    *inputs, saved, ungated, order = ctx.saved_tensors
    dout = torch.zeros_like(inputs[0]) if dout is None else dout
    backward = without_dispatcher(dout, _backward, torch.ops.statetrack.selective_scan_backward)
    gradients = backward(*inputs, saved, ungated, order, dout, dlast, ctx.softplus, ctx.extended)
    given = [None if x is None else dx for x, dx in zip(inputs[:-1], gradients, strict=True)]
    return *given, None, None, None, None


class _Scan(torch.autograd.Function):
    """What `register_autograd` does below, at a third of its cost per call."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output[:2]

    backward = staticmethod(_backward_formula)


_INPUTS = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, "
_INPUTS += "Tensor? D, Tensor? z, Tensor? bias, Tensor? state, Tensor? cu_seqlens"
_KEPT = "Tensor saved, Tensor ungated, Tensor order"
_FLAGS = "bool softplus, bool extended"
register_op(
    f"selective_scan_forward({_INPUTS}, {_FLAGS}, bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)
register_op(
    f"selective_scan_backward({_INPUTS}, {_KEPT}, Tensor dout, Tensor? dlast, {_FLAGS}) -> ("
    + ", ".join(["Tensor"] * 9)
    + ")",
    _backward,
    _backward_fake,
)
torch.library.register_autograd(
    "statetrack::selective_scan_forward", _backward_formula, setup_context=_setup_context
)
