"""The native CPU kernels: C++ sources, built when the package is installed (setup.py), loaded with ctypes.

    library.cpp                            what Python calls; picks the instruction set and the threads
    kernels.cpp                            compiled once per instruction set, from the headers
    scan*.h, delta*.h, gated*.h            the recurrences
    channel*.h                             the delta rule with a gate per key channel
    convolution.h                          the short convolution, with its SiLU
    vector.h, product.h, rows.h, pairs.h   what they are made of

No header of Python or PyTorch is needed: tensors come as addresses and strides, so one build serves every
version of both. `library.py` loads it, or knows why it is not there.
"""

from pathlib import Path

FILE = Path(__file__).parent / "libstatetrack.so"
REASON = "not_built.txt"  # beside it, written by setup.py where the build did not succeed
