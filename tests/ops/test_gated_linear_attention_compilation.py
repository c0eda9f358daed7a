"""The kernels of gated linear attention compile for Hopper as they are launched."""

import pytest
import torch
from sm90 import assert_fits, compile_sm90

from statetrack.ops.gated_linear_attention.triton import launches
from statetrack.ops.gated_linear_attention.triton import plan as plan_module
from statetrack.ops.gated_linear_attention.triton.plan import constants, make_plan

# what lies in memory between kernels, in the dtype of the plan; all else in that of the inputs
SAVED = ("A", "dA", "q_in", "k_out", "states", "dstates")
FLOATS = ("L", "kept", "gate", "sign", "dgate", "start", "end")
TYPES = dict.fromkeys(FLOATS, "*fp32") | {"T": "i32", "H": "i32", "scale": "fp32"}
TYPES |= dict.fromkeys(("cu_seqlens", "first_chunk", "chunk_table"), "*i64")


def compiled_as_launched(name, K, V, dtype, gate, monkeypatch, packed=False):
    monkeypatch.setattr(plan_module, "INTERPRETED", False)  # here kernels are compiled, not interpreted
    plan, kernel = make_plan.__wrapped__(K, V, 2048, dtype), launches.KERNELS[name]
    flags = {"GATE": gate, "PACKED": packed, "PER_HEAD": False, "OUT": "bf16x3"}
    flags |= {"BACKWARD": True, "HAS_START": True, "HAS_END": True}
    values = constants(plan, name, kernel.arg_names, K, V, flags)
    names = kernel.arg_names[: -len(values)]
    pointer = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
    types = {x: TYPES.get(x) or pointer[plan.saved_dtype if x in SAVED else dtype] for x in names}
    constant = dict(zip(kernel.arg_names[-len(values) :], values, strict=True))
    place = f"{kernel.fn.__module__}:{kernel.fn.__name__}"
    return compile_sm90(place, types, constant, getattr(plan, name).warps)


# the kernels with most in their registers, and the bytes that may spill
CASES = [
    ("scores", torch.bfloat16, "log", 0),
    ("gradients", torch.bfloat16, "log", 0),
    ("gradients", torch.bfloat16, "value", 504),
    ("head_gradients", torch.bfloat16, "value", 0),
    ("head_gradients", torch.float32, "value", 0),
    ("sweep", torch.bfloat16, "value", 0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "gate", "spilled"), CASES)
def test_kernels_fit_the_registers(name, dtype, gate, spilled, monkeypatch):
    compiled = compiled_as_launched(name, 128, 128, dtype, gate, monkeypatch)
    print(name, dtype, gate, compiled)
    assert_fits(compiled, spilled)
