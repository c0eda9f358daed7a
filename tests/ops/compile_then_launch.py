"""Compile kernels ahead, launch them, and print how many were compiled, loaded and launched."""

import json
import threading

import torch
import triton
import triton.language as tl
from stand_in_driver import asked, launched, scale_kernel
from triton import knobs

from statetrack.ops.triton_runtime.compile_ahead import ahead, compile_ahead, launch
from statetrack.ops.triton_runtime.launcher import Launcher

compiled_in, loaded = [], []
knobs.compilation.listener = lambda **_: compiled_in.append(threading.current_thread().name)
knobs.runtime.kernel_load_end_hook = lambda *_: loaded.append(1)
x, y = torch.zeros(16), torch.zeros(16, dtype=torch.float16)
numbers = 7, 1 << 40, 0.5
starters = [Launcher(scale_kernel, 0, (5, 6), numbers, (16,), warps) for warps in (1, 2)]


@triton.jit
def broken_kernel(x, y, n, offset, factor, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 16)


class Scaled(torch.autograd.Function):
    """One of the kernels forward, the other back."""

    @staticmethod
    def forward(ctx, x):
        starters[0](x, y)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        starters[1](dy.contiguous(), y)
        return dy


def both_ways():
    leaf = x.clone().requires_grad_()
    torch.autograd.grad(Scaled.apply(leaf).sum(), leaf)


def say(**facts):
    print(json.dumps(facts))


compile_ahead(both_ways)
say(compiled=len(compiled_in), main="MainThread" in compiled_in, loaded=len(loaded), launched=any(launched))
both_ways()
say(compiled=len(compiled_in), loaded=len(loaded), launched=any(launched))

compile_ahead(lambda: launch(broken_kernel, (1,))(x, y, *numbers, 16))
try:
    launch(broken_kernel, (1,))(x, y, *numbers, 16)
except triton.CompilationError as error:
    say(error=type(error).__name__)


def interrupted():
    launch(scale_kernel, (1,))(x, y, *numbers, 32)
    raise KeyboardInterrupt


try:
    compile_ahead(interrupted)
except KeyboardInterrupt:
    asked.value = 0
    launch(scale_kernel, (3,))(x, y, *numbers, 32)
    say(ahead=ahead.get(), grid=launched[0], asked=asked.value)
