"""The one way to pick a backend: a name, or "auto" for the fastest that serves the tensor's device."""

import os
from collections.abc import Callable, Mapping

import torch

from statetrack.errors import UserError, unknown_name

# "auto" takes the first backend of this list that the op has and that can run there.
PREFERENCE = {"cuda": ("triton", "chunked"), "cpu": ("native", "chunked")}


def pick_backend(op: str, backend: str, device: torch.device, loaders: Mapping[str, Callable]) -> Callable:
    """The function that runs `op`: `loaders` maps a backend's name to a function that imports it.

    The environment variable STATETRACK_BACKEND replaces "auto", so that a whole training run can be
    repeated on the reference without touching code.
    """
    if backend == "auto":
        backend = os.environ.get("STATETRACK_BACKEND", "auto")
    if backend != "auto":
        if backend not in loaders:
            raise unknown_name(f"{op}: backend", backend, [*loaders, "auto"])
        return loaders[backend]()
    for name in PREFERENCE.get(device.type, ("chunked",)):
        if name in loaders:
            return loaders[name]()
    raise UserError(f"{op}: no backend runs on {device}; the op has {', '.join(loaders)}.")
