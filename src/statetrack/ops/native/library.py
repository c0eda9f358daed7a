"""Loads the native library on import, or prints once, in one line, why PyTorch is used instead."""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from statetrack.ops import native

# The fields of the structs in arguments.h, in order; everything is eight bytes wide.
SCAN, DELTA, GATED = struct.Struct("54q"), struct.Struct("9qd37q"), struct.Struct("9qd31q")
CONVOLUTION = struct.Struct("24q")
OPS = ("scan", "delta", "gated", "channel", "convolution")
NAMES = tuple(f"{op}_{way}" for op in OPS for way in ("forward", "backward"))
# From this many bytes on, fresh memory comes from the system page by page, and large pages pay.
LARGE = 8 << 20
# Below this many multiplications a second thread costs more than it saves (about 5 us to start and join it).
SMALL = 1 << 17


def load(file: Path) -> tuple[dict[str, Callable[..., None]], str]:
    """The library's functions by name, and the instruction set it chose; OSError where it is not usable."""
    if not file.exists():
        reason = file.with_name(native.REASON)
        raise OSError(reason.read_text().strip() if reason.exists() else "the package was not installed")
    library = ctypes.CDLL(str(file))
    size, start = library["statetrack_arguments"], library["statetrack_start"]
    size.argtypes, size.restype = (ctypes.c_int64,), ctypes.c_int64
    start.argtypes, start.restype = (ctypes.c_int64,), ctypes.c_char_p
    # an editable install may hold a library from before an op was added: it serves the others
    structs = [SCAN, DELTA, GATED]
    if hasattr(library, "statetrack_convolution_forward"):
        structs.append(CONVOLUTION)
    if [size(i) for i in range(len(structs))] != [x.size for x in structs]:
        raise OSError("it was built from other sources")
    functions = {
        name: library[f"statetrack_{name}"] for name in NAMES if hasattr(library, f"statetrack_{name}")
    }
    for function in functions.values():
        function.argtypes, function.restype = (ctypes.c_char_p,), None
    functions["large_pages"] = library["statetrack_large_pages"]
    functions["large_pages"].argtypes = (ctypes.c_int64, ctypes.c_int64)
    functions["large_pages"].restype = None
    # 0 is the best set the processor has; 1 leaves out AVX-512 and 2 also AVX2, for tests and comparisons
    return functions, start(int(os.environ.get("STATETRACK_NATIVE_SET", "0"))).decode()


ABSENT: str | None = None
try:
    CALL, INSTRUCTIONS = load(native.FILE)
    old = platform.machine().lower() in ("x86_64", "amd64") and INSTRUCTIONS == "portable"
    if old and "STATETRACK_NATIVE_SET" not in os.environ:
        ABSENT = "this processor has no AVX2, without which the native CPU backend is the slower one"
        print(f"statetrack: {ABSENT}; the PyTorch one serves.", file=sys.stderr)
except (OSError, AttributeError) as error:
    CALL, INSTRUCTIONS = {}, "none"
    ABSENT = f"the native CPU backend was not built ({error})"
    hint = "Install a C++17 compiler and reinstall."
    print(f"statetrack: {ABSENT}; the slower PyTorch one serves. {hint}", file=sys.stderr)


def threads(multiplications: int) -> int:
    """The number of threads for a call of this much work."""
    return torch.get_num_threads() if multiplications > SMALL else 1


def expect_writes(*tensors: Tensor) -> None:
    """Request large pages for tensors that are about to be written for the first time."""
    for x in tensors:
        if x.nbytes >= LARGE:
            CALL["large_pages"](x.data_ptr(), x.nbytes)


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def strided(x: Tensor | None) -> tuple[int, ...]:
    """The address and the first three strides, as `Tensor3` in arguments.h."""
    return (0, 0, 0, 0) if x is None else (x.data_ptr(), *x.stride()[:3])
