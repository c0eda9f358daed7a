"""Launch a kernel twice and print what the stand-in driver saw."""

import ctypes
import json

import torch
from stand_in_driver import asked, launched, scale_kernel

from statetrack.ops.triton_runtime.launcher import Launcher

launch = Launcher(scale_kernel, 0, (5, 6), (7, 1 << 40, 0.5), (16,), warps=2)
x, y = torch.zeros(16), torch.zeros(16, dtype=torch.float16)
for _ in range(2):
    asked.value = 0
    launch(x, y)
    print(json.dumps({"launched": list(launched), "asked": asked.value}))
    ctypes.memset(launched, 0, ctypes.sizeof(launched))
print(json.dumps([x.data_ptr(), y.data_ptr()]))
