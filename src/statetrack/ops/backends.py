"""The one way to pick a backend: a name, or "auto" for the fastest that serves the tensor's device.

An op declares its backends as a table of "module:function" strings. The module is imported when the backend
is first picked, so that `import statetrack` loads neither Triton nor the native library.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from statetrack.errors import UserError, unknown_name
from statetrack.ops.call_cache import CallCache, signature

# "auto" takes the first backend of this list that the op has and that can run there.
NAMES = ("auto", "reference", "chunked", "native", "triton")
PREFERENCE = {"cuda": ("triton", "chunked"), "cpu": ("native", "chunked")}
TRITON_IS_THERE = importlib.util.find_spec("triton") is not None  # looked up once: it costs 65 us


_loaded = SimpleNamespace()  # what was loaded, as attributes
_replacements: dict[str, Callable] = {}  # by op: see `replaced_op`


def load(target: str) -> Any:
    """What "module:name" names; the module is imported the first time."""
    attribute = target.replace(".", "_").replace(":", "_")
    _import(target, attribute)
    return getattr(_loaded, attribute)


def _import(target: str, attribute: str) -> bool:
    """Runs while torch.compile traces, which cannot trace an import by name."""
    if not hasattr(_loaded, attribute):
        module, _, name = target.partition(":")
        setattr(_loaded, attribute, getattr(importlib.import_module(module), name))
    return True


# What torch.compiler.assume_constant_result sets; calling that would load torch.compile with this module.
_import._dynamo_marked_constant = True  # type: ignore[attr-defined]


def no_triton(tensor: Tensor) -> str | None:
    """Why no Triton kernel can take this tensor, or None."""
    if not TRITON_IS_THERE:
        return "triton is not installed"
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the inputs are on {tensor.device}, not on a GPU"
    return None


def auto_backend() -> str:
    """What "auto" stands for by the environment variable STATETRACK_BACKEND: "auto" where it is not set."""
    name = os.environ.get("STATETRACK_BACKEND") or "auto"
    if name not in NAMES:
        raise unknown_name("STATETRACK_BACKEND", name, NAMES)
    return name


def prefers_triton(tensor: Tensor) -> bool:
    """Whether "auto" takes Triton kernels for this tensor, in the ops that have them."""
    return no_triton(tensor) is None and auto_backend() in ("auto", "triton")


def prefers_native(tensor: Tensor) -> bool:
    """Whether "auto" takes the native CPU kernels for this tensor, in the ops that have them."""
    if tensor.device.type != "cpu" or auto_backend() not in ("auto", "native"):
        return False
    return load("statetrack.ops.native.library:ABSENT") is None


def pick_backend(
    op: str,
    backend: str,
    device: torch.device,
    backends: Mapping[str, str],
    refusals: Mapping[str, Callable[[], str | None]] | None = None,
) -> Callable:
    """The function that runs `op`: `backends` maps a backend's name to "module:function".

    `refusals` maps a backend's name to a function that gives the reason why it cannot take these inputs, or
    None: "auto" then skips it, and asking for it by name is an error. The environment variable
    STATETRACK_BACKEND replaces "auto" in the ops that have a backend of that name, so a whole training run
    can be repeated on the reference without a change of code.
    """
    if backend == "auto":
        if (replacement := _replacements.get(op)) is not None:
            return replacement
        named = auto_backend()
        backend = named if named in backends else "auto"

    def refusal(name: str) -> str | None:
        return refusals[name]() if refusals and name in refusals else None

    if backend != "auto":
        if backend not in backends:
            raise unknown_name(f"{op}: backend", backend, [*backends, "auto"])
        if reason := refusal(backend):
            raise UserError(f'{op}: backend "{backend}" cannot run this: {reason}. Use backend="auto".')
        return load(backends[backend])
    for name in (*PREFERENCE.get(device.type, ("chunked",)), "reference"):
        if name in backends and not refusal(name):
            return load(backends[name])
    raise UserError(f"{op}: no backend runs on {device}; the op has {', '.join(backends)}.")


@contextmanager
def replaced_op(op: str, function: Callable) -> Iterator[None]:
    """Inside a `with` block, "auto" takes `function` for the op: how benchmarks measure what a kernel gains.

    For ops that pick their backend in every call; the recurrences remember their choice.
    """
    _replacements[op] = function
    try:
        yield
    finally:
        del _replacements[op]


def choose_once(
    choices: CallCache, options: Hashable, inputs: tuple[Tensor | None, ...], choose: Callable[[], Callable]
) -> Callable:
    """The result of `choose`, cached by `options` and by the shapes, dtypes and devices of the inputs."""
    found = signature(*inputs)
    key = None if found is None else (options, os.environ.get("STATETRACK_BACKEND"), found)
    return choices.get_or_make(key, choose)
