"""The native CPU backend of the selective scan: `torch.library` ops around the C++ kernels of ops/native."""

import math
from typing import Any

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.native import library
from statetrack.ops.selective_scan.arguments import ScanInputs, ScanOptions
from statetrack.ops.selective_scan.pad_packed import scan_packed_by_padding

# Steps between saved states: at least the states per channel, so that they are no more numbers than u.
STEPS = 32
NARROWEST = 16  # channels of a group: the kernels run a group at a time, in vectors of 16
# Channels one thread works on together; fewer if there are few sequences, so that every thread has some.
GROUP, FEW_SEQUENCES, SMALL_GROUP = 256, 8, 64


def selective_scan_native(inputs: ScanInputs, options: ScanOptions) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `selective_scan_reference`, in float32 whatever the inputs."""
    u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens = inputs
    if cu_seqlens is not None:
        return scan_packed_by_padding(selective_scan_native, inputs, options)
    groups = math.lcm(*(x.shape[1] for x in (B, C) if x.ndim == 4))
    if groups > 1:
        return _group_by_group(inputs, options, groups)
    B, C = B[:, 0] if B.ndim == 4 else B, C[:, 0] if C.ndim == 4 else C
    tensors = [
        x if x is None or x.dtype == torch.float32 else x.float()
        for x in (u, delta, A, B, C, D, z, delta_bias, initial_state)
    ]
    return _Native.apply(*tensors, options.delta_softplus, options.signed(), needs_gradient(tensors))


def _group_by_group(inputs: ScanInputs, options: ScanOptions, groups: int) -> tuple[Tensor, Tensor]:
    """Channels that share B and C are a scan of their own."""
    width = inputs.u.shape[1] // groups

    def of(x: Tensor | None, axis: int, group: int) -> Any:
        return None if x is None else x.narrow(axis, group * width, width)

    def shared(x: Tensor, group: int) -> Tensor:
        return x[:, group * x.shape[1] // groups] if x.ndim == 4 else x

    results = []
    for i in range(groups):
        u, delta, z, h = (of(x, 1, i) for x in (inputs.u, inputs.delta, inputs.z, inputs.initial_state))
        A, D, bias = (of(x, 0, i) for x in (inputs.A, inputs.D, inputs.delta_bias))
        part = ScanInputs(u, delta, A, shared(inputs.B, i), shared(inputs.C, i), D, z, bias, h)
        results.append(selective_scan_native(part, options))
    out, states = zip(*results, strict=True)
    return torch.cat(out, dim=1), torch.cat(states, dim=1)


def refuses(u: Tensor, A: Tensor, B: Tensor, C: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if B.ndim == 2 or C.ndim == 2:
        return "B or C is constant in time"
    groups = math.lcm(*(x.shape[1] for x in (B, C) if x.ndim == 4))
    if groups > 1 and u.shape[1] < NARROWEST * groups:
        return f"groups have {u.shape[1] // groups} channels, fewer than {NARROWEST}"
    if u.device.type != "cpu":
        return f"the inputs are on {u.device}, not on a CPU"
    if u.dtype == torch.float64:
        return "float64 is not offered there"
    if u.numel() == 0 or A.shape[1] == 0:
        return "the input is empty"
    return library.ABSENT


def _chunk_steps(N: int) -> int:
    """Steps of a chunk: a multiple of STEPS, at least N."""
    return -(-N // STEPS) * STEPS


def _channel_group(batch: int) -> int:
    """Channels one thread works on together."""
    return GROUP if batch >= FEW_SEQUENCES else SMALL_GROUP


def _empty_states(u: Tensor, A: Tensor, save: bool) -> Tensor:
    """Uninitialised states before every chunk, (batch, chunks, N, padded channels); none unless `save`."""
    (batch, channels, T), N = u.shape, A.shape[1]
    shape = (batch, -(-T // _chunk_steps(N)), N, -(-channels // 16) * 16) if save else (0, 0, 0, 0)
    return torch.empty(shape, dtype=torch.float32, device=u.device)


def _sizes(u: Tensor, N: int, delta_softplus: bool, signed: bool) -> tuple[int, ...]:
    """The first fields of `Scan` in native/arguments.h."""
    batch, channels, T = u.shape
    threads = library.threads(8 * u.numel() * N)
    return batch, channels, T, N, _chunk_steps(N), _channel_group(batch), delta_softplus, signed, threads


NULL = (0, 0, 0, 0)  # address and strides of a tensor that is not given


def _forward(
    u, delta, A, B, C, D, z, delta_bias, initial_state, delta_softplus: bool, signed: bool, save: bool
):
    """Outputs, last states, and the states saved for the backward (none unless `save`)."""
    N = A.shape[1]
    out, saved_states = torch.empty_like(u), _empty_states(u, A, save)
    last_state = u.new_empty(u.shape[0], u.shape[1], N)
    A, D, delta_bias, initial_state = (
        None if x is None else x.contiguous() for x in (A, D, delta_bias, initial_state)
    )
    library.expect_writes(out, saved_states)
    at, strided = library.address, library.strided
    library.CALL["scan_forward"](
        library.SCAN.pack(
            *_sizes(u, N, delta_softplus, signed),
            *strided(u), *strided(delta), *strided(z), *NULL, *strided(B), *strided(C),
            at(A), at(D), at(delta_bias), at(initial_state), *strided(out), at(last_state),
            at(saved_states) if save else 0, *(0,) * 11,
        )
    )  # fmt: skip
    return out, last_state, saved_states


def _backward(
    u, delta, A, B, C, D, z, delta_bias, saved_states, dout, dlast_state, delta_softplus: bool, signed: bool
):
    """Gradients of u, delta, A, B, C, D, z, delta_bias and initial_state, whether or not these were given."""
    (batch, channels, T), N = u.shape, A.shape[1]
    gradients = _empty_gradients(u, A, z)
    A, D, delta_bias, dlast_state = (
        None if x is None else x.contiguous() for x in (A, D, delta_bias, dlast_state)
    )
    du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dstate = gradients
    padded, groups = -(-channels // 16) * 16, -(-channels // _channel_group(batch))
    sums = batch * (N + 2) * padded + (2 * batch * groups * T * N if groups > 1 else 0)
    partial = u.new_empty(sums)
    library.expect_writes(du, ddelta, dz, partial)
    at, strided = library.address, library.strided
    library.CALL["scan_backward"](
        library.SCAN.pack(
            *_sizes(u, N, delta_softplus, signed),
            *strided(u), *strided(delta), *strided(z), *strided(dout), *strided(B), *strided(C),
            at(A), at(D), at(delta_bias), 0, *strided(du), 0, at(saved_states), at(dlast_state),
            *map(at, (du, ddelta, dz, dA, dB, dC, dD, ddelta_bias, dstate, partial)),
        )
    )  # fmt: skip
    return gradients


def _empty_gradients(u: Tensor, A: Tensor, z: Tensor | None) -> list[Tensor]:
    """Uninitialised gradients. du, ddelta and dz share the layout of the output; dB and dC are time-first."""
    (batch, channels, T), N = u.shape, A.shape[1]
    du, ddelta = torch.empty_like(u), torch.empty_like(u)
    dz = u.new_empty(0) if z is None else torch.empty_like(u)
    dB, dC = (u.new_empty(batch, T, N).mT for _ in range(2))
    dA, dD, ddelta_bias = u.new_empty(channels, N), u.new_empty(channels), u.new_empty(channels)
    return [du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, u.new_empty(batch, channels, N)]


class _Native(torch.autograd.Function):
    """Autograd around the two ops. `torch.library.register_autograd` takes three times as long per call."""

    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, z, delta_bias, initial_state, delta_softplus, signed, save):
        forward = without_dispatcher(u, _forward, scan_forward)
        out, last_state, saved_states = forward(
            u, delta, A, B, C, D, z, delta_bias, initial_state, delta_softplus, signed, save
        )
        ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, saved_states)
        ctx.options, ctx.has_state = (delta_softplus, signed), initial_state is not None
        ctx.set_materialize_grads(False)
        return out, last_state

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dlast_state):
        u, delta, A, B, C, D, z, delta_bias, saved_states = ctx.saved_tensors
        dout = torch.zeros_like(u) if dout is None else dout
        backward = without_dispatcher(u, _backward, scan_backward)
        du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dstate = backward(
            u, delta, A, B, C, D, z, delta_bias, saved_states, dout, dlast_state, *ctx.options
        )
        dD, dz, ddelta_bias = (
            g if x is not None else None for g, x in ((dD, D), (dz, z), (ddelta_bias, delta_bias))
        )
        dstate = dstate if ctx.has_state else None
        return du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dstate, None, None, None


def _forward_fake(u, delta, A, B, C, D, z, delta_bias, initial_state, delta_softplus, signed, save):
    return torch.empty_like(u), u.new_empty(u.shape[0], u.shape[1], A.shape[1]), _empty_states(u, A, save)


def _backward_fake(
    u, delta, A, B, C, D, z, delta_bias, saved_states, dout, dlast_state, delta_softplus, signed
):
    return _empty_gradients(u, A, z)


INPUTS = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias"
register_op(
    f"native_scan_forward({INPUTS}, Tensor? initial_state, bool delta_softplus, bool signed, bool save) "
    "-> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    devices=("CPU",),
)
register_op(
    f"native_scan_backward({INPUTS}, Tensor saved_states, Tensor dout, Tensor? dlast_state, "
    "bool delta_softplus, bool signed) -> Tensor[]",
    _backward,
    _backward_fake,
    devices=("CPU",),
)
scan_forward = torch.ops.statetrack.native_scan_forward.default
scan_backward = torch.ops.statetrack.native_scan_backward.default
