"""Every Triton kernel variant we ship compiles for Hopper (sm_90), on a machine that has no GPU.

Compilation runs in a process of its own: this one has Triton's interpreter switched on.
"""

import json
import os
import subprocess
import sys

import pytest

COMPILE = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

STATES = "state final states dfinal dstate last saved scratch dlast dA dB dC dD A D bias".split()
POINTERS = {name: "*fp32" for name in STATES}
POINTERS |= {"cu_seqlens": "*i64", "chunk_of": "*i32", "scale": "fp32"}
POINTERS |= {name: "i32" for name in ("T", "H", "batch", "channels")}


def type_of(name, dtype):
    if "_" in name and name.split("_")[1] in ("b", "d", "t", "n"):
        return "i32"  # a stride
    return POINTERS.get(name, "*" + dtype)


def compile_kernel(kernel, dtype, constants, warps):
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: type_of(name, dtype) for name in names if name not in constants}
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


op, dtype, constants, warps = json.loads(sys.argv[1])
triton_kernels = importlib.import_module(f"statetrack.ops.{op}.triton_kernels")
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

WIDE = {"K": 60, "V": 64, "BK": 64, "BV": 64}
SCAN = {"N": 16, "BN": 16, "BD": 32, "L": 16, "SOFTPLUS": True, "EXTENDED": True, "SAVE": True}
SCAN |= dict.fromkeys(("HAS_D", "HAS_Z", "HAS_BIAS", "HAS_STATE", "HAS_LAST"), True)

VARIANTS = [
    pytest.param("delta_rule", "fp32", BASE, 1, id="delta-rule-small-heads"),
    pytest.param("delta_rule", "bf16", BASE | EVERYTHING | WIDE, 4, id="delta-rule-everything"),
    pytest.param("selective_scan", "fp32", SCAN, 1, id="selective-scan"),
    pytest.param(
        "selective_scan", "bf16", SCAN | {"EXTENDED": False, "HAS_Z": False}, 1, id="selective-scan-bf16"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "dtype", "constants", "warps"), VARIANTS)
def test_kernels_compile_for_hopper(op, dtype, constants, warps):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, json.dumps([op, dtype, constants, warps])]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split()[0::3] == ["forward_kernel", "backward_kernel"]
