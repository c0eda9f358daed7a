"""Custom ops for torch.compile, and the direct call that avoids the dispatcher's overhead."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def without_dispatcher(x: Tensor, function: Callable[..., Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for a plain tensor, the `torch.library` op around it for torch.compile and fake tensors.

    The dispatcher takes 15 us of a call that is little more than an allocation and a launch.
    """
    plain = type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    return function if plain else op


_LIBRARY = torch.library.Library("statetrack", "FRAGMENT")


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the GPU of its first argument as the current one: Triton launches on that."""

    @functools.wraps(function)
    def run(x: Tensor, *rest: Any) -> Any:
        if x.is_cuda and x.device.index != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                return function(x, *rest)
        return function(x, *rest)

    return run


def register_op(
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    devices: tuple[str, ...] = ("CUDA", "CPU"),
) -> None:
    """Make `function` the op statetrack::<name in the schema>; `fake` gives its results without numbers.

    At the lowest level `torch.library` offers: `custom_op` costs several times as much per call. A CPU serves
    Triton's interpreter.
    """
    name, function = schema.partition("(")[0], on_its_device(function)
    _LIBRARY.define(schema)
    for device in devices:
        _LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"statetrack::{name}", fake, lib=_LIBRARY)
