"""The one way to pick a backend: a name, or "auto" for the fastest that serves the tensor's device."""

import importlib.util
import os
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

from statetrack.errors import UserError, unknown_name
from statetrack.ops.call_cache import CallCache, signature

# "auto" takes the first backend of this list that the op has and that can run there.
NAMES = ("auto", "reference", "chunked", "native", "triton")
PREFERENCE = {"cuda": ("triton", "chunked"), "cpu": ("native", "chunked")}


TRITON_IS_THERE = importlib.util.find_spec("triton") is not None  # looked up once: it costs 65 us


def no_triton(tensor: Tensor) -> str | None:
    """Why no Triton kernel can take this tensor, or None."""
    if not TRITON_IS_THERE:
        return "triton is not installed"
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the inputs are on {tensor.device}, not on a GPU"
    return None


def prefers_triton(tensor: Tensor) -> bool:
    """Whether "auto" takes Triton kernels for this tensor, in the ops that have them."""
    return no_triton(tensor) is None and os.environ.get("STATETRACK_BACKEND", "auto") in ("auto", "triton")


def pick_backend(
    op: str,
    backend: str,
    device: torch.device,
    loaders: Mapping[str, Callable],
    refusals: Mapping[str, Callable[[], str | None]] | None = None,
) -> Callable:
    """The function that runs `op`: `loaders` maps a backend's name to a function that imports it.

    `refusals` maps a backend's name to a function that says why it cannot take these inputs, or None: "auto"
    then passes it over, and asking for it by name is an error. The environment variable STATETRACK_BACKEND
    replaces "auto" in the ops that have a backend of that name, so that a whole training run can be repeated
    on the reference without touching code.
    """
    if backend == "auto":
        backend = os.environ.get("STATETRACK_BACKEND", "auto")
        if backend not in NAMES:
            raise unknown_name("STATETRACK_BACKEND", backend, NAMES)
        backend = backend if backend in loaders else "auto"

    def refusal(name: str) -> str | None:
        return refusals[name]() if refusals and name in refusals else None

    if backend != "auto":
        if backend not in loaders:
            raise unknown_name(f"{op}: backend", backend, [*loaders, "auto"])
        if reason := refusal(backend):
            raise UserError(f'{op}: backend "{backend}" cannot run this: {reason}. Use backend="auto".')
        return loaders[backend]()
    for name in (*PREFERENCE.get(device.type, ("chunked",)), "reference"):
        if name in loaders and not refusal(name):
            return loaders[name]()
    raise UserError(f"{op}: no backend runs on {device}; the op has {', '.join(loaders)}.")


def choose_once(
    choices: CallCache, options: Hashable, inputs: tuple[Tensor | None, ...], choose: Callable[[], Callable]
) -> Callable:
    """What `choose` gives, which may look at `options`, and at shapes, dtypes and devices of the inputs."""
    found = signature(*inputs)
    key = None if found is None else (options, os.environ.get("STATETRACK_BACKEND"), found)
    return choices.get_or_make(key, choose)
