"""The kernels of the delta rule with a gate per channel compile for Hopper as they are launched."""

import pytest
import torch
from sm90 import assert_fits, compile_sm90

from statetrack.ops.delta_rule.triton import channel_plan
from statetrack.ops.delta_rule.triton.channel_launches import KERNELS
from statetrack.ops.delta_rule.triton.channel_plan import constants, make_channel_plan

INPUTS = ("q", "k", "q_signed", "k_signed", "v", "dout", "out", "dq", "dk", "dv")
SAVED = (
    "A",
    "E",
    "E_total",
    "W",
    "k_out",
    "q_in",
    "states",
    "dstates",
    "added",
    "dU",
    "dU_total",
    "dA",
    "dN",
)
SAVED += ("reached",)
TYPES = dict.fromkeys(("cu_seqlens", "first_chunk", "chunk_table"), "*i64")
TYPES |= {"T": "i32", "H": "i32", "scale": "fp32", "pairs": "i32"}
FEW, SOME, MANY = 16, 66, 128  # sequences times heads


def compile_as_launched(name, programs, gate, monkeypatch, exact=False):
    monkeypatch.setattr(channel_plan, "INTERPRETED", False)  # here kernels are compiled, not interpreted
    K = V = 128
    kernel, plan = KERNELS[name], make_channel_plan.__wrapped__(K, V, 2048, programs, torch.bfloat16)
    flags = dict.fromkeys(("PACKED", "HAS_INITIAL_STATE", "HAS_DFINAL_STATE"), True)
    flags |= {
        "EXACT": exact,
        "GATE": gate,
        "SIGNED": gate != "log",
        "L2NORM": True,
        "HARD_BETA": False,
        "OUT": "bf16x3",
    }
    flags["BETA_FROM_LOGITS"] = 2.0
    values = constants(plan, name, kernel.arg_names, K, V, flags)
    pointers = kernel.arg_names[: -len(values)]
    types = {x: TYPES.get(x) or ("*bf16" if x in INPUTS + SAVED else "*fp32") for x in pointers}
    constant = dict(zip(kernel.arg_names[-len(values) :], values, strict=True))
    launch = getattr(plan, name)
    place = f"{kernel.fn.__module__}:{kernel.fn.__name__}"
    return compile_sm90(place, types, constant, launch.warps, registers=launch.registers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "programs", "gate", "exact", "spilled"),
    [
        ("cumulate", MANY, "value", False, 0),
        ("prepare", MANY, "value", False, 128),
        ("sweep", SOME, "value", False, 64),
        ("sweep", FEW, "value", False, 0),
        ("outputs", MANY, "value", False, 0),
        ("prepare_backward", MANY, "value", False, 0),
        ("sweep_backward", SOME, "value", False, 256),
        ("sweep_backward", FEW, "value", False, 0),
        ("pair_gradients", MANY, "value", False, 0),
        ("gradients", MANY, "log", False, 320),
        ("gradients", MANY, "value", False, 320),
        ("gradients", MANY, "value", True, 672),  # for few chunks, and 2 % less time in all
    ],
)
def test_kernels_for_heads_of_128_fit_the_registers(name, programs, gate, exact, spilled, monkeypatch):
    assert_fits(compile_as_launched(name, programs, gate, monkeypatch, exact), spilled)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sweep", "sweep_backward"])
def test_sweeps_over_all_columns_fit_the_shared_memory_they_are_taken_for(name, monkeypatch):
    compiled = compile_as_launched(name, MANY, "value", monkeypatch)
    assert compiled.stack <= 400
    assert compiled.shared <= channel_plan.WIDEST_SHARED_MEMORY
