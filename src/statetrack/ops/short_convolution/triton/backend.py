"""The Triton backend of the short convolution: `torch.library` ops around two kernels, and their sizes."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.custom_ops import on_its_device, register_op, without_dispatcher
from statetrack.ops.partial_sums import add_up
from statetrack.ops.short_convolution.triton.kernels import (
    ALL,
    convolution_backward_kernel,
    convolution_forward_kernel,
)
from statetrack.ops.triton_runtime.compile_ahead import launch
from statetrack.ops.triton_runtime.sizes import block, processors

WIDEST = 8  # taps: each is unrolled
MOST_PARTS = 3  # convolved at once
CHANNELS = 128  # columns of a program, at most
SHORTEST = 32  # steps worth a piece of their own: it reads width - 1 more forward, twice that backward


def short_convolution_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: None,
    *,
    silu: bool,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> Tensor:
    """Same arguments and results as `short_convolution_reference`, from an empty past."""
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
    packing = (cu_seqlens, max_seqlen) if weights else (None, None)  # without weights steps do not meet
    return tuple(_run(x, list(weights), list(biases), *packing, widths[:-1], widths[-1], silu))


def refuses(x: Tensor, width: int, parts: int, state: Tensor | None) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if state is not None:
        return "it begins from a state"
    if width > WIDEST:
        return f"it is {width} wide, more than {WIDEST}"
    if parts > MOST_PARTS:
        return f"there are {parts} convolved parts, more than {MOST_PARTS}"
    if x.numel() == 0:
        return "the input is empty"
    return "float64 is not offered there" if x.dtype == torch.float64 else None


class Size(NamedTuple):
    steps: int  # that a program loads at once, as many as registers hold
    programs: int  # for every processor, as many as it runs at once


LIGHT, HEAVY = Size(8, 28), Size(4, 16)  # the backward with weights needs twice the registers of the others


def size(width: int, backward: bool) -> Size:
    """`width` is 0 without weights."""
    return HEAVY if backward and width else LIGHT


class Work(NamedTuple):
    """How the work is cut up: `items` are the pieces of all sequences, and programs share them out."""

    pieces: int  # of a sequence
    length: int  # steps of a piece
    items: int
    programs: int  # beside each other in every block of columns


def plan(B: int, T: int, blocks: int, size: Size, processors: int) -> Work:
    """Sequences are cut along time only if they and the blocks of columns leave processors idle."""
    wanted = max(1, size.programs * processors // blocks)
    pieces = max(1, min(-(-wanted // B), T // SHORTEST))
    length = -(-T // (pieces * size.steps)) * size.steps
    pieces = -(-T // length)
    return Work(pieces, length, B * pieces, min(B * pieces, wanted))


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
    """What a kernel is compiled for: rows of x lie N apart and hold M numbers; `width` is 0 without taps."""
    Q, K, V = [*widths, 0, 0][:3]
    passed = M - sum(widths) if backward else rest
    BC = min(CHANNELS, block(max(widths), 32))
    BR = min(CHANNELS, block(passed, 1))
    known = {"N": N, "Q": Q, "K": K, "V": V, "R": rest, "W": max(width, 1), "FILTERED": width > 0}
    which = ALL.value if all(silu) else sum(2**i for i, wanted in enumerate(silu) if wanted)
    known |= {"HAS_BIAS": bias, "SILU": which, "PACKED": packed, "ALIGNED": math.gcd(*widths)}
    known |= {"BC": BC, "U": size(width, backward).steps, "BR": BR, "ROWS": 1024 // BR, "num_warps": 1}
    return known | ({"M": M} if backward else {})


def _even_rows(x: Tensor) -> Tensor:
    """x itself if one number says how far its rows lie apart, else a copy."""
    evenly = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    # not `contiguous`, which keeps any stride of an axis of size one
    return x if x.stride(2) == 1 and evenly else x.clone(memory_format=torch.contiguous_format)


def _three(tensors: list[Tensor], other: Tensor) -> list[Tensor]:
    """The tensors, filled up: a kernel takes three pointers of one dtype, whether it reads them or not."""
    found = [x.contiguous() for x in tensors] or [other]
    return found + [found[-1]] * (MOST_PARTS - len(found))


def _launch(x: Tensor, weights, biases, cu_seqlens, longest, widths, rest, silu, backward: bool):
    """Constants, grid, and the numbers a kernel takes: the length of sequences, and the work."""
    (B, T, M), width, packed = x.shape, weights[0].shape[1] if weights else 0, cu_seqlens is not None
    if packed:
        B, T = len(cu_seqlens) - 1, longest
    known = constants(x.stride(1), M, widths, rest, width, len(biases) > 0, silu, packed, backward)
    passed = M - sum(widths) if backward else rest
    blocks = sum(-(-w // known["BC"]) for w in widths)
    work = plan(B, T, blocks, size(width, backward), processors(x.device))
    grid = blocks + -(-passed // known["BR"]), work.programs
    if backward:
        known["CUT"] = work.pieces > 1
    return known, grid, (T, work.pieces, work.length, work.items)


def _parts(x: Tensor, weights, biases, cu_seqlens, longest, widths: list[int], rest: int, silu):
    return [x.new_empty(*x.shape[:2], width) for width in ([*widths, rest] if rest else widths)]


@on_its_device
def _forward(
    x: Tensor, weights, biases, cu_seqlens, longest: int, widths: list[int], rest: int, silu: list[bool]
) -> list[Tensor]:
    x = _even_rows(x)
    options = cu_seqlens, longest, widths, rest, silu
    known, grid, numbers = _launch(x, weights, biases, *options, False)
    parts = _parts(x, weights, biases, *options)
    tensors = [x, *_three(weights, x), *_three(biases, x), *_three(parts[: len(widths)], x), parts[-1]]
    arguments = [*tensors, x if cu_seqlens is None else cu_seqlens.contiguous(), *numbers]
    launch(convolution_forward_kernel, grid)(*arguments, **known)
    return parts


def _results(x: Tensor, weights, biases, dparts, cu_seqlens, longest, widths: list[int], rest, silu):
    """Room for dx, and for the gradients of weights and biases one after the other."""
    per_channel = (weights[0].shape[1] if weights else 0) + (1 if biases else 0)
    return x.new_empty(x.shape), x.new_empty(sum(widths) * per_channel, dtype=torch.float32)


@on_its_device
def _backward(
    x: Tensor, weights, biases, dparts, cu_seqlens, longest: int, widths: list[int], rest: int, silu
) -> tuple[Tensor, Tensor]:
    x = _even_rows(x)
    options = cu_seqlens, longest, widths, rest, silu
    known, grid, numbers = _launch(x, weights, biases, *options, True)
    dx, total = _results(x, weights, biases, dparts, *options)
    sums = total.new_empty(grid[1], total.numel())
    tensors = [x, *_three(weights, x), *_three(biases, x), *_three(dparts[: len(widths)], x)]
    tensors += [dparts[-1].contiguous(), dx, sums]
    arguments = [*tensors, x if cu_seqlens is None else cu_seqlens.contiguous(), *numbers]
    launch(convolution_backward_kernel, grid)(*arguments, **known)
    return dx, add_up(sums, torch.float32) if total.numel() else total


class _ConvolvedSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cu_seqlens, options, taps, *parameters):
        forward = without_dispatcher(x, _forward, torch.ops.statetrack.convolved_split)
        ctx.save_for_backward(x, cu_seqlens, *parameters)
        ctx.options, ctx.taps = options, taps
        return tuple(forward(x, list(parameters[:taps]), list(parameters[taps:]), cu_seqlens, *options))

    @staticmethod
    @first_derivative_only
    def backward(ctx, *dparts):
        x, cu_seqlens, *parameters = ctx.saved_tensors
        weights, biases = parameters[: ctx.taps], parameters[ctx.taps :]
        backward = without_dispatcher(x, _backward, torch.ops.statetrack.convolved_split_backward)
        dx, total = backward(x, weights, biases, list(dparts), cu_seqlens, *ctx.options)
        found, begin = [], 0
        for parameter in parameters:
            found.append(total[begin : begin + parameter.numel()].view(parameter.shape).to(parameter.dtype))
            begin += parameter.numel()
        return dx, None, None, None, *found


def _run(x: Tensor, weights, biases, cu_seqlens, max_seqlen, widths, rest: int, silu: list[bool]):
    options = x.shape[1] if max_seqlen is None else max_seqlen, widths, rest, silu
    if needs_gradient((x, *weights, *biases)):
        return _ConvolvedSplit.apply(x, cu_seqlens, options, len(weights), *weights, *biases)
    forward = without_dispatcher(x, _forward, torch.ops.statetrack.convolved_split)
    return forward(x, weights, biases, cu_seqlens, *options)


_INPUTS = "Tensor x, Tensor[] weights, Tensor[] biases"
_OPTIONS = "Tensor? cu_seqlens, int longest, int[] widths, int rest, bool[] silu"
register_op(f"convolved_split({_INPUTS}, {_OPTIONS}) -> Tensor[]", _forward, _parts)
register_op(
    f"convolved_split_backward({_INPUTS}, Tensor[] dparts, {_OPTIONS}) -> (Tensor, Tensor)",
    _backward,
    _results,
)
