"""What shapes, dtypes and options of the inputs decide with a gate per key channel: buffers and launches.

A call object is made once per kind of inputs (`channel_backend.py` caches it) and then only run. Pointers
that a kernel does not read may be any tensor.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from statetrack.ops.delta_rule.options import DeltaRuleOptions
from statetrack.ops.delta_rule.triton.channel_backward import (
    gradients_kernel,
    pair_gradients_kernel,
    prepare_backward_kernel,
    sweep_backward_kernel,
)
from statetrack.ops.delta_rule.triton.channel_forward import outputs_kernel, prepare_kernel, sweep_kernel
from statetrack.ops.delta_rule.triton.channel_gates import cumulate_kernel
from statetrack.ops.delta_rule.triton.channel_plan import constants, make_channel_plan
from statetrack.ops.triton_runtime.launcher import Launcher
from statetrack.ops.triton_runtime.sizes import gpu_limits, searching

# By the names of the fields of a `ChannelPlan`.
KERNELS = {
    "cumulate": cumulate_kernel,
    "prepare": prepare_kernel,
    "sweep": sweep_kernel,
    "outputs": outputs_kernel,
    "prepare_backward": prepare_backward_kernel,
    "sweep_backward": sweep_backward_kernel,
    "pair_gradients": pair_gradients_kernel,
    "gradients": gradients_kernel,
}


@functools.lru_cache(maxsize=64)
def reached_table(C: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """By levels of blocks of 1, 2, 4, ... steps in pairs, (levels, C, C): ones where the gate of step i lies
    between step j and the last step of the first block of their pair (channel_backward.py)."""
    step, levels = torch.arange(C, device=device), torch.arange(C.bit_length() - 1, device=device)
    block = step >> levels[:, None]
    later = step >= step[:, None]
    reached = (block[:, :, None] == block[:, None]) & ((block[:, :, None] & 1 == 1) == later)
    return reached.to(dtype)


class Inputs(NamedTuple):
    """The tensors of a call. `gate` (B, T, H, K) is a with `is_log` False, else g."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    gate: Tensor
    sign: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None


class Case:
    """The inputs as far as buffers and launches depend on them, and the plan for them."""

    def __init__(self, inputs: Inputs, is_log: bool, options: DeltaRuleOptions):
        q, v = inputs.q, inputs.v
        self.B, self.T, self.H, self.K = q.shape
        self.V, self.options, self.device = v.shape[-1], options, q.get_device()
        self.packed = inputs.cu_seqlens is not None
        self.has_initial_state = inputs.initial_state is not None
        self.sequences = self.B if inputs.cu_seqlens is None else inputs.cu_seqlens.numel() - 1
        sizes = self.K, self.V, options.max_seqlen or self.T, self.sequences * self.H
        # torch.compile may call this with symbols for sizes; the plan needs numbers
        self.plan = make_channel_plan(*map(int, sizes), q.dtype, gpu_limits(q.device))
        chunks = self.B * -(-self.T // self.plan.C)
        # an upper bound that does not read the offsets: each packed sequence wastes less than one chunk
        self.chunks = chunks + self.sequences if self.packed else chunks
        gate = "value" if not is_log else "log" if inputs.sign is None else "log and sign"
        self.flags = {"GATE": gate, "SIGNED": gate != "log", "PACKED": self.packed, "L2NORM": options.l2norm}
        self.flags |= {"BETA_FROM_LOGITS": options.beta_from_logits, "HARD_BETA": options.hard_beta}
        self.flags |= {"HAS_INITIAL_STATE": self.has_initial_state}

    def results(self, like: Tensor) -> list[Tensor]:
        """Outputs and last states."""
        states = like.new_empty(self.sequences, self.H, self.K, self.V, dtype=torch.float32)
        return [torch.empty_like(like, memory_format=torch.contiguous_format), states]

    def saved(self, like: Tensor) -> list[Tensor]:
        """L, P_C, the largest l (of a alone, else nothing), A, the inverse, inverse norms, q_in, k_out, W, E,
        states; with signs q and k times them."""
        C, dtype, chunks = self.plan.C, self.plan.saved_dtype, (self.chunks, self.H)
        rows = self.B, self.T, self.H, self.K
        floats = {"dtype": torch.float32}
        return [
            like.new_empty(rows, **floats),
            like.new_empty(*chunks, self.K, **floats),
            like.new_empty(*chunks, self.K if self.flags["GATE"] == "value" else 0, **floats),
            like.new_empty(*chunks, C, C, dtype=dtype),
            like.new_empty(*chunks, C, C, **floats),
            like.new_empty(*chunks, 2, C, **floats),
            *(like.new_empty(rows, dtype=dtype) for _ in range(3)),
            like.new_empty(self.B, self.T, self.H, self.V, dtype=dtype),
            like.new_empty(*chunks, self.V, self.K, dtype=dtype),
            *(like.new_empty(rows) for _ in range(2 if self.flags["SIGNED"] else 0)),
        ]

    def launch(self, name: str, over: str = "", scaled: bool = False, **flags: Any) -> Launcher:
        """`over`: "K" or "V" if a program has a slice of its columns, "sweep" if it has a sequence and a
        slice of V; `flags` are further constexprs."""
        kernel, launch = KERNELS[name], getattr(self.plan, name)
        columns = -(-self.V // launch.BV) if over in ("V", "sweep") else 1
        grid = self.chunks * (-(-self.K // launch.BK) if over == "K" else columns), self.H
        if over == "sweep":
            grid = self.sequences * self.H * columns, 1
        numbers = (self.T, self.H, self.options.scale) if scaled else (self.T, self.H)
        if "EXACT" in flags:
            grid, numbers = searching(grid, flags["EXACT"]), (*numbers, grid[0] * grid[1])
        values = constants(self.plan, name, kernel.arg_names, self.K, self.V, self.flags | flags)
        return Launcher(kernel, self.device, grid, numbers, values, launch.warps, launch.registers)


class Forward:
    """All chunks at once, then from chunk to chunk, then the outputs."""

    def __init__(self, case: Case):
        self.case = case
        self.cumulate = case.launch("cumulate", "K")
        self.prepare = case.launch("prepare", scaled=True)
        self.sweep = case.launch("sweep", "sweep")
        self.outputs = case.launch("outputs", "V")

    def run(self, x: Inputs, tables: tuple, saved: list[Tensor], out: Tensor, final_state: Tensor) -> None:
        chunk_table, first_chunk, cu_seqlens = tables
        L, kept, steepest, A, inverse, norms, q_in, k_out, W, E, states, *signed = saved
        q_signed, k_signed = signed or (x.q, x.k)
        sign = out if x.sign is None else x.sign
        start = out if x.initial_state is None else x.initial_state
        E_0 = torch.empty_like(E)
        self.cumulate(x.gate, sign, L, kept, steepest, chunk_table)
        self.prepare(
            x.q, x.k, x.v, x.beta, L, A, inverse, norms, q_in, k_out, W, E_0, q_signed, k_signed,
            chunk_table,
        )  # fmt: skip
        self.sweep(
            x.beta, W, k_out, E_0, E, kept, start, states, final_state, cu_seqlens, first_chunk
        )  # fmt: skip
        self.outputs(x.beta, q_in, A, E, states, out, chunk_table)


class Backward:
    """What chunks add to the gradient of the state, these gradients, and those of the inputs."""

    def __init__(self, case: Case, has_dfinal_state: bool):
        self.case = case
        self.prepare_backward = case.launch("prepare_backward")
        self.sweep_backward = case.launch("sweep_backward", "sweep", HAS_DFINAL_STATE=has_dfinal_state)
        self.pair_gradients = case.launch("pair_gradients", scaled=True)
        exact = (False, True) if case.flags["GATE"] == "value" else (False,)
        self.gradients_by_gates = [case.launch("gradients", scaled=True, EXACT=x) for x in exact]

    def run(
        self,
        x: Inputs,
        tables: tuple,
        saved: list[Tensor],
        dout: Tensor,
        dfinal_state: Tensor | None,
        gradients: list[Tensor],
    ) -> None:
        """`gradients`: buffers for those of q, k, v, beta, the gate, and an initial state if there is one."""
        chunk_table, first_chunk, cu_seqlens = tables
        L, kept, steepest, A, inverse, norms, q_in, k_out, W, E, states, *signed = saved
        q_signed, k_signed = signed or (x.q, x.k)
        dq, dk, dv, dbeta, dgate, *end = gradients
        sign = dout if x.sign is None else x.sign
        start, end = dout if dfinal_state is None else dfinal_state, end[0] if end else dout
        added, dstates = torch.empty_like(states), torch.empty_like(states)
        dU_0, dU = torch.empty_like(E), torch.empty_like(E)
        dA, dN = torch.empty_like(A), torch.empty_like(A)
        reached = reached_table(self.case.plan.C, A.dtype, A.device)
        self.prepare_backward(q_in, A, dout, dU_0, added, chunk_table)
        self.sweep_backward(
            x.beta, W, k_out, dU_0, dU, added, kept, start, dstates, end, cu_seqlens, first_chunk
        )  # fmt: skip
        self.pair_gradients(x.beta, inverse, norms, E, dU, dout, dv, dA, dN, dbeta, chunk_table)
        for gradients_of_some in self.gradients_by_gates:
            gradients_of_some(
                q_signed, k_signed, x.beta, x.gate, sign, L, steepest, norms, E, dv, dA, dN, reached, states,
                dstates, dout, dq, dk, dgate, chunk_table,
            )  # fmt: skip
