"""Which block sizes serve a shape: fixed and measured, not tuned at run time."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from statetrack.ops.backends import no_triton
from statetrack.ops.delta_rule.triton.plan import INTERPRETED, OUT
from statetrack.ops.triton_runtime.sizes import block

MAX_HEAD_WIDTH = 256


def refuses(q: Tensor, v: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if reason := no_triton(q):
        return reason
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_WIDTH:
        return f"heads are {q.shape[-1]} and {v.shape[-1]} wide, more than {MAX_HEAD_WIDTH}"
    if v.shape[1] * q.shape[2] * max(q.shape[-1], v.shape[-1]) >= 1 << 31:  # offsets have 32 bits
        return "a sequence has 2^31 numbers or more"
    if torch.float64 in (q.dtype, v.dtype):
        return "float64 is not offered there"
    return None


class Launch(NamedTuple):
    """How one kernel is launched."""

    warps: int
    BK: int = 0  # channels of k that a program takes at a time
    BV: int = 0  # columns of v
    stages: int = 1  # of loads in flight


@dataclass(frozen=True)
class Plan:
    """The launches of a call, by the names of the kernels without `_kernel`."""

    C: int  # steps of a chunk, a power of two
    bf16: bool  # the inputs are bfloat16
    cumulate: Launch
    scores: Launch
    outputs: Launch
    prepare: Launch
    values: Launch
    gradients: Launch
    add: Launch
    head_outputs: Launch
    head_prepare: Launch
    head_gradients: Launch
    sweep: Launch

    @property
    def saved_dtype(self) -> torch.dtype:
        """Of what lies in memory between kernels: A, q_in, k_out and the states."""
        return torch.bfloat16 if self.bf16 else torch.float32


@functools.lru_cache(maxsize=1024)
def make_plan(K: int, V: int, steps: int, dtype: torch.dtype) -> Plan:
    """The plan for sequences of at most `steps` steps.

    Triton 3.6 and 3.7 miscompile Hopper's wgmma on tiles whose rows are shorter than 128 bytes
    (triton-lang/triton#11366). It is used from 4 warps and 64 rows on, so tiles are 64 wide in chunks of 64,
    and have fewer than 64 rows otherwise.
    """
    # Triton's interpreter has no bfloat16 arithmetic
    bf16 = dtype == torch.bfloat16 and not INTERPRETED
    BK, BV = block(K), block(V)
    C = 64 if bf16 and min(BK, BV) >= 64 and steps > 32 else 32 if steps > 16 else 16
    wide = 64 if C == 64 else 32
    BK, BV = min(BK, wide), min(BV, wide)
    full = block(K)
    both = Launch(4, BK, BV)
    wider = Launch(8 if C == 64 else 4, BK, BV)
    return Plan(
        C,
        bf16,
        cumulate=Launch(2, min(full, 32)),
        scores=Launch(8, min(full, 128), BV) if C == 64 else both,
        outputs=Launch(4, BK, min(block(V), 128) if C == 64 else BV, 2),
        prepare=both,
        values=Launch(4, BK, min(block(V), 128) if C == 64 else BV, 2),
        gradients=wider,
        add=both,
        head_outputs=Launch(4, BK, min(block(V), 128) if C == 64 else BV, 2),
        head_prepare=both,
        head_gradients=Launch(8 if full >= 128 else 4, full, BV),
        sweep=Launch(4, max(1, 1024 // min(block(V), 128)), min(block(V), 128), 4),
    )


def constants(
    plan: Plan, kernel: str, names: Sequence[str], K: int, V: int, flags: dict[str, Any]
) -> tuple[Any, ...]:
    """The constexprs of a kernel whose arguments have these names, in order; `flags` are the call's own."""
    launch: Launch = getattr(plan, kernel)
    known = {"K": K, "V": V, "BK": launch.BK, "BV": launch.BV, "ROWS": launch.BK, "C": plan.C}
    known |= {"LEVELS": plan.C.bit_length() - 1, "BF16": plan.bf16, "OUT": OUT, "STAGES": launch.stages}
    known |= flags
    return tuple([known[name] for name in names if name in known])
