"""Every kernel of the delta rule compiles for Hopper as it is launched, and nothing spills."""

import importlib

import pytest
import torch
from sm90 import assert_fits, compile_sm90

from statetrack.ops.delta_rule.triton_plan import constants, make_plan

FUSED, CHUNKED = "statetrack.ops.delta_rule.triton_kernels", "statetrack.ops.delta_rule.triton_chunk_kernels"
SHORT_KERNELS = ("fused", "fused_back")
LONG_KERNELS = ("prepare", "sweep", "outputs", "prepare_back", "sweep_back", "gradients")
MODULES = {"fused": FUSED, "fused_back": FUSED}
MODULES |= dict.fromkeys(LONG_KERNELS, CHUNKED)
FLOATS = ("state", "final", "A", "norms", "dfinal", "dstate", "beta", "g", "dbeta", "dg")
OFFSETS = ("cu_seqlens", "first_chunk", "table")
KEPT = ("M", "E", "states", "dstates")
SIZES = {"T": "i32", "H": "i32", "scale": "fp32"}
NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def compile_as_launched(kernel, K, V, steps, programs, dtype, *, everything=False):
    """Compile one kernel with the constants its plan gives it; `everything` turns every option on."""
    plan = make_plan(K, V, steps, programs, dtype, plain=not everything)
    launch = getattr(plan, kernel)
    if launch is None:
        return None
    flags = dict.fromkeys(("GATED", "PACKED", "LOGITS", "STATE", "FINAL", "DSTATE"), everything)
    flags |= {"L2NORM": True, "SIGMOID": 2.0 if everything else 0.0, "SAVE": True, "SINGLE": steps <= plan.C}
    flags |= {
        "READ": plan.outputs is None,
        "PREPARED": plan.prepare_back is not None,
        "DQ": everything,
        "DK": True,
    }
    names = getattr(importlib.import_module(MODULES[kernel]), f"{kernel}_kernel").arg_names
    values = constants(plan, kernel, names, (K, V, 2 if everything else 1), flags)
    names, constant = names[: -len(values)], dict(zip(names[-len(values) :], values, strict=True))
    if "OUT" in constant:
        constant["OUT"] = plan.out  # which the interpreter does not take

    def type_of(name):
        if name in FLOATS:
            return "*fp32"
        if name in OFFSETS:
            return "*i64"
        return SIZES.get(name) or NAMES[plan.dtype if name in KEPT else dtype]

    types = {name: type_of(name) for name in names}
    return compile_sm90(f"{MODULES[kernel]}:{kernel}_kernel", types, constant, launch.warps)


# shape (K, V, steps, programs, dtype), and the bytes that may spill. Two sweeps hold a state of 128 x 64 in
# four warps and spill a little: a slice of 32 columns does not, and took 1.4 times as long.
SHORT = [
    ((32, 32, 32, 2048, torch.float32), 0),
    ((32, 32, 32, 2048, torch.bfloat16), 0),
    ((24, 20, 16, 64, torch.float16), 0),
]
LONG = [
    ((32, 32, 512, 256, torch.float32), 32),
    ((64, 64, 512, 64, torch.float32), 32),
    ((64, 64, 512, 256, torch.bfloat16), 0),
    ((128, 128, 2048, 128, torch.bfloat16), 160),
    ((128, 128, 32768, 16, torch.bfloat16), 0),
    ((128, 128, 2048, 16, torch.float32), 0),
    ((256, 256, 2048, 16, torch.bfloat16), 0),
]
# with a gate `gradients` keeps the parts of dk apart, and its sums do not fit beside them
EVERYTHING = [((32, 32, 512, 256, torch.float32), 240), ((128, 128, 32768, 16, torch.bfloat16), 320)]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "spilled"), SHORT)
@pytest.mark.parametrize("kernel", SHORT_KERNELS)
def test_kernels_for_short_sequences_fit_the_registers(kernel, shape, spilled):
    assert_fits(compile_as_launched(kernel, *shape), spilled)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "spilled"), LONG)
@pytest.mark.parametrize("kernel", LONG_KERNELS)
def test_kernels_for_long_sequences_fit_the_registers(kernel, shape, spilled):
    if compiled := compile_as_launched(kernel, *shape):
        assert_fits(compiled, spilled)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "spilled"), EVERYTHING)
@pytest.mark.parametrize("kernel", LONG_KERNELS)
def test_kernels_with_every_option_compile(kernel, shape, spilled):
    if compiled := compile_as_launched(kernel, *shape, everything=True):
        assert_fits(compiled, spilled)
