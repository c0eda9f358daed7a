"""Launch Triton kernels again and again with little Python in between.

`kernel[grid](...)` inspects every argument anew, asks the driver about every pointer and calls hooks that are
mostly empty: tens of microseconds for the 60 arguments of a scan. A `Launcher` goes through that once.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from statetrack.ops.triton_runtime.compile_ahead import ahead, launch

# Triton versions whose compiled kernels are started as below; others go through their own launcher.
KNOWN = ("3.6.", "3.7.")
_known = triton.__version__.startswith(KNOWN)
_data_ptr = Tensor.data_ptr
# Absent where PyTorch is built without CUDA: kernels are interpreted there.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


# How to start what was compiled, by all that Triton compiles anew for.
_compiled: dict[tuple, tuple[Callable[..., None], tuple]] = {}


class Launcher:
    """A kernel with its grid and its arguments but the tensors, which come before `numbers` and `constants`.

    Triton compiles anew for other constants and dtypes, for pointers that are or are not multiples of 16, and
    likewise for integers. So the tensors of all calls must have the same dtypes, and lie on `device`, an
    index; their pointers are looked at.
    """

    def __init__(
        self,
        kernel: Any,
        device: int,
        grid: tuple[int, int],
        numbers: tuple,
        constants: tuple,
        warps: int,
        registers: int | None = None,  # limit per thread, if below what the compiler would take
    ):
        self.kernel, self.device, self.grid, self.warps, self.registers = (
            kernel,
            device,
            grid,
            warps,
            registers,
        )
        self.numbers, self.constants = numbers, constants
        self.rest = (*numbers, *constants)
        self._start: Callable[..., None] | None = None  # the kernel compiled for multiples of 16
        self._handles: tuple = ()

    def __call__(self, *tensors: Tensor) -> None:
        if ahead.get() is not None:
            self._through_triton(tensors)
            return
        start = self._start or self._find(tensors)
        if start is None:
            return
        pointers = list(map(_data_ptr, tensors))
        if functools.reduce(operator.or_, pointers) % 16 or _current_device() != self.device or _hooks():
            self._through_triton(tensors)
            return
        start(*self.grid, 1, _current_stream(self.device), *self._handles, *pointers, *self.rest)

    def _find(self, tensors: tuple[Tensor, ...]) -> Callable[..., None] | None:
        """How to start the kernel, if it was compiled before. If not, it is now, and launched."""
        dtypes, kinds = tuple([x.dtype for x in tensors]), tuple([_kind(x) for x in self.numbers])
        key = (self.kernel, self.device, self.warps, self.registers, self.constants, kinds, dtypes)
        if found := _compiled.get(key):
            self._handles, self._start = found[1], found[0]  # other threads look at `_start` alone
            return self._start
        compiled = self._through_triton(tensors)
        if compiled is not None and _known and not any(x.data_ptr() % 16 for x in tensors):
            _compiled[key] = _starter(compiled)
        return None

    def _through_triton(self, tensors: tuple[Tensor, ...]) -> Any:
        """The compiled kernel, or None if kernels are interpreted."""
        options = {"num_warps": self.warps} | ({"maxnreg": self.registers} if self.registers else {})
        with torch.cuda.device(self.device):  # -1, a CPU, changes nothing
            return launch(self.kernel, self.grid)(*tensors, *self.rest, **options)


def _starter(compiled: Any) -> tuple[Callable[..., None], tuple]:
    """What starts a compiled kernel, and its arguments between the stream and those of the kernel."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    no_hooks = None, None, None  # the metadata for hooks, and the hooks before and after a launch
    in_python = not triton.__version__.startswith("3.6.") or type(run).__name__ != "CudaLauncher"
    if in_python or run.global_scratch_size or run.profile_scratch_size:
        return run, (function, metadata, *no_hooks)
    # Triton 3.6: the C function itself. The Python around it is for scratch memory.
    flags = run.launch_cooperative_grid, run.launch_pdl
    return run.launch, (function, *flags, None, None, metadata, *no_hooks)


def _kind(number: float) -> tuple | None:
    """Triton takes a one for a constant, knows of multiples of 16, and has two sizes of integers."""
    if isinstance(number, float):
        return None
    return number == 1, number % 16 == 0, number.bit_length() > 31


def _hooks() -> bool:
    """Whether a profiler has registered hooks for launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)
