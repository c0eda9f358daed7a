"""`scan_jit`: `triton.jit` for the kernels of the selective scan, and which integers stay unspecialized."""

from typing import Any

import triton

# Integers the compiler must not specialize on. It would use their divisibility to load several neighbouring
# channels per thread and so move steps to other lanes. It also keeps the number of compiled variants low.
RUNTIME = [
    "batch", "channels", "T", "tiles", "segment_tiles", "segments", "channel_blocks", "rows", "columns",
    "sequences",
]  # fmt: skip
RUNTIME += [f"{x}_{i}" for x in ("u", "delta", "z", "out", "dout", "du") for i in "bdt"]
RUNTIME += [f"{x}_{i}" for x in ("B", "C", "dB", "dC") for i in "bnt"]
RUNTIME += [f"{x}_{i}" for x in ("initial_state", "dlast_state") for i in "bdn"] + ["A_d", "A_n"]


def scan_jit(function) -> Any:
    """`triton.jit` without specialization on the integers of `RUNTIME`.

    An argument `x_b`, `x_d`, `x_n` or `x_t` of a kernel is the stride of x along batch, channels, states or
    time.
    """
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    jit: Any = triton.jit
    return jit(function, do_not_specialize=[name for name in names if name in RUNTIME])
