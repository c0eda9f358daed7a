"""Every Triton kernel of the selective scan compiles for Hopper (sm_90), and without spilling registers."""

import pytest
from sm90 import assert_fits, compile_sm90

from statetrack.ops.selective_scan.triton import launches as triton_calls
from statetrack.ops.selective_scan.triton.tiles import RUNTIME

IN_DTYPE = ["u", "delta", "z", "out", "ungated", "dout", "du", "ddelta", "dz", "B", "C", "dB", "dC"]

LIES = ("U_LIES", "DELTA_LIES", "Z_LIES", "OUT_LIES", "DOUT_LIES", "DU_LIES")
BY_CHANNEL, BY_TIME = dict.fromkeys(LIES, 0), dict.fromkeys(LIES, 1)
FLAGS = ("HAS_D", "HAS_Z", "HAS_BIAS", "SOFTPLUS", "SAVE", "FULL", "ALIKE", "VECTOR")
OFF = ("HAS_STATE", "HAS_LAST", "SEGMENTED", "EXTENDED", "PACKED", "ORDERED", "KEEP", "KEPT", "PAIRS")
USUAL = dict.fromkeys(FLAGS, True) | dict.fromkeys(OFF, False)
USUAL |= {"N": 16, "BN": 16, "L": 16, "BD": 32, "TAIL": 0}
UNUSUAL = {
    "HAS_STATE": True,
    "HAS_LAST": True,
    "EXTENDED": True,
    "FULL": False,
    "ALIKE": False,
    "VECTOR": False,
    "N": 5,
}

# what the Mamba layer hands over: views of (B, T, D), but for delta
LAYER = BY_CHANNEL | {"DELTA_LIES": 1, "ALIKE": False, "EXTENDED": True}

# sequences start and end anywhere, so tiles are masked and not vectors, and any last one may be half
PACKED = {"PACKED": True, "ORDERED": True, "TAIL": 1, "FULL": False, "VECTOR": False}

# two neighbouring channels to a lane, and outputs before the gate kept
PAIRS = BY_CHANNEL | {"PAIRS": True, "L": 8, "BD": 64, "VECTOR": False, "KEEP": True, "KEPT": True}
REDUCE = {"BR": 256, "BW": 16, "BT": 4, "BK": 4, "L": 8}
VARIANTS = [
    ("forward_kernel", "fp32", USUAL | BY_TIME),
    ("forward_kernel", "fp32", USUAL | BY_TIME | {"TAIL": 1}),
    ("forward_kernel", "bf16", USUAL | BY_TIME | {"SEGMENTED": True}),
    ("forward_kernel", "bf16", USUAL | LAYER),
    ("forward_kernel", "bf16", USUAL | BY_TIME | UNUSUAL),
    ("forward_kernel", "bf16", USUAL | LAYER | PACKED | {"HAS_STATE": True}),
    ("forward_kernel", "bf16", USUAL | PAIRS | PACKED | {"N": 32}),
    ("forward_kernel", "fp32", USUAL | BY_TIME | PACKED),
    ("forward_segment_kernel", "bf16", USUAL | BY_TIME),
    ("forward_segment_kernel", "bf16", USUAL | LAYER | UNUSUAL),
    ("backward_kernel", "fp32", USUAL | BY_TIME),
    ("backward_kernel", "fp32", USUAL | BY_TIME | {"TAIL": 1}),
    ("backward_kernel", "bf16", USUAL | BY_TIME | {"SEGMENTED": True}),
    ("backward_kernel", "fp32", USUAL | LAYER),
    ("backward_kernel", "bf16", USUAL | BY_TIME | UNUSUAL),
    ("backward_kernel", "bf16", USUAL | PAIRS | PACKED),
    ("backward_kernel", "bf16", USUAL | PAIRS | PACKED | {"EXTENDED": True}),
    ("backward_kernel", "bf16", USUAL | PAIRS | PACKED | {"EXTENDED": True, "ALIKE": False}),
    ("backward_kernel", "fp32", USUAL | PAIRS | PACKED),
    ("backward_kernel", "bf16", USUAL | BY_CHANNEL | PACKED),
    ("backward_kernel", "bf16", USUAL | PAIRS | {"VECTOR": False}),
    ("backward_kernel", "bf16", USUAL | LAYER | PACKED | {"HAS_STATE": True, "HAS_LAST": True}),
    ("backward_kernel", "fp32", USUAL | BY_TIME | PACKED),
    ("backward_segment_kernel", "bf16", USUAL | BY_TIME),
    ("backward_segment_kernel", "bf16", USUAL | LAYER | UNUSUAL),
    ("stepwise_kernel", "bf16", USUAL | PAIRS | PACKED),
    (
        "stepwise_kernel",
        "bf16",
        USUAL | PAIRS | PACKED | {"EXTENDED": True, "ALIKE": False, "HAS_STATE": True},
    ),
    ("stepwise_kernel", "fp32", USUAL | PAIRS | {"EXTENDED": True}),
    ("stepwise_kernel", "bf16", USUAL | PAIRS | PACKED | {"N": 5, "BN": 8}),
    ("order_kernel", "fp32", {"BI": 16, "BJ": 256, "PACKED": True}),
    ("reduce_kernel", "bf16", USUAL | REDUCE),
    ("step_kernel", "bf16", USUAL | {"HAS_STATE": True, "BD": 128}),
]


def compile_as_launched(name, dtype, constants):
    names = getattr(triton_calls, name).arg_names
    registers = None
    if name == "stepwise_kernel":
        registers = triton_calls.WALK_REGISTERS
        constants = constants | {"BD": triton_calls.WALK_CHANNELS}
    if name == "backward_kernel" and constants["KEPT"]:
        registers = triton_calls.BACKWARD_REGISTERS
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: "*" + (dtype if name in IN_DTYPE else "fp32") for name in names}
    types |= {name: "i32" for name in names if name in RUNTIME} | {"cu_seqlens": "*i32", "order": "*i32"}
    types = {name: types[name] for name in names if name not in constants}
    warps = 4 if name in ("step_kernel", "reduce_kernel", "order_kernel") else 1
    return compile_sm90(f"{triton_calls.__name__}:{name}", types, constants, warps, registers=registers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "constants"), VARIANTS, ids=[f"{name}-{dtype}" for name, dtype, _ in VARIANTS]
)
def test_kernels_compile_for_hopper_without_spills(name, dtype, constants):
    spilled = 0
    if name == "backward_kernel" and constants["KEPT"]:
        spilled = 32  # registers are limited for the sake of a third more programs; not in the inner loop
    if constants["PACKED"] and constants.get("U_LIES") == 1:
        spilled = 8 if name == "forward_kernel" else 128
    if name == "backward_kernel" and constants["HAS_LAST"]:
        spilled = 128  # every option is on: a few numbers of a tile are kept in memory
    assert_fits(compile_as_launched(name, dtype, constants), spilled)
