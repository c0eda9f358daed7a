"""Launch a kernel twice on the driver of cuda_stand_in.c and print what it saw. See test_triton_launch.py."""

import contextlib
import ctypes
import json
import os

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

# what PyTorch would say with a GPU
torch.cuda.current_device = torch._C._cuda_getDevice = lambda: 0  # type: ignore
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore
torch._C._cuda_getCurrentRawStream = lambda device: 99  # type: ignore

from statetrack.ops.triton_launch import Launcher  # noqa: E402


@triton.jit
def scale_kernel(x, y, n, offset, factor, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at + offset, mask=at < n) * factor, mask=at < n)


driver.set_active(CudaDriver())
library = ctypes.CDLL(os.path.join(os.environ["TRITON_LIBCUDA_PATH"], "libcuda.so.1"))
launched = (ctypes.c_uint64 * 12).in_dll(library, "launched")
asked = ctypes.c_int.in_dll(library, "pointers_asked_about")
launch = Launcher(scale_kernel, 0, (5, 6), (7, 1 << 40, 0.5), (16,), warps=2)
x, y = torch.zeros(16), torch.zeros(16, dtype=torch.float16)
for _ in range(2):
    asked.value = 0
    launch(x, y)
    print(json.dumps({"launched": list(launched), "asked": asked.value}))
    ctypes.memset(launched, 0, ctypes.sizeof(launched))
print(json.dumps([x.data_ptr(), y.data_ptr()]))
