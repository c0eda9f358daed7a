"""The logistic function of a tile in four instructions, where Triton's exp and division take fifteen.

    sigmoid(y) = 1 / (1 + 2^(-y log2 e))

In kernels that do little else per number, instructions and not memory bound the speed. What Triton's own
functions add keeps results below 2^-126 and divisors above 2^126 exact; here these become 0, as they do on
the way to half precision anyway. Both approximations are good to two units in the last place of a float32.
Triton's interpreter has no inline assembly: there the plain formula is taken.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
SIGMOID = tl.constexpr("""{
.reg .f32 a;
mul.ftz.f32 a, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 a, a;
add.ftz.f32 a, a, 0f3F800000;
rcp.approx.ftz.f32 $0, a;
}""")


@triton.jit
def sigmoid(y):
    """1 / (1 + exp(-y)) for a float32 tile."""
    if INTERPRETED:
        s = 1.0 / (1.0 + tl.exp(-y))
    else:
        s = tl.inline_asm_elementwise(
            SIGMOID,  # pyright: ignore[reportArgumentType]
            "=f,f",
            [y],
            tl.float32,
            is_pure=True,
            pack=1,
        )
    return s
