"""Which kernels serve a shape on a GPU, and their block sizes: fixed and measured, not tuned at run time."""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from statetrack.ops.backends import no_triton
from statetrack.ops.triton_runtime.sizes import HOPPER, GpuLimits, block

MAX_HEAD_WIDTH = 256  # more rows of a state would not stay in registers
SHORT_MAX_STEPS = 128  # of a sequence that one program does on its own
SHORT_CHUNK = 16  # steps of a chunk there
# The most chunks of such a program without a loop, as measured with 2,048 programs: in float32 three (48
# steps) take 114 us unrolled and 95 in a loop, two (32 steps) 57 and 63.
MAX_UNROLLED_CHUNKS = {torch.bfloat16: 3, torch.float32: 2}
# What the sweeps over pairs of chunks take, within the 99 KB of Ada and of consumer Ampere; no other kernel
# takes more than 64 KB.
PAIRS_SHARED_MEMORY = 98 * 1024
# Triton's interpreter has no bfloat16 arithmetic: float32 tiles are not split there, and outputs take tf32.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SPLIT = "none" if INTERPRETED else "bf16"  # see split_bf16.py
OUT = "tf32x3" if INTERPRETED else "bf16x3"  # see `dot_out` in tiles.py


def refuses(q: Tensor, v: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    return no_triton(q) or too_large(q, v)


def too_large(q: Tensor, v: Tensor) -> str | None:
    """Why the kernels cannot take shapes and dtype of these inputs, or None."""
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_WIDTH:
        return f"heads are {q.shape[-1]} and {v.shape[-1]} wide, more than {MAX_HEAD_WIDTH}"
    if v.shape[1] * q.shape[2] * max(q.shape[-1], v.shape[-1]) >= 1 << 31:  # offsets have 32 bits
        return "a sequence has 2^31 numbers or more"
    return "float64 is not offered there" if q.dtype == torch.float64 else None


class Launch(NamedTuple):
    """How one kernel is launched."""

    warps: int
    slice: int = 0  # columns of k (prepare, join_pairs) or v (the others) that a program takes at a time
    stages: int = 1  # of loads in flight
    registers: int | None = None  # limit per thread, where that lets more programs run side by side


@dataclass(frozen=True)
class Plan:
    """The launches of a call, by the names of the kernels without `_kernel`; None for those not launched."""

    C: int  # rows of a chunk
    bf16: bool  # the inputs are bfloat16
    short_forward: Launch | None = None  # one kernel each way, or else the chunk kernels below
    short_backward: Launch | None = None
    prepare: Launch | None = None
    prepare_narrow: Launch | None = None  # in place of `prepare`, without a gate
    sweep: Launch | None = None
    sweep_backward: Launch | None = None
    join_pairs: Launch | None = None  # not None: the sweeps go by pairs of chunks
    sweep_pairs: Launch | None = None
    sweep_pairs_backward: Launch | None = None
    outputs: Launch | None = None  # None: the sweep makes them
    prepare_backward: Launch | None = None  # None: `sweep_backward` does that work
    gradients: Launch | None = None
    gradients_q: Launch | None = None  # these two in place of `gradients`, without a gate
    gradients_k: Launch | None = None

    @property
    def saved_dtype(self) -> torch.dtype:
        """Of what is saved for outputs and gradients only: states, E or U, A."""
        return torch.bfloat16 if self.bf16 else torch.float32


@functools.lru_cache(maxsize=1024)
def make_plan(
    K: int,
    V: int,
    steps: int,
    programs: int,
    dtype: torch.dtype,
    plain: bool,
    packed: bool = False,
    gpu: GpuLimits = HOPPER,
) -> Plan:
    """The plan for sequences of `steps` = tokens x Householders, and `programs` = sequences x heads.

    Of packed sequences the longest counts, or an upper bound of it. `plain` means no gate and no initial
    state; with either of them one program for a whole sequence would spill registers.

    Triton 3.6 and 3.7 miscompile Hopper's wgmma on tiles whose rows are shorter than 128 bytes (wrong results
    or illegal accesses, triton-lang/triton#11366). It is used from 4 warps and 64 rows on, so no tile under
    64 columns meets 64 rows: chunks of 32 for narrow heads, and slices of 64 in chunks of 64 only.
    """
    BK, BV, bf16 = block(K), block(V), dtype == torch.bfloat16
    wide, narrow = max(BK, BV), min(BK, BV) < 64
    if plain and steps <= SHORT_MAX_STEPS and wide <= 32:
        return Plan(SHORT_CHUNK, bf16, Launch(1), Launch(1))
    plain = plain and not packed
    if not bf16:
        C = 32 if wide <= 64 else 16
    else:
        C = 32 if narrow or wide > 128 else 64
    # thinner slices, so more programs, where there are fewer sequences than multiprocessors
    sweep = 16
    if bf16 and BV >= 64 and programs * (BV // 32) >= gpu.multiprocessors:
        sweep = 64 if C == 64 and programs * (BV // 64) >= gpu.multiprocessors else 32
    alone = programs * (BV // sweep) <= gpu.multiprocessors  # no other program hides a sweep's latencies
    pairs = alone and C == 64 and sweep == 16 and not packed and steps > C
    pairs = pairs and gpu.shared_memory >= PAIRS_SHARED_MEMORY
    warps = 4 if wide > 32 else 2
    prepare = 4 if wide > 32 else 1 if plain else 2
    gradients = 8 if wide >= 128 else warps if plain else 2 * warps
    if plain and not bf16 and wide <= 32:
        gradients = 1  # spills, and is 7 % faster than two
    slices = min(BV, 64 if C == 64 else 32 if bf16 or (plain and wide <= 32) else 16)
    square = C == 64 and BK == BV == 128  # with fewer registers one program more fits a multiprocessor
    return Plan(
        C,
        bf16,
        prepare=Launch(prepare, min(BK, 64 if bf16 else 32), registers=128 if square else None),
        prepare_narrow=Launch(1) if not bf16 and wide <= 32 else None,
        sweep=Launch(warps, sweep, 2 if sweep == 16 else 1),
        sweep_backward=Launch(warps, sweep, 2 if sweep == 16 else 1),
        join_pairs=Launch(4, 64) if pairs else None,
        # a third stage takes 190 KB of shared memory, which only Hopper has, and gains 0 to 2 %
        sweep_pairs=Launch(8, sweep, 2) if pairs else None,
        sweep_pairs_backward=Launch(8, sweep, 2) if pairs else None,
        outputs=Launch(warps, slices) if alone else None,
        prepare_backward=Launch(warps, slices, registers=128 if square else None) if alone else None,
        gradients=Launch(gradients, slices),
        # with eight warps two share 16 rows, and Triton moves sums between layouts at every product
        gradients_q=Launch(4, slices, 2 if square else 1, 168 if square else None) if C == 64 else None,
        gradients_k=Launch(4, slices, 2 if square else 1) if C == 64 else None,
    )


def unrolled(plan: Plan, steps: int, householders: int, packed: bool) -> dict[str, int]:
    """The constexprs UNROLLED and FIRST_STEP_ALONE of the kernels for short sequences.

    That is the number of chunks done without a loop (0 if there is a loop), and whether the first step comes
    before them on its own, because it would make one more chunk.
    """
    alone = int(householders == 1 and steps % SHORT_CHUNK == 1 and steps > 1)
    chunks = -(-(steps - alone) // SHORT_CHUNK)
    if packed or chunks > MAX_UNROLLED_CHUNKS[plan.saved_dtype]:
        return {"UNROLLED": 0, "FIRST_STEP_ALONE": 0}
    return {"UNROLLED": chunks, "FIRST_STEP_ALONE": alone}


def constants(
    plan: Plan,
    kernel: str,
    names: Sequence[str],
    K: int,
    V: int,
    householders: int,
    flags: dict[str, Any],
) -> tuple:
    """The constexprs of a kernel whose arguments have these names, in order; `flags` are the call's own."""
    launch: Launch = getattr(plan, kernel)
    known = {"K": K, "V": V, "BK": block(K), "BV": block(V), "C": plan.C, "HOUSEHOLDERS": householders}
    known |= {"BF16": plan.bf16, "STAGES": launch.stages, "SPLIT": SPLIT, "OUT": OUT}
    if launch.slice:
        known["BK" if kernel in ("prepare", "join_pairs") else "BV"] = launch.slice
    known |= flags
    return tuple([known[name] for name in names if name in known])
