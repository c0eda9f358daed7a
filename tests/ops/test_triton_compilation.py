"""Every Triton kernel variant we ship compiles for Hopper (sm_90), on a machine that has no GPU.

Compilation runs in a process of its own: this one has Triton's interpreter switched on.
"""

import json
import os
import subprocess
import sys

import pytest

COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from statetrack.ops.delta_rule import triton_kernels

POINTERS = {name: "*fp32" for name in ("state", "final", "states", "dfinal", "dstate")}
POINTERS |= {"cu_seqlens": "*i64", "chunk_of": "*i32", "T": "i32", "H": "i32", "scale": "fp32"}


def compile_kernel(kernel, dtype, constants, warps):
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: POINTERS.get(name, "*" + dtype) for name in names if name not in constants}
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


dtype, constants, warps = json.loads(sys.argv[1])
for kernel in (triton_kernels.forward_kernel, triton_kernels.backward_kernel):
    compiled = compile_kernel(kernel, dtype, constants, warps)
    assert compiled.metadata.shared <= 227 * 1024, compiled.metadata.shared
    print(kernel.__name__, len(compiled.asm["cubin"]), compiled.metadata.shared)
"""

BASE = {
    "C": 16, "K": 32, "V": 32, "BK": 32, "BV": 32, "n": 1, "GATED": False, "STATE": False, "FINAL": False,
    "PACKED": False, "L2NORM": True, "SAVE": True, "PRECISION": "tf32x3",
}  # fmt: skip
EVERYTHING = {"n": 2, "GATED": True, "STATE": True, "FINAL": True, "PACKED": True, "L2NORM": False}

VARIANTS = [
    pytest.param("fp32", BASE, 1, id="small-heads"),
    pytest.param("bf16", BASE | EVERYTHING | {"K": 60, "V": 64, "BK": 64, "BV": 64}, 4, id="everything"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "constants", "warps"), VARIANTS)
def test_delta_rule_kernels_compile_for_hopper(dtype, constants, warps):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, json.dumps([dtype, constants, warps])]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split()[0::3] == ["forward_kernel", "backward_kernel"]
