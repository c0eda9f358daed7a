"""The Triton backend of the selective scan: `torch.library` ops around the kernels, and their sizes."""

import functools
import os
from typing import NamedTuple

import torch
from torch import Tensor

from statetrack.ops.derivatives import first_derivative_only, wants_gradient
from statetrack.ops.dispatch import define, direct
from statetrack.ops.selective_scan.triton_backward import (
    backward_kernel,
    backward_segment_kernel,
    reduce_kernel,
)
from statetrack.ops.selective_scan.triton_forward import forward_kernel, forward_segment_kernel, step_kernel
from statetrack.ops.selective_scan.triton_tiles import BY_CHANNEL, BY_NEITHER, BY_TIME

MOST_STATES = 256
MOST_NUMBERS = 1 << 30  # in one sequence: offsets inside it are 32-bit
MOST_SEQUENCES = 65535  # a grid's second side
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Steps and channels of a tile. The interpreter visits a tile's numbers one by one, so its tiles are small.
L, BD = (4, 8) if INTERPRETED else (16, 32)
# Programs every processor should get, of which it runs sixteen at once forward and eight backward; and the
# fewest tiles worth a segment of their own.
PROGRAMS = 16
SHORTEST = 4


class Sizes(NamedTuple):
    blocks: int  # programs beside each other, along channels
    tiles: int  # of L steps
    segments: int  # parts of time that run at once
    each: int  # tiles of a segment
    tail: int  # 1 if the last tile is half a one


def sizes(batch: int, channels: int, T: int, processors: int) -> Sizes:
    """How the work is cut up: along time only if sequences and channels leave processors idle.

    A segment costs a further half pass forward and a quarter of a pass backward.
    """
    blocks, tiles = -(-channels // BD), -(-T // L)
    segments = max(1, min(PROGRAMS * processors // (batch * blocks), tiles // SHORTEST))
    each = -(-tiles // segments)
    return Sizes(blocks, tiles, -(-tiles // each), each, int(0 < T % L <= L // 2))


@functools.lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _sizes(u: Tensor) -> Sizes:
    batch, channels, T = u.shape
    return sizes(batch, channels, T, _processors(u.device))


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
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `selective_scan_reference`; the output has the dtype of u."""
    B, C = (x[:, 0] if x.ndim == 4 else x for x in (B, C))
    if B.dtype != C.dtype:
        B, C = B.float(), C.float()
    state = None if state is None else state.float()
    inputs = (u, delta, A, B, C, D, z, delta_bias, state)
    save = wants_gradient(inputs)
    forward = direct(u, _Scan.apply if save else _forward, torch.ops.statetrack.selective_scan_forward)
    out, last, _ = forward(*inputs, delta_softplus, eigenvalues == "[-1,1]", save)
    return out, last


def refuses(u: Tensor, A: Tensor, B: Tensor, C: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if any(x.ndim == 2 or (x.ndim == 4 and x.shape[1] > 1) for x in (B, C)):
        return "B and C are constant or come in several groups"
    if A.shape[1] > MOST_STATES:
        return f"A has {A.shape[1]} states per channel, more than {MOST_STATES}"
    if u.numel() == 0:
        return "the input is empty"
    if u.shape[0] > MOST_SEQUENCES:
        return f"there are {u.shape[0]} sequences, more than {MOST_SEQUENCES}"
    if u.shape[1] * u.shape[2] > MOST_NUMBERS:
        return f"a sequence has more than {MOST_NUMBERS} numbers"
    return "float64 is not offered there" if u.dtype == torch.float64 else None


def _lies(x: Tensor) -> int:
    _, d, t = x.stride()
    return BY_CHANNEL if d == 1 else BY_TIME if t == 1 else BY_NEITHER


def _alike(x: Tensor, *others: Tensor) -> bool:
    strides = x.stride()
    return all(y.stride() == strides for y in others)


def _vectors(T: int, *tensors: Tensor) -> bool:
    """Whether eight numbers along time can be loaded at once wherever time is innermost."""
    return T % 8 == 0 and not any(x.stride(0) % 8 or x.stride(1) % 8 for x in tensors if _lies(x) == BY_TIME)


def _saved_numbers(batch: int, states: int, size: Sizes, save: bool) -> int:
    """Of the state before every tile but the first, and of what segments multiply a state by."""
    products = size.segments if size.segments > 1 else 0
    return batch * ((size.tiles - 1 if save else size.segments) + products) * states


def _forward(u, delta, A, B, C, D, z, bias, state, softplus: bool, extended: bool, save: bool):
    """Outputs, last states, and what the backward starts from."""
    (batch, channels, T), N = u.shape, A.shape[1]
    out = torch.empty_like(u)
    last = torch.empty(batch, N, channels, dtype=torch.float32, device=u.device)
    given = (D is not None, z is not None, bias is not None, state is not None)
    D, z, bias = D if given[0] else A, z if given[1] else u, bias if given[2] else A
    state = state if given[3] else last.mT
    if T == 1:
        block = 128 if N <= 16 else 32
        step_kernel[(-(-channels // block), batch)](
            u, delta, A, B, C, D, z, bias, state, out, last, channels,
            *u.stride()[:2], *delta.stride()[:2], *z.stride()[:2], *out.stride()[:2], *B.stride()[:2],
            *C.stride()[:2], *A.stride(), *state.stride(),
            N, 1 << (N - 1).bit_length(), block, *given, softplus, extended,
            num_warps=4,
        )  # fmt: skip
        return out, last.mT, last.new_empty(0)
    size = _sizes(u)
    states = N * channels
    saved = last.new_empty(_saved_numbers(batch, states, size, save))
    ends = products = saved
    full = channels % BD == 0
    whole = full and T % (L >> size.tail) == 0
    if size.segments > 1:
        products = saved[-batch * size.segments * states :]
        ends = torch.empty_like(products)
        forward_segment_kernel[(size.blocks, batch * (size.segments - 1))](
            u, delta, A, B, bias, ends, products, channels, T, size.each, size.segments,
            *u.stride(), *delta.stride(), *B.stride(), *A.stride(),
            N, BD, L, given[2], softplus, extended, full, _alike(u, delta), _vectors(T, u, delta), _lies(u),
            _lies(delta),
            num_warps=1,
        )  # fmt: skip
    forward_kernel[(size.blocks, batch * size.segments)](
        u, delta, A, B, C, D, z, bias, state, out, last, saved, ends, products,
        channels, T, size.tiles, size.each, size.segments,
        *u.stride(), *delta.stride(), *z.stride(), *out.stride(), *B.stride(), *C.stride(), *A.stride(),
        *state.stride(),
        N, BD, L, size.tail, *given, softplus, extended, size.segments > 1, save, whole,
        _alike(u, delta, z, out), _vectors(T, u, delta, z, out), _lies(u), _lies(delta), _lies(z), _lies(out),
        num_warps=1,
    )  # fmt: skip
    return out, last.mT, saved


def _forward_fake(u, delta, A, B, C, D, z, bias, state, softplus, extended, save):
    (batch, channels, T), N = u.shape, A.shape[1]
    last = torch.empty(batch, N, channels, dtype=torch.float32, device=u.device)
    numbers = 0 if T == 1 else _saved_numbers(batch, N * channels, _sizes(u), save)
    return torch.empty_like(u), last.mT, last.new_empty(numbers)


def _gradients(u, delta, A, B, C, z, size: Sizes):
    """Room for the gradients of u, delta, A, B, C, D, z, the bias and, per segment, the entering state."""
    (batch, channels, _), N = u.shape, A.shape[1]
    du = torch.empty_like(u)
    dA = torch.empty(channels, N, dtype=torch.float32, device=u.device)
    dD, dbias = dA.new_empty(channels), dA.new_empty(channels)
    # these two are written where du is, so they share its layout
    ddelta, dz = (torch.empty_like(du, dtype=x.dtype) for x in (delta, u if z is None else z))
    carry = dA.new_empty(batch, size.segments, N, channels)
    return du, ddelta, dA, torch.empty_like(B), torch.empty_like(C), dD, dz, dbias, carry


def _backward(
    u, delta, A, B, C, D, z, bias, state, saved, dout, dlast, softplus: bool, extended: bool
):  # fmt: skip
    """Gradients of u, delta, A, B, C, D, z, the bias and the first state, whether or not there were any."""
    (batch, channels, T), N = u.shape, A.shape[1]
    size = _sizes(u)
    du, ddelta, dA, dB, dC, dD, dz, dbias, carry = _gradients(u, delta, A, B, C, z, size)
    given = (D is not None, z is not None, bias is not None, state is not None, dlast is not None)
    D, z, bias = D if given[0] else A, z if given[1] else u, bias if given[2] else A
    first = carry[:, 0].mT
    state, dlast = state if given[3] else first, dlast if given[4] else first
    sums = dA.new_empty(batch * size.segments, N + 2, channels)
    dBC = dA.new_empty(size.blocks, batch, size.tiles, N, 2 * L)
    starts = products = carry
    full = channels % BD == 0
    whole = full and T % (L >> size.tail) == 0
    if size.segments > 1:
        products = saved[-carry.numel() :]
        starts = torch.empty_like(carry)
        backward_segment_kernel[(size.blocks, batch * (size.segments - 1))](
            delta, A, C, z, bias, dout, starts, products, channels, T, size.tiles, size.each, size.segments,
            *delta.stride(), *z.stride(), *dout.stride(), *C.stride(), *A.stride(),
            N, BD, L, given[1], given[2], softplus, extended, full and T % L == 0, _alike(delta, z, dout),
            _vectors(T, delta, z, dout), _lies(delta), _lies(z), _lies(dout),
            num_warps=1,
        )  # fmt: skip
    backward_kernel[(size.blocks, batch * size.segments)](
        u, delta, A, B, C, D, z, bias, state, saved, dout, dlast, du, ddelta, dz, dBC, sums, carry, starts,
        products, batch, channels, T, size.tiles, size.each, size.segments,
        *u.stride(), *delta.stride(), *z.stride(), *dout.stride(), *du.stride(), *B.stride(), *C.stride(),
        *A.stride(), *state.stride(), *dlast.stride(),
        N, BD, L, size.tail, *given, softplus, extended, size.segments > 1, whole,
        _alike(u, delta, z, dout, du), _vectors(T, u, delta, z, dout, du),
        _lies(u), _lies(delta), _lies(z), _lies(dout), _lies(du),
        num_warps=1,
    )  # fmt: skip
    rows, columns = batch * size.segments, -(-(N + 2) * channels // 32)
    reduce_kernel[(columns + batch * size.tiles,)](
        dBC, sums, dB, dC, dA, dD, dbias, size.blocks, batch, channels, T, size.tiles, rows, columns,
        *dB.stride(), *dC.stride(), N, 1 << (N - 1).bit_length(), L, 128 if rows > 32 else 32, 32,
        num_warps=4,
    )  # fmt: skip
    return du, ddelta, dA, dB, dC, dD, dz, dbias, first


def _backward_fake(u, delta, A, B, C, D, z, bias, state, saved, dout, dlast, softplus, extended):
    *gradients, carry = _gradients(u, delta, A, B, C, z, _sizes(u))
    return *gradients, carry[:, 0].mT


def _setup_context(ctx, inputs, output):
    *tensors, ctx.softplus, ctx.extended, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)


@first_derivative_only
def _backward_formula(ctx, dout, dlast, _):
    *inputs, saved = ctx.saved_tensors
    dout = torch.zeros_like(inputs[0]) if dout is None else dout
    backward = direct(dout, _backward, torch.ops.statetrack.selective_scan_backward)
    gradients = backward(*inputs, saved, dout, dlast, ctx.softplus, ctx.extended)
    kept = [None if x is None else g.to(x.dtype) for x, g in zip(inputs, gradients, strict=True)]
    return *kept, None, None, None


class _Scan(torch.autograd.Function):
    """What `register_autograd` does below, at a third of its cost per call."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(output[2])
        return output

    backward = staticmethod(_backward_formula)


_INPUTS = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, "
_INPUTS += "Tensor? D, Tensor? z, Tensor? bias, Tensor? state"
_FLAGS = "bool softplus, bool extended"
define(
    f"selective_scan_forward({_INPUTS}, {_FLAGS}, bool save) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)
define(
    f"selective_scan_backward({_INPUTS}, Tensor saved, Tensor dout, Tensor? dlast, {_FLAGS}) -> ("
    + ", ".join(["Tensor"] * 9)
    + ")",
    _backward,
    _backward_fake,
)
torch.library.register_autograd(
    "statetrack::selective_scan_forward", _backward_formula, setup_context=_setup_context
)
