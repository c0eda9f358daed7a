"""What shapes, dtypes and options of the inputs decide: the buffers, and the launches.

A call object is made once per kind of inputs (`backend.py` caches it) and then only run. Pointers that a
kernel does not read may be any tensor.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from statetrack.ops.gated_linear_attention.triton.channel_backward import (
    gradients_kernel,
    prepare_kernel,
    values_kernel,
)
from statetrack.ops.gated_linear_attention.triton.channel_forward import outputs_kernel, scores_kernel
from statetrack.ops.gated_linear_attention.triton.decode import decode_kernel
from statetrack.ops.gated_linear_attention.triton.gates import cumulate_kernel
from statetrack.ops.gated_linear_attention.triton.head_backward import (
    head_gradients_kernel,
    head_prepare_kernel,
)
from statetrack.ops.gated_linear_attention.triton.head_forward import add_kernel, head_outputs_kernel
from statetrack.ops.gated_linear_attention.triton.plan import constants, make_plan
from statetrack.ops.gated_linear_attention.triton.states import sweep_kernel
from statetrack.ops.triton_runtime.launcher import Launcher
from statetrack.ops.triton_runtime.sizes import block

# By the names of the fields of a `Plan`.
KERNELS = {
    "cumulate": cumulate_kernel,
    "scores": scores_kernel,
    "outputs": outputs_kernel,
    "prepare": prepare_kernel,
    "values": values_kernel,
    "gradients": gradients_kernel,
    "add": add_kernel,
    "head_outputs": head_outputs_kernel,
    "head_prepare": head_prepare_kernel,
    "head_gradients": head_gradients_kernel,
    "sweep": sweep_kernel,
}


class Inputs(NamedTuple):
    """The tensors of a call. `gate` is a with `is_log` False, else g."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    sign: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None


class Case:
    """The inputs as far as buffers and launches depend on them, and the plan for them."""

    def __init__(self, inputs: Inputs, is_log: bool, scale: float):
        q, v = inputs.q, inputs.v
        self.B, self.T, self.H, self.K = q.shape
        self.V, self.scale, self.device = v.shape[-1], scale, q.get_device()
        self.per_head = inputs.gate.ndim == 3
        self.packed = inputs.cu_seqlens is not None
        self.has_initial_state = inputs.initial_state is not None
        self.gate = "value" if not is_log else "log" if inputs.sign is None else "log and sign"
        self.sequences = self.B if inputs.cu_seqlens is None else inputs.cu_seqlens.numel() - 1
        self.plan = make_plan(int(self.K), int(self.V), int(self.T), q.dtype)
        chunks = self.B * -(-self.T // self.plan.C)
        # an upper bound that does not read the offsets: each packed sequence wastes less than one chunk
        self.chunks = chunks + self.sequences if self.packed else chunks

    def results(self, like: Tensor) -> list[Tensor]:
        """Outputs and last states."""
        states = like.new_empty(self.sequences, self.H, self.K, self.V, dtype=torch.float32)
        return [torch.empty_like(like, memory_format=torch.contiguous_format), states]

    def saved(self, like: Tensor) -> list[Tensor]:
        """States, P_C of chunks; with gates per channel the largest l (of a alone, else nothing), L, q_in,
        k_out and A."""
        C, dtype, shape = self.plan.C, self.plan.saved_dtype, (self.chunks, self.H)
        states = like.new_empty(*shape, self.K, self.V, dtype=dtype)
        if self.per_head:
            return [states, like.new_empty(shape, dtype=torch.float32)]
        rows = self.B, self.T, self.H, self.K
        return [
            states,
            like.new_empty(*shape, self.K, dtype=torch.float32),
            like.new_empty(*shape, self.K if self.gate == "value" else 0, dtype=torch.float32),
            like.new_empty(rows, dtype=torch.float32),
            like.new_empty(rows, dtype=dtype),
            like.new_empty(rows, dtype=dtype),
            like.new_empty(*shape, C, C, dtype=dtype),
        ]

    def launch(self, name: str, over: str = "", scaled: bool = False, **flags: Any) -> Launcher:
        """`over`: "K" or "V" if a program has a slice of its columns; `flags` are further constexprs."""
        kernel, launch = KERNELS[name], getattr(self.plan, name)
        known = {"GATE": self.gate, "PACKED": self.packed, "PER_HEAD": self.per_head} | flags
        slices = {"K": -(-self.K // launch.BK), "V": -(-self.V // launch.BV) if launch.BV else 1, "": 1}
        grid = self.chunks * slices[over], self.H
        if name == "sweep":
            grid = self.sequences * self.H * slices["K"] * slices["V"], 1
        numbers = (self.T, self.H, self.scale) if scaled else (self.T, self.H)
        values = constants(self.plan, name, kernel.arg_names, self.K, self.V, known)
        return Launcher(kernel, self.device, grid, numbers, values, launch.warps)


class Decode:
    """One step, without the gradients: one kernel. `run` has the arguments of `Forward.run`."""

    def __init__(self, case: Case):
        self.case = case
        BK, BV = block(case.K), min(block(case.V), 32)
        grid = case.B * case.H * -(-case.V // BV), 1
        values = case.K, case.V, BK, BV, case.gate, case.per_head, case.has_initial_state
        self.step = Launcher(decode_kernel, case.device, grid, (case.scale,), values, warps=4)

    def run(self, x: Inputs, tables: tuple, saved: list[Tensor], o: Tensor, final_state: Tensor) -> None:
        start = o if x.initial_state is None else x.initial_state
        self.step(x.q, x.k, x.v, x.gate, o if x.sign is None else x.sign, start, o, final_state)


class Forward:
    """What chunks add to the state, the states, the outputs."""

    def __init__(self, case: Case):
        self.case = case
        start = case.has_initial_state
        self.sweep = case.launch("sweep", BACKWARD=False, HAS_START=start, HAS_END=True)
        if case.per_head:
            self.add = case.launch("add")
            self.outputs = case.launch("head_outputs", "V", scaled=True)
        else:
            self.cumulate = case.launch("cumulate", "K")
            self.scores = case.launch("scores", scaled=True)
            self.outputs = case.launch("outputs", "V")

    def run(self, x: Inputs, tables: tuple, saved: list[Tensor], o: Tensor, final_state: Tensor) -> None:
        chunk_table, first_chunk, cu_seqlens = tables
        states, kept, *rest = saved
        sign = o if x.sign is None else x.sign
        start = o if x.initial_state is None else x.initial_state
        if self.case.per_head:
            self.add(x.k, x.v, x.gate, sign, states, kept, chunk_table)
            self.sweep(states, kept, start, final_state, cu_seqlens, first_chunk)
            self.outputs(x.q, x.k, x.v, x.gate, sign, states, o, chunk_table)
            return
        steepest, L, q_in, k_out, A = rest
        self.cumulate(x.gate, sign, L, kept, steepest, chunk_table)
        self.scores(x.q, x.k, x.v, L, A, q_in, k_out, states, chunk_table)
        self.sweep(states, kept, start, final_state, cu_seqlens, first_chunk)
        self.outputs(q_in, x.v, A, states, o, chunk_table)


class Backward:
    """What chunks add to the gradient of the state, these gradients, and those of the inputs."""

    def __init__(self, case: Case, has_start: bool):
        self.case = case
        end = case.has_initial_state
        self.sweep = case.launch("sweep", BACKWARD=True, HAS_START=has_start, HAS_END=end)
        if case.per_head:
            self.prepare = case.launch("head_prepare", scaled=True)
            self.gradients = case.launch("head_gradients", scaled=True)
        else:
            self.prepare = case.launch("prepare")
            self.values = case.launch("values", "V")
            exact = (False, True) if case.gate == "value" else (False,)
            self.gradients_by_gates = [case.launch("gradients", "K", scaled=True, EXACT=x) for x in exact]

    def run(
        self,
        x: Inputs,
        tables: tuple,
        saved: list[Tensor],
        dout: Tensor,
        dfinal_state: Tensor | None,
        gradients: list[Tensor],
    ) -> None:
        """`gradients`: buffers for those of q, k, v, the gate, and the initial state if there is one."""
        chunk_table, first_chunk, cu_seqlens = tables
        states, kept, *rest = saved
        dq, dk, dv, dgate, *end = gradients
        sign = dout if x.sign is None else x.sign
        start = dout if dfinal_state is None else dfinal_state
        dstates, end = torch.empty_like(states), end[0] if end else dout
        if self.case.per_head:
            self.prepare(x.q, x.gate, sign, dout, dstates, chunk_table)
            self.sweep(dstates, kept, start, end, cu_seqlens, first_chunk)
            self.gradients(
                x.q, x.k, x.v, x.gate, sign, states, dstates, dout, dq, dk, dv, dgate, chunk_table
            )  # fmt: skip
            return
        steepest, L, q_in, k_out, A = rest
        dA = torch.empty_like(A)
        self.prepare(q_in, x.v, dout, dA, dstates, chunk_table)
        self.sweep(dstates, kept, start, end, cu_seqlens, first_chunk)
        self.values(k_out, A, dout, dstates, dv, chunk_table)
        for gradients_of_some in self.gradients_by_gates:
            gradients_of_some(
                x.q, x.k, x.v, x.gate, sign, L, steepest, dA, states, dstates, dout, dq, dk, dgate,
                chunk_table,
            )  # fmt: skip
