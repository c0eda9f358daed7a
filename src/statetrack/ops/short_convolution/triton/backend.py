"""The Triton backend of the short convolution: `torch.library` ops around two kernels, and their grids."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.custom_ops import on_its_device, register_op, without_dispatcher
from statetrack.ops.partial_gradients import sum_over_programs
from statetrack.ops.short_convolution.triton.kernels import (
    ALL_SILU,
    convolution_backward_kernel,
    convolution_forward_kernel,
)
from statetrack.ops.triton_runtime.compile_ahead import launch
from statetrack.ops.triton_runtime.sizes import block, processors

MAX_WIDTH = 8  # taps: the loop over them is unrolled
MAX_PARTS = 3  # convolved at once
MAX_COLUMNS = 128  # of a program
MIN_PIECE_STEPS = 32  # a piece reads width - 1 further steps forward, twice that backward


def short_convolution_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: None,
    *,
    silu: bool,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> Tensor:
    """Same arguments and results as `short_convolution_reference`, without an initial state."""
    biases = [] if bias is None else [bias]
    return _run(x, [weight], biases, cu_seqlens, max_seqlen, [x.shape[2]], 0, [silu])[0]


def convolved_split_triton(
    x: Tensor,
    widths: list[int],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    silu: list[bool],
) -> tuple[Tensor, ...]:
    """Same arguments and results as `convolved_split_reference`; the results are contiguous."""
    # without weights, steps do not depend on each other
    packing = (cu_seqlens, max_seqlen) if weights else (None, None)
    return tuple(_run(x, list(weights), list(biases), *packing, widths[:-1], widths[-1], silu))


def refuses(x: Tensor, width: int, parts: int, initial_state: Tensor | None) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if initial_state is not None:
        return "there is an initial state"
    if width > MAX_WIDTH:
        return f"it is {width} wide, more than {MAX_WIDTH}"
    if parts > MAX_PARTS:
        return f"there are {parts} convolved parts, more than {MAX_PARTS}"
    if x.numel() == 0:
        return "the input is empty"
    return "float64 is not offered there" if x.dtype == torch.float64 else None


class Size(NamedTuple):
    steps: int  # loaded at once by a program, as many as registers hold
    programs: int  # per multiprocessor, as many as it runs at once


# The backward with weights needs twice the registers of the others.
LIGHT, HEAVY = Size(8, 28), Size(4, 16)


def size(width: int, backward: bool) -> Size:
    """The size for filters of `width` taps, 0 without weights."""
    return HEAVY if backward and width else LIGHT


class Partition(NamedTuple):
    """How the work is divided: `items` are the pieces of all sequences, and programs share them."""

    pieces: int  # of a sequence
    length: int  # steps of a piece
    items: int
    programs: int  # per block of columns


@functools.lru_cache(maxsize=1024)
def partition(B: int, T: int, blocks: int, size: Size, processors: int) -> Partition:
    """Sequences are cut along time only if they and the blocks of columns leave multiprocessors idle.

    All programs run side by side, so the call lasts as long as the program with most items: a few items more
    than programs would double it.
    """
    programs = max(1, size.programs * processors // blocks)
    most = max(1, min(-(-2 * programs // B), T // MIN_PIECE_STEPS))

    def cut(pieces: int) -> Partition:
        length = -(-T // (pieces * size.steps)) * size.steps
        pieces = -(-T // length)
        return Partition(pieces, length, B * pieces, min(B * pieces, programs))

    def steps(work: Partition) -> int:
        """Of the program with most items, with the further steps that a piece reads."""
        return -(-work.items // work.programs) * (work.length + (size.steps if work.pieces > 1 else 0))

    return min((cut(pieces) for pieces in range(1, most + 1)), key=steps)


def constants(
    N: int,
    M: int,
    widths: list[int],
    rest: int,
    width: int,
    bias: bool,
    silu: list[bool],
    packed: bool,
    backward: bool,
) -> dict[str, Any]:
    """Constants of a kernel: rows of x have stride N and hold M numbers; `width` is 0 without weights."""
    Q, K, V = [*widths, 0, 0][:3]
    copied = M - sum(widths) if backward else rest
    BC = min(MAX_COLUMNS, block(max(widths), 32))
    BR = min(MAX_COLUMNS, block(copied, 1))
    constant = {"N": N, "Q": Q, "K": K, "V": V, "R": rest, "W": max(width, 1), "HAS_WEIGHT": width > 0}
    silu_mask = ALL_SILU.value if all(silu) else sum(2**i for i, has_silu in enumerate(silu) if has_silu)
    constant |= {"HAS_BIAS": bias, "SILU": silu_mask, "PACKED": packed, "ALIGNED": math.gcd(*widths)}
    constant |= {"BC": BC, "U": size(width, backward).steps, "BR": BR, "ROWS": 1024 // BR, "num_warps": 1}
    return constant | ({"M": M} if backward else {})


def _evenly_strided(x: Tensor) -> Tensor:
    """x itself if all its rows are one stride apart, else a copy."""
    evenly = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    # not `contiguous`, which keeps any stride of an axis of size one
    return x if x.stride(2) == 1 and evenly else x.clone(memory_format=torch.contiguous_format)


def _three_pointers(tensors: list[Tensor], other: Tensor) -> list[Tensor]:
    """The tensors, padded to three: a kernel takes three pointers of one dtype and may not read them all."""
    given = [x.contiguous() for x in tensors] or [other]
    return given + [given[-1]] * (MAX_PARTS - len(given))


def _launch(x: Tensor, weights, biases, cu_seqlens, max_seqlen, widths, rest, silu, backward: bool):
    """Constants, grid, and the run-time integers of a kernel: T, pieces, length and items."""
    (B, T, M), width, packed = x.shape, weights[0].shape[1] if weights else 0, cu_seqlens is not None
    if packed:
        B, T = len(cu_seqlens) - 1, max_seqlen
    constant = constants(x.stride(1), M, widths, rest, width, len(biases) > 0, silu, packed, backward)
    copied = M - sum(widths) if backward else rest
    blocks = sum(-(-w // constant["BC"]) for w in widths)
    work = partition(B, T, blocks, size(width, backward), processors(x.device))
    grid = blocks + -(-copied // constant["BR"]), work.programs
    if backward:
        constant["SPLIT"] = work.pieces > 1
    return constant, grid, (T, work.pieces, work.length, work.items)


def _empty_parts(x: Tensor, weights, biases, cu_seqlens, max_seqlen, widths: list[int], rest: int, silu):
    return [x.new_empty(*x.shape[:2], width) for width in ([*widths, rest] if rest else widths)]


@on_its_device
def _forward(
    x: Tensor, weights, biases, cu_seqlens, max_seqlen: int, widths: list[int], rest: int, silu: list[bool]
) -> list[Tensor]:
    x = _evenly_strided(x)
    options = cu_seqlens, max_seqlen, widths, rest, silu
    constant, grid, numbers = _launch(x, weights, biases, *options, False)
    parts = _empty_parts(x, weights, biases, *options)
    tensors = [
        x,
        *_three_pointers(weights, x),
        *_three_pointers(biases, x),
        *_three_pointers(parts[: len(widths)], x),
        parts[-1],
    ]
    arguments = [*tensors, x if cu_seqlens is None else cu_seqlens.contiguous(), *numbers]
    launch(convolution_forward_kernel, grid)(*arguments, **constant)
    return parts


def _empty_gradients(
    x: Tensor, weights, biases, dparts, cu_seqlens, max_seqlen, widths: list[int], rest, silu
):
    """Uninitialised dx, and the gradients of weights and biases in one vector."""
    per_channel = (weights[0].shape[1] if weights else 0) + (1 if biases else 0)
    return x.new_empty(x.shape), x.new_empty(sum(widths) * per_channel, dtype=torch.float32)


@on_its_device
def _backward(
    x: Tensor, weights, biases, dparts, cu_seqlens, max_seqlen: int, widths: list[int], rest: int, silu
) -> tuple[Tensor, Tensor]:
    x = _evenly_strided(x)
    options = cu_seqlens, max_seqlen, widths, rest, silu
    constant, grid, numbers = _launch(x, weights, biases, *options, True)
    dx, total = _empty_gradients(x, weights, biases, dparts, *options)
    partial = total.new_empty(grid[1], total.numel())
    tensors = [
        x,
        *_three_pointers(weights, x),
        *_three_pointers(biases, x),
        *_three_pointers(dparts[: len(widths)], x),
    ]
    tensors += [dparts[-1].contiguous(), dx, partial]
    arguments = [*tensors, x if cu_seqlens is None else cu_seqlens.contiguous(), *numbers]
    launch(convolution_backward_kernel, grid)(*arguments, **constant)
    return dx, sum_over_programs(partial, torch.float32) if total.numel() else total


class _ConvolvedSplit(torch.autograd.Function):
    """Autograd around the two ops; `parameters` are the weights, `weights` of them, and then the biases."""

    @staticmethod
    def forward(ctx, x, cu_seqlens, options, weights, *parameters):
        forward = without_dispatcher(x, _forward, torch.ops.statetrack.convolved_split)
        ctx.save_for_backward(x, cu_seqlens, *parameters)
        ctx.options, ctx.weights = options, weights
        return tuple(forward(x, list(parameters[:weights]), list(parameters[weights:]), cu_seqlens, *options))

    @staticmethod
    @first_derivative_only
    def backward(ctx, *dparts):
        x, cu_seqlens, *parameters = ctx.saved_tensors
        weights, biases = parameters[: ctx.weights], parameters[ctx.weights :]
        backward = without_dispatcher(x, _backward, torch.ops.statetrack.convolved_split_backward)
        dx, total = backward(x, weights, biases, list(dparts), cu_seqlens, *ctx.options)
        gradients, start = [], 0
        for parameter in parameters:
            gradient = total[start : start + parameter.numel()].view(parameter.shape)
            gradients.append(gradient.to(parameter.dtype))
            start += parameter.numel()
        return dx, None, None, None, *gradients


def _run(x: Tensor, weights, biases, cu_seqlens, max_seqlen, widths, rest: int, silu: list[bool]):
    options = x.shape[1] if max_seqlen is None else max_seqlen, widths, rest, silu
    if needs_gradient((x, *weights, *biases)):
        return _ConvolvedSplit.apply(x, cu_seqlens, options, len(weights), *weights, *biases)
    forward = without_dispatcher(x, _forward, torch.ops.statetrack.convolved_split)
    return forward(x, weights, biases, cu_seqlens, *options)


_INPUTS = "Tensor x, Tensor[] weights, Tensor[] biases"
_OPTIONS = "Tensor? cu_seqlens, int max_seqlen, int[] widths, int rest, bool[] silu"
register_op(f"convolved_split({_INPUTS}, {_OPTIONS}) -> Tensor[]", _forward, _empty_parts)
register_op(
    f"convolved_split_backward({_INPUTS}, Tensor[] dparts, {_OPTIONS}) -> (Tensor, Tensor)",
    _backward,
    _empty_gradients,
)
