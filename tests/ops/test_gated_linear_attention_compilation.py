"""The kernels of gated linear attention compile for Hopper as they are launched."""

import pytest
import torch
from sm90 import assert_fits, compile_sm90

from statetrack.ops.gated_linear_attention.triton import launches
from statetrack.ops.gated_linear_attention.triton import plan as plan_module
from statetrack.ops.gated_linear_attention.triton.plan import constants, make_plan

# what lies in memory between kernels, in the dtype of the plan; all else in that of the inputs
SAVED = ("A", "dA", "q_in", "k_out", "states", "dstates")
FLOATS = ("L", "kept", "steepest", "gate", "sign", "dgate", "start", "end")
TYPES = dict.fromkeys(FLOATS, "*fp32") | {"T": "i32", "H": "i32", "scale": "fp32"}
TYPES |= dict.fromkeys(("cu_seqlens", "first_chunk", "chunk_table"), "*i64")


def compiled_as_launched(name, K, V, dtype, gate, monkeypatch, exact=False):
    monkeypatch.setattr(plan_module, "INTERPRETED", False)  # here kernels are compiled, not interpreted
    plan, kernel = make_plan.__wrapped__(K, V, 2048, dtype), launches.KERNELS[name]
    flags = {"EXACT": exact, "GATE": gate, "PACKED": name == "sweep", "PER_HEAD": False, "OUT": "bf16x3"}
    flags |= {"BACKWARD": True, "HAS_START": True, "HAS_END": True}
    values = constants(plan, name, kernel.arg_names, K, V, flags)
    names = kernel.arg_names[: -len(values)]
    pointer = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
    types = {x: TYPES.get(x) or pointer[plan.saved_dtype if x in SAVED else dtype] for x in names}
    constant = dict(zip(kernel.arg_names[-len(values) :], values, strict=True))
    place = f"{kernel.fn.__module__}:{kernel.fn.__name__}"
    return compile_sm90(place, types, constant, getattr(plan, name).warps)


# The kernels with most in their registers, and the bytes that may spill at heads of 128. `gradients` of a
# small gates keeps the sums of all levels apart; `head_gradients` holds dq and dk of all channels.
CASES = [("scores", "value", False, 0), ("gradients", "log", False, 0), ("gradients", "value", False, 0)]
CASES += [
    ("gradients", "value", True, 464),
    ("head_gradients", "value", False, 528),
    ("sweep", "value", False, 0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gate", "exact", "spilled"), CASES)
def test_kernels_fit_the_registers(name, gate, exact, spilled, monkeypatch):
    compiled = compiled_as_launched(name, 128, 128, torch.bfloat16, gate, monkeypatch, exact)
    assert_fits(compiled, spilled)


def test_decoding_fits_the_registers_at_the_widest_heads():
    module = "statetrack.ops.gated_linear_attention.triton.decode"
    types = dict.fromkeys(("q", "k", "v", "o"), "*bf16") | dict.fromkeys(
        ("gate", "sign", "start", "end"), "*fp32"
    )
    constant = {"K": 256, "V": 256, "BK": 256, "BV": 32, "GATE": "log and sign", "PER_HEAD": True}
    compiled = compile_sm90(
        f"{module}:decode_kernel", types | {"scale": "fp32"}, constant | {"HAS_START": True}, 4
    )
    assert_fits(compiled)
