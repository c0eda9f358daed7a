"""Checks on the inputs of an op. Shapes are always checked; values, which cost a sync, in checked mode."""

import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from statetrack.errors import UserError

EIGENVALUES = ("[0,1]", "[-1,1]")
DISC = (*EIGENVALUES, "unit-circle")  # the ranges of mixers that can turn pairs of channels

_checked: ContextVar[bool | None] = ContextVar("statetrack_checked", default=None)


@contextmanager
def checked(on: bool = True) -> Iterator[None]:
    """Within this block every op also checks values: beta in [0, 2], no decay above one, nothing NaN.

        with statetrack.checked():
            o, S = delta_rule(q, k, v, beta)        a UserError that names the first bad value and its step

    The environment variable STATETRACK_CHECKED=1 does the same for a whole program. On a GPU every check
    waits for the device.
    """
    token = _checked.set(on)
    try:
        yield
    finally:
        _checked.reset(token)


def is_checked() -> bool:
    """Whether values are checked: set by `checked()`, else by the environment variable STATETRACK_CHECKED.

    Never in code that torch.compile traces: looking at values would cut its graph in two.
    """
    if torch.compiler.is_compiling():
        return False
    on = _checked.get()
    return os.environ.get("STATETRACK_CHECKED", "0") not in ("", "0") if on is None else on


def can_look(tensor: Tensor) -> bool:
    """Whether numbers can be read at once: without waiting for a GPU, and not while something traces."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    if not plain or torch.compiler.is_compiling():
        return False
    return not is_functorch_wrapped_tensor(tensor)


def check_shape(
    op: str, name: str, tensor: Tensor, expected: tuple[int, ...], meaning: str, hint: str = ""
) -> None:
    """Refuse a tensor of another shape, naming both shapes and what the axes mean."""
    if tuple(tensor.shape) != expected:
        raise UserError(
            f"{op}: {name} has shape {tuple(tensor.shape)}, expected {meaning} = {expected}."
            f"{hint and ' ' + hint}"
        )


def check_heads(op: str, q: Tensor, v: Tensor, hint: str) -> None:
    """Refuse q and v that are not (batch, time, heads, width), or that have no heads or no key channels."""
    if q.ndim != 4 or v.ndim != 4:
        raise UserError(
            f"{op}: q has shape {tuple(q.shape)} and v {tuple(v.shape)}, expected four axes "
            f"(batch, time, heads, width). {hint}"
        )
    if 0 in q.shape[2:]:
        raise UserError(f"{op}: q has shape {tuple(q.shape)}, expected at least one head and one channel.")


def require_tensors(op: str, **tensors: Any) -> None:
    """Refuse what is no tensor, None too."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise UserError(f"{op}: {name} is a {type(x).__name__}, expected a tensor.")


def check_tensors(op: str, **tensors: Any) -> None:
    """Refuse what is no tensor; None stands for an argument that was left out."""
    require_tensors(op, **{name: x for name, x in tensors.items() if x is not None})


def check_flags(op: str, **flags: Any) -> None:
    """Refuse what is neither True nor False, nor 1 or 0 in their place."""
    for name, flag in flags.items():
        if not isinstance(flag, int):
            raise UserError(f"{op}: {name} is {flag!r}, expected True or False.")


def check_cell(op: str, cell: Any, like: Tensor, **shapes: tuple[int, ...]) -> list[Tensor] | None:
    """The tensors of a carried state in the dtype of the recurrence; refuse other parts, shapes and devices.

    A state of batch 1 is refused for a larger batch: it would be broadcast without a word.
    """
    if cell is None:
        return None
    if not isinstance(cell, tuple) or len(cell) != len(shapes):
        raise UserError(
            f"{op}: initial_state is a {type(cell).__name__}, expected the {', '.join(shapes)} that an "
            "earlier call returned."
        )
    parts = {f"initial_state.{name}": x for name, x in zip(shapes, cell, strict=True)}
    check_tensors(op, **parts)
    check_floating(op, like.device, **parts)
    for (name, x), shape in zip(parts.items(), shapes.values(), strict=True):
        check_shape(op, name, x, shape, "one state for every sequence of the batch,")
    dtype = torch.promote_types(like.dtype, torch.float32)
    return [x.to(dtype) for x in cell]


def check_scale(op: str, scale: Any) -> None:
    """Refuse a scale of the outputs that is no finite number; None stands for the default, K^-1/2."""
    if scale is not None and not (isinstance(scale, Real) and math.isfinite(scale)):
        raise UserError(f"{op}: scale is {scale!r}, expected a finite number, or None for K^-1/2.")


def check_floating(op: str, device: torch.device, **tensors: Tensor | None) -> None:
    """Refuse integer tensors and tensors that live on another device than the first one."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise UserError(f"{op}: {name} is {tensor.dtype}, expected a floating-point tensor.")
        if tensor.device != device:
            raise UserError(f"{op}: {name} is on {tensor.device}, the other inputs are on {device}.")


def check_packing(op: str, cu_seqlens: Any, batch: int, device: torch.device) -> int:
    """Refuse offsets of packed sequences that cannot be any, whatever their values; how many sequences."""
    if not isinstance(cu_seqlens, Tensor):
        raise UserError(f"{op}: cu_seqlens is a {type(cu_seqlens).__name__}, expected a tensor.")
    if batch != 1:
        raise UserError(
            f"{op}: packed sequences (cu_seqlens) need batch 1, got {batch}. Flatten them into one row."
        )
    whole = cu_seqlens.dtype in (torch.int32, torch.int64)
    if cu_seqlens.ndim != 1 or not whole or cu_seqlens.numel() < 2 or cu_seqlens.device != device:
        raise UserError(
            f"{op}: cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype} on "
            f"{cu_seqlens.device}, expected a vector of at least two offsets in int32 or int64, such as "
            f"[0, 3, 7], on {device}."
        )
    return cu_seqlens.numel() - 1


def check_offsets(op: str, cu_seqlens: Tensor | None, max_seqlen: int | None, T: int) -> None:
    """Refuse offsets that do not rise from 0 to T, or by more than `max_seqlen`; and a stray `max_seqlen`.

    Values are looked at on a CPU and in checked mode only: a GPU would have to be waited for.
    """
    if max_seqlen is not None:
        whole = isinstance(max_seqlen, int) and max_seqlen >= min(T, 1)
        if cu_seqlens is None or not whole:
            raise UserError(
                f"{op}: max_seqlen is {max_seqlen!r}, expected a whole number of at least 1, and only with "
                "cu_seqlens."
            )
    if cu_seqlens is None or torch.compiler.is_compiling():
        return
    if cu_seqlens.device.type == "cpu" or is_checked():
        bounds = cu_seqlens.tolist()
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
        if bounds[0] != 0 or bounds[-1] != T or min(lengths) < 0:
            raise UserError(f"{op}: cu_seqlens is {bounds}, expected offsets that rise from 0 to time = {T}.")
        if max_seqlen is not None and max(lengths) > max_seqlen:
            raise UserError(
                f"{op}: a sequence has {max(lengths)} steps, more than max_seqlen = {max_seqlen}."
            )


def check_range(op: str, name: str, tensor: Tensor, low: float, high: float, hint: str = "") -> None:
    """In checked mode, refuse values outside [low, high] and NaN, naming the first offender."""
    bad = ~((tensor >= low) & (tensor <= high))
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise UserError(
            f"{op}: {name}[{', '.join(map(str, where))}] = {tensor[where].item():.6g} is outside "
            f"[{low:g}, {high:g}] ({int(bad.sum())} of {tensor.numel()} values).{hint and ' ' + hint}"
        )


def check_finite(op: str, *, time: int | None = None, **tensors: Tensor | None) -> None:
    """In checked mode, refuse NaN and infinity, naming the first offender: the earliest along axis `time`."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        bad = ~torch.isfinite(tensor)
        if bad.any():
            places = bad.nonzero()
            earliest = 0 if time is None else int(places[:, time].argmin())
            where = tuple(places[earliest].tolist())
            step = "" if time is None else f" (step {where[time]} is the first)"
            raise UserError(
                f"{op}: {name} holds NaN or infinity: {name}[{', '.join(map(str, where))}] = "
                f"{tensor[where].item()}{step}, {len(places)} of {tensor.numel()} values."
            )


def check_eigenvalues(where: str, eigenvalues: str, ranges: tuple[str, ...] = EIGENVALUES) -> None:
    """Refuse anything but these ranges: the two that the paper compares, unless a mixer has more."""
    if eigenvalues not in ranges:
        names = [f'"{name}"' for name in ranges]
        raise UserError(
            f"{where}: eigenvalues is {eigenvalues!r}, expected {', '.join(names[:-1])} or {names[-1]}, "
            "quoted in a shell."
        )
