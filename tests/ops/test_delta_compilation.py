"""Every kernel of the delta rule compiles for Hopper as it is launched, and nothing spills."""

import importlib

import pytest
import torch
from sm90 import assert_fits, compile_sm90

from statetrack.ops.delta_rule.triton.plan import constants, make_plan, unrolled
from statetrack.ops.triton_runtime.sizes import HOPPER, GpuLimits

PACKAGE = "statetrack.ops.delta_rule.triton"
SHORT_KERNELS = ("short_forward", "short_backward")
FORWARD_KERNELS = ("prepare", "prepare_narrow", "sweep", "outputs")
BACKWARD_KERNELS = ("prepare_backward", "sweep_backward", "gradients", "gradients_q", "gradients_k")
PAIR_KERNELS = ("join_pairs", "sweep_pairs", "sweep_pairs_backward")
LONG_KERNELS = FORWARD_KERNELS + BACKWARD_KERNELS + PAIR_KERNELS
MODULES = {name: f"{PACKAGE}.{name}" for name in SHORT_KERNELS}
MODULES |= dict.fromkeys(FORWARD_KERNELS, f"{PACKAGE}.chunk_forward")
MODULES |= {"prepare_narrow": f"{PACKAGE}.chunk_prepare_narrow"}
MODULES |= dict.fromkeys(BACKWARD_KERNELS, f"{PACKAGE}.chunk_backward")
MODULES |= dict.fromkeys(PAIR_KERNELS, f"{PACKAGE}.chunk_pairs")
FLOATS = ("initial_state", "final_state", "inverse", "inverse_rows", "inverse_norms", "corner", "beta", "g")
FLOATS += ("dfinal_state", "dinitial_state", "dbeta", "dg", "signs")
OFFSETS = ("cu_seqlens", "first_chunk", "chunk_table")
SAVED = ("A", "E", "U", "states", "dstates", "dA_saved")
SIZES = {"T": "i32", "H": "i32", "scale": "fp32"}
NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def compile_as_launched(
    kernel,
    K,
    V,
    steps,
    programs,
    dtype,
    *,
    everything=False,
    logits=False,
    hard=False,
    gpu=HOPPER,
    capability=90,
):
    """Compile one kernel with the constants its plan gives it.

    `everything` turns every option on but `hard`, which bounds betas. `logits` takes betas from them and
    makes the last state, or takes its gradient: as much as sequences that are not packed, without gate and
    first state, can have.
    """
    # the kernels for short sequences know no gate and no first state
    packed = everything and kernel not in PAIR_KERNELS
    plain = kernel in SHORT_KERNELS or not everything
    plan = make_plan(K, V, steps, programs, dtype, plain, packed, gpu)
    function = f"{kernel}_kernel"
    if kernel.startswith("gradients"):
        apart = plan.gradients_q is not None and not everything  # everything includes a gate
        if apart != (kernel != "gradients"):
            return None
        function = "gradients_kernel"
    launch = getattr(plan, kernel)
    if launch is None or (kernel == "prepare_narrow" and everything):  # which has no gate
        return None
    flags = dict.fromkeys(("GATED", "SIGNED", "PACKED", "HAS_INITIAL_STATE"), everything)
    flags |= dict.fromkeys(("L2NORM", "SAVE", "SAVE_STATES"), True)
    flags["BETA_FROM_LOGITS"] = 2.0 if everything or logits else None
    flags["HARD_BETA"] = hard
    flags |= dict.fromkeys(("OUTPUT_FINAL_STATE", "HAS_DFINAL_STATE"), everything or logits)
    flags |= {
        "WRITE_OUTPUTS": plan.outputs is None,
        "PREPARED": plan.prepare_backward is not None,
        "COMPUTE_DQ": kernel != "gradients_k",
        "COMPUTE_DK": kernel != "gradients_q",
    }
    householders = 2 if everything else 1
    flags |= unrolled(plan, steps, householders, everything)
    flags |= {"SPLIT": "bf16", "OUT": "bf16x3"}  # here kernels are compiled, though others are interpreted
    names = getattr(importlib.import_module(MODULES[kernel]), function).arg_names
    values = constants(plan, kernel, names, K, V, householders, flags)
    names, constant = names[: -len(values)], dict(zip(names[-len(values) :], values, strict=True))

    def type_of(name):
        if name in FLOATS:
            return "*fp32"
        if name in OFFSETS:
            return "*i64"
        return SIZES.get(name) or NAMES[plan.saved_dtype if name in SAVED else dtype]

    types = {name: type_of(name) for name in names}
    name = f"{MODULES[kernel]}:{function}"
    options = {"registers": launch.registers, "capability": capability}
    return compile_sm90(name, types, constant, launch.warps, **options)


# shape (K, V, steps, programs, dtype), and the bytes that may spill: as they are, with logits and a last
# state, and packed with every option. Few chunks are unrolled, with a first step of its own where that saves
# one, and packed sequences run in a loop; float32 terms and addresses of rows do not all fit the unrolled
# backward.
SHORT = [
    ((32, 32, 32, 2048, torch.float32), (192, 328, 48)),
    ((32, 32, 33, 2048, torch.float32), (256, 368, 48)),
    ((32, 32, 48, 2048, torch.float32), (48, 8, 48)),
    ((32, 32, 33, 2048, torch.bfloat16), (0, 32, 0)),
    ((32, 32, 39, 4096, torch.bfloat16), (24, 32, 0)),
    ((32, 32, 128, 512, torch.bfloat16), (0, 0, 0)),
    ((24, 20, 16, 64, torch.float16), (0, 0, 0)),
]
# Two sweeps hold a state of 128 x 64 in four warps and spill a little: a slice of 32 columns does not, and
# took 1.4 times as long. For heads of 32 `gradients` in one warp spills 224 bytes and is faster than in two.
LONG = [
    ((32, 32, 512, 256, torch.float32), 224),
    ((64, 64, 512, 64, torch.float32), 32),
    ((64, 64, 512, 256, torch.bfloat16), 0),
    ((128, 128, 2048, 128, torch.bfloat16), 160),
    ((128, 128, 32768, 16, torch.bfloat16), 8),
    ((128, 128, 2048, 66, torch.bfloat16), 56),  # as many sweeps as multiprocessors
    ((64, 64, 2048, 132, torch.bfloat16), 0),
    ((128, 128, 2048, 16, torch.float32), 0),
    ((256, 256, 2048, 16, torch.bfloat16), 0),
]
# with a gate `gradients` keeps the parts of dk apart, sums dg over pairs of steps, and not all of it fits
EVERYTHING = [((32, 32, 512, 256, torch.float32), 392), ((128, 128, 32768, 16, torch.bfloat16), 512)]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "spilled"), SHORT)
@pytest.mark.parametrize("kernel", SHORT_KERNELS)
@pytest.mark.parametrize("options", range(3), ids=["plain", "logits", "everything"])
def test_kernels_for_short_sequences_fit_the_registers(kernel, shape, spilled, options):
    compiled = compile_as_launched(kernel, *shape, **({}, {"logits": True}, {"everything": True})[options])
    assert compiled is not None
    assert_fits(compiled, spilled[options])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", SHORT_KERNELS)
def test_hard_betas_spill_no_more_than_others(kernel):
    shape, spilled = SHORT[3]
    compiled = compile_as_launched(kernel, *shape, logits=True, hard=True)
    assert compiled is not None
    assert_fits(compiled, spilled[1])


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "spilled"), LONG)
@pytest.mark.parametrize("kernel", LONG_KERNELS)
def test_kernels_for_long_sequences_fit_the_registers(kernel, shape, spilled):
    if compiled := compile_as_launched(kernel, *shape):
        assert_fits(compiled, spilled)


@pytest.mark.slow
def test_narrow_chunks_are_prepared_from_logits():
    compiled = compile_as_launched("prepare_narrow", 32, 32, 512, 256, torch.float32, logits=True)
    assert compiled is not None
    assert_fits(compiled, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "spilled"), EVERYTHING)
@pytest.mark.parametrize("kernel", LONG_KERNELS)
def test_kernels_with_every_option_compile(kernel, shape, spilled):
    if compiled := compile_as_launched(kernel, *shape, everything=True):
        assert_fits(compiled, spilled)


# the kernels that take most, on an Ada GPU: few and many sequences of wide heads
SMALLER = [
    (99, "sweep_pairs", (128, 128, 2048, 4, torch.bfloat16)),
    (99, "sweep_pairs_backward", (128, 128, 2048, 4, torch.bfloat16)),
    (64, "sweep_backward", (128, 128, 2048, 4, torch.bfloat16)),
    (64, "sweep_backward", (128, 128, 2048, 300, torch.bfloat16)),
    (64, "sweep_backward", (256, 256, 2048, 4, torch.float32)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kilobytes", "kernel", "shape"), SMALLER)
def test_kernels_fit_the_shared_memory_of_smaller_gpus(kilobytes, kernel, shape):
    gpu = GpuLimits(multiprocessors=72, shared_memory=kilobytes * 1024)
    everything = kernel.startswith("sweep_pairs")  # a gate takes a little more
    compiled = compile_as_launched(kernel, *shape, everything=everything, gpu=gpu, capability=89)
    assert compiled is not None
    assert compiled.shared <= gpu.shared_memory


def test_pairs_of_chunks_are_not_used_where_they_do_not_fit():
    shape = 128, 128, 2048, 4, torch.bfloat16, True, False
    assert make_plan(*shape, GpuLimits(72, 99 * 1024)).sweep_pairs is not None
    assert make_plan(*shape, GpuLimits(72, 64 * 1024)).sweep_pairs is None
