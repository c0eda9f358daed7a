"""Every kernel of the delta rule with a gate per channel compiles for Hopper as it is launched."""

import pytest
import torch
from sm90 import assert_fits, compile_sm90

from statetrack.ops.delta_rule.triton import channel_pairs, channel_sweep
from statetrack.ops.delta_rule.triton.channel_backend import INVERSE_WARPS, make_channel_plan
from statetrack.ops.triton_runtime.sizes import block

KERNELS = {
    "decays": channel_pairs,
    "pairs": channel_pairs,
    "inverse": channel_pairs,
    "sweep": channel_sweep,
    "sweep_backward": channel_sweep,
    "gradients": channel_sweep,
    "pair_gradients": channel_pairs,
}
INPUTS = ("q", "k", "v", "dout", "out", "dq", "dk", "dv")
SAVED = ("A", "E", "states", "dstates")
OFFSETS = ("cu_seqlens", "first_chunk", "chunk_table")
NUMBERS = {"T": "i32", "H": "i32", "scale": "fp32"}
NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}


def compile_as_launched(name, K, V, programs, dtype, everything):
    kernel = getattr(KERNELS[name], f"{name}_kernel")
    plan, bf16 = make_channel_plan(K, V, programs, 132), dtype == torch.bfloat16
    known = {"K": K, "V": V, "BK": block(K), "BV": plan.slice, "C": plan.C, "OUT": "bf16x3", "BF16": bf16}
    known |= dict.fromkeys(("PACKED", "HAS_INITIAL_STATE", "HAS_DFINAL_STATE"), everything)
    known |= {"L2NORM": True, "SAVE_STATES": True, "BETA_FROM_LOGITS": 2.0 if everything else None}

    def type_of(argument):
        if argument in INPUTS or argument in SAVED:
            return NAMES[dtype]
        return NUMBERS.get(argument) or ("*i64" if argument in OFFSETS else "*fp32")

    types = {argument: type_of(argument) for argument in kernel.arg_names if argument not in known}
    constants = {argument: known[argument] for argument in kernel.arg_names if argument in known}
    if name == "inverse":
        warps = INVERSE_WARPS
    else:
        warps = plan.pair_warps if name.startswith("pair") else plan.warps
    return compile_sm90(f"{KERNELS[name].__name__}:{name}_kernel", types, constants, warps)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_for_heads_of_128_fit_the_registers(name):
    assert_fits(compile_as_launched(name, 128, 128, 128, torch.bfloat16, everything=True))
