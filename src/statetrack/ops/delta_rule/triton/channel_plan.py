"""Block sizes of the kernels for a gate per key channel: fixed, not tuned at run time."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from statetrack.ops.delta_rule.triton.plan import INTERPRETED, OUT
from statetrack.ops.triton_runtime.sizes import HOPPER, GpuLimits, block

WIDEST_SHARED_MEMORY = 200 * 1024  # of a sweep over slices of 128 columns


class Launch(NamedTuple):
    """How one kernel is launched."""

    warps: int
    BK: int = 0  # channels of k that a program takes at a time
    BV: int = 0  # columns of v
    stages: int = 1  # of loads in flight
    registers: int | None = None  # limit per thread, where that lets more programs run side by side


@dataclass(frozen=True)
class ChannelPlan:
    """The launches of a call, by the names of the kernels without `_kernel`."""

    C: int  # steps of a chunk, a power of two
    bf16: bool  # the inputs are bfloat16
    cumulate: Launch
    prepare: Launch
    sweep: Launch
    outputs: Launch
    prepare_backward: Launch
    sweep_backward: Launch
    pair_gradients: Launch
    gradients: Launch

    @property
    def saved_dtype(self) -> torch.dtype:
        """Of what lies in memory between kernels: states, A, E, W, q_in, k_out."""
        return torch.bfloat16 if self.bf16 else torch.float32


@functools.lru_cache(maxsize=1024)
def make_channel_plan(
    K: int, V: int, steps: int, programs: int, dtype: torch.dtype, gpu: GpuLimits = HOPPER
) -> ChannelPlan:
    """The plan for sequences of at most `steps` steps, and `programs` = sequences x heads.

    As in `make_plan` in plan.py, no tile of 64 rows has fewer than 64 columns, and sweeps take thinner
    slices, which makes more programs of them, where there are fewer sequences than multiprocessors.
    """
    bf16 = dtype == torch.bfloat16 and not INTERPRETED  # Triton's interpreter has no bfloat16 arithmetic
    BK, BV = block(K), block(V)
    wide = max(BK, BV)
    if bf16 and min(BK, BV) >= 64 and wide <= 128 and steps > 32:
        C = 64
    else:
        C = 32 if steps > 16 and wide <= 128 else 16
    part = 64 if C == 64 else 32
    BK_part, BV_part = min(BK, part), min(BV, part)
    part = Launch(4, BK_part, BV_part)
    along = _sweep(C, BK, BV, programs, gpu)
    return ChannelPlan(
        C,
        bf16,
        cumulate=Launch(2, min(BK, 32)),
        prepare=part,
        sweep=along,
        outputs=Launch(4, BK_part, min(BV, 128) if C == 64 else BV_part, 2),
        prepare_backward=part,
        sweep_backward=along,
        pair_gradients=part,
        # a program has all channels of a chunk: 32 of their numbers per thread and tile
        gradients=Launch(max(1, C * BK // 1024), BK, BV_part),
    )


def _sweep(C: int, BK: int, BV: int, programs: int, gpu: GpuLimits) -> Launch:
    """With three stages the loads of the next chunk run beside the products of this one. With two they do
    not, and it takes another program on the multiprocessor to hide them."""
    per_slice = {width: programs * (BV // width) for width in (16, 32, 64, 128)}
    if (
        C == 64
        and 4 * per_slice[128] >= 3 * gpu.multiprocessors
        and gpu.shared_memory >= WIDEST_SHARED_MEMORY
    ):
        return Launch(8, BK, 128, 3)
    if C == 64 and per_slice[64] >= gpu.multiprocessors:
        return Launch(4, BK, 64, 2)
    width = min(BV, 32 if per_slice[32] >= gpu.multiprocessors else 16)
    return Launch(4 if max(BK, BV) > 32 else 2, BK, width, 3 if C == 64 else 1)


def constants(
    plan: ChannelPlan, kernel: str, names: Sequence[str], K: int, V: int, flags: dict[str, Any]
) -> tuple[Any, ...]:
    """The constexprs of a kernel whose arguments have these names, in order; `flags` are the call's own."""
    launch: Launch = getattr(plan, kernel)
    known = {"K": K, "V": V, "BK": launch.BK, "BV": launch.BV, "C": plan.C, "STAGES": launch.stages}
    known |= {"LEVELS": plan.C.bit_length() - 1, "BF16": plan.bf16, "OUT": OUT}
    known |= flags
    return tuple([known[name] for name in names if name in known])
