"""Compile the kernels of a computation side by side, before it runs.

Triton compiles a kernel at its first launch: half a second to three seconds each, one after the other.
`compile_ahead` goes through a computation with every launch left out and its kernel compiled in a thread
instead. Nearly all of that is LLVM, ptxas and a C compiler, none of which holds Python's lock.
"""

import contextlib
import functools
import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any

import torch
import triton
from triton import knobs

THREADS = 8  # more would wait for Python's lock, which a tenth of the work holds
_compiling_in_threads: Any = getattr(triton, "AsyncCompileMode", None)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`; inside `compile_ahead`, what takes its arguments and asks for its compilation only."""
    compilers = ahead.get()
    return kernel[grid] if compilers is None else functools.partial(compilers.ask, kernel, grid)


def compile_ahead(work: Callable[[], Any]) -> None:
    """Compile and load every kernel that `work` launches, without launching any; then forget its results.

    Whatever the kernels would have filled holds anything. So `work` may compute with it, but neither index by
    it nor look at it, and must change nothing that stays. A kernel that cannot be compiled is no error here:
    it is when it is launched. Nothing is done where kernels are interpreted, in a recording, and where
    PyTorch looks for NaN in gradients.
    """
    if ahead.get() is not None or _compiling_in_threads is None or knobs.runtime.interpret:
        return
    if torch.is_anomaly_enabled():
        return
    if not torch.cuda.is_current_stream_capturing():
        copy_context().run(_compile, work)  # what is set in a copy is gone after it, however it ends


def _compile(work: Callable[[], Any]) -> None:
    compilers = _Compilers()
    ahead.set(compilers)
    try:
        with (
            _compiling_in_threads(compilers, ignore_errors=True),  # waits for them in the end
            torch.autograd.set_multithreading_enabled(False),  # a backward pass too has to leave launches out
            contextlib.suppress(torch.OutOfMemoryError),  # the rest is compiled when it is launched
        ):
            try:
                work()
            finally:
                compilers.all_are_known.set()
    finally:
        compilers.shutdown(wait=False)  # Ctrl-C does not wait; what is under way serves the next launch


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels and load them, once all are known: those with most source code first.

    These usually take longest, and the call waits for the slowest.
    """

    def __init__(self) -> None:
        super().__init__(THREADS)
        self.size, self.number = 0, itertools.count()
        self.asked_for: queue.PriorityQueue[tuple] = queue.PriorityQueue()
        self.all_are_known = threading.Event()

    def ask(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Triton calls `submit` for a kernel that is not compiled yet."""
        self.size = len(kernel.src)
        kernel.warmup(*arguments, grid=grid, **options)

    def submit(self, fn: Callable[[], Any], /) -> Future:  # type: ignore[override]
        compiled = Future()
        self.asked_for.put((-self.size, next(self.number), fn, torch.cuda.current_device(), compiled))
        super().submit(self._compile_next)
        return compiled

    def _compile_next(self) -> None:
        self.all_are_known.wait()
        *_, compile_kernel, device, compiled = self.asked_for.get()
        try:
            kernel = compile_kernel()
        except BaseException as error:  # whatever it is, somebody waits
            compiled.set_exception(error)
            return
        with torch.cuda.device(device), contextlib.suppress(Exception):  # a launch meets the same error
            _ = kernel.run  # asking for it loads the kernel
        compiled.set_result(kernel)


ahead: ContextVar[_Compilers | None] = ContextVar("statetrack_compile_ahead", default=None)
