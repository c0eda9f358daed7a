"""Which kernels serve a shape, and with which block sizes: fixed and measured, never tuned at run time."""

import functools
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from statetrack.ops.triton_runtime.sizes import block

WIDEST = 256  # the widest head: a state of 256 rows is the most that stays in registers
FUSED = 128  # the longest sequence, in steps, that one program does on its own
# The most chunks that such a program does without a loop, as measured with 2,048 programs: of float32 three
# (48 steps) take 114 us unrolled and 95 in a loop, two (32 steps) 57 and 63.
UNROLLED = {torch.bfloat16: 3, torch.float32: 2}
MULTIPROCESSORS = 132
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # where bfloat16 arithmetic is wrong


class Launch(NamedTuple):
    warps: int
    slice: int = 0  # columns of k (prepare, join) or v (the others) that a program takes at a time
    stages: int = 1  # of loads in flight
    registers: int | None = None  # the most a thread may have, where that lets more programs run side by side


@dataclass(frozen=True)
class Plan:
    C: int  # rows of a chunk
    split: bool  # products of bfloat16 halves
    fused: Launch | None = None  # one kernel each way, or else the chunked form
    fused_back: Launch | None = None
    prepare: Launch | None = None
    prepare_narrow: Launch | None = None  # in its place without a gate
    sweep: Launch | None = None
    sweep_back: Launch | None = None
    join: Launch | None = None  # not None: the sweeps go by pairs of chunks
    sweep_pairs: Launch | None = None
    sweep_pairs_back: Launch | None = None
    outputs: Launch | None = None  # None: the sweep makes them
    prepare_back: Launch | None = None  # None: `sweep_back` does that work
    gradients: Launch | None = None
    gradients_q: Launch | None = None  # without a gate: once for dq and once for dk
    gradients_k: Launch | None = None
    out: str = "bf16x3"  # how float32 products are made that nothing is carried on from

    @property
    def dtype(self) -> torch.dtype:
        """Of what is kept for outputs and gradients only: states, errors, M."""
        return torch.bfloat16 if self.split else torch.float32


@functools.lru_cache(maxsize=1024)
def make_plan(
    K: int, V: int, steps: int, programs: int, dtype: torch.dtype, plain: bool, packed: bool = False
) -> Plan:
    """`steps` is the length times the Householders, `programs` the number of (sequence, head) pairs.

    Of packed sequences the longest counts, or what is known to be no less. `plain` means no gate and no first
    state; with either a single program would spill.
    Triton 3.6 and 3.7 miscompile Hopper's wgmma on tiles whose rows are shorter than 128 bytes (wrong results
    or illegal accesses, triton-lang/triton#11366). It is used from 4 warps and 64 rows on, so no tile under
    64 columns meets 64 rows: chunks of 32 for narrow heads, and slices of 64 in chunks of 64 only.
    """
    BK, BV, split = block(K), block(V), dtype == torch.bfloat16
    wide, narrow = max(BK, BV), min(BK, BV) < 64
    if plain and steps <= FUSED and wide <= 32:
        return Plan(16, split, Launch(1), Launch(1))
    plain = plain and not packed
    if not split:
        C = 32 if wide <= 64 else 16
    else:
        C = 32 if narrow or wide > 128 else 64
    # more programs where there are fewer sequences than multiprocessors
    sweep = 16
    if split and BV >= 64 and programs * (BV // 32) >= MULTIPROCESSORS:
        sweep = 64 if C == 64 and programs * (BV // 64) >= MULTIPROCESSORS else 32
    alone = programs * (BV // sweep) <= MULTIPROCESSORS  # nothing else hides a sweep's latencies
    pairs = alone and C == 64 and sweep == 16 and not packed and steps > C
    warps = 4 if wide > 32 else 2
    prepare = 4 if wide > 32 else 1 if plain else 2
    gradients = 8 if wide >= 128 else warps if plain else 2 * warps
    if plain and not split and wide <= 32:
        gradients = 1  # spills, and is 7 % faster than two
    slices = min(BV, 64 if C == 64 else 32 if split or (plain and wide <= 32) else 16)
    square = C == 64 and BK == BV == 128  # with fewer registers one program more fits a multiprocessor
    return Plan(
        C,
        split,
        prepare=Launch(prepare, min(BK, 64 if split else 32), registers=128 if square else None),
        prepare_narrow=Launch(1) if not split and wide <= 32 else None,
        sweep=Launch(warps, sweep, 2 if sweep == 16 else 1),
        sweep_back=Launch(warps, sweep, 2 if sweep == 16 else 1),
        join=Launch(4, 64) if pairs else None,
        # a third stage takes 190 KB of shared memory, which only Hopper has, and gains 0 to 2 %
        sweep_pairs=Launch(8, sweep, 2) if pairs else None,
        sweep_pairs_back=Launch(8, sweep, 2) if pairs else None,
        outputs=Launch(warps, slices) if alone else None,
        prepare_back=Launch(warps, slices, registers=128 if square else None) if alone else None,
        gradients=Launch(gradients, slices),
        # eight would share 64 rows in pairs, and Triton then moves sums between layouts at every product
        gradients_q=Launch(4, slices, 2 if square else 1, 168 if square else None) if C == 64 else None,
        gradients_k=Launch(4, slices, 2 if square else 1) if C == 64 else None,
    )


def unrolled(plan: Plan, steps: int, householders: int, packed: bool) -> dict[str, int]:
    """How a program for short sequences is unrolled: into how many chunks (none if there is a loop).

    And whether the first step comes before them on its own, because it would make one more of 16 rows.
    """
    lead = int(householders == 1 and steps % 16 == 1 and steps > 1)
    chunks = (steps - lead + 15) // 16
    if packed or chunks > UNROLLED[plan.dtype]:
        return {"CHUNKS": 0, "LEAD": 0}
    return {"CHUNKS": chunks, "LEAD": lead}


def constants(
    plan: Plan, kernel: str, names: Any, shape: tuple[int, int, int], flags: dict[str, Any]
) -> tuple:
    """The constexprs of a kernel whose arguments have these names, in order. `shape`: K, V, Householders."""
    K, V, n = shape
    launch: Launch = getattr(plan, kernel)
    known = {"K": K, "V": V, "BK": block(K), "BV": block(V), "C": plan.C, "n": n}
    out = "tf32x3" if INTERPRETED else plan.out
    known |= {"SPLIT": plan.split, "OUT": out, "STAGES": launch.stages, "WHOLE": INTERPRETED}
    if launch.slice:
        known["BK" if kernel in ("prepare", "join") else "BV"] = launch.slice
    known |= flags
    return tuple([known[name] for name in names if name in known])
