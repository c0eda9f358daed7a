"""Triton on the driver of cuda_stand_in.c, in a process without a GPU. See test_triton_launch.py."""

import contextlib
import ctypes
import os

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

# what PyTorch would say with a GPU
torch.cuda.current_device = torch._C._cuda_getDevice = lambda: 0  # type: ignore
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore
torch._C._cuda_getCurrentRawStream = lambda device: 99  # type: ignore

driver.set_active(CudaDriver())
_library = ctypes.CDLL(os.path.join(os.environ["TRITON_LIBCUDA_PATH"], "libcuda.so.1"))
launched = (ctypes.c_uint64 * 12).in_dll(_library, "launched")
asked = ctypes.c_int.in_dll(_library, "pointers_asked_about")


@triton.jit
def scale_kernel(x, y, n, offset, factor, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at + offset, mask=at < n) * factor, mask=at < n)
