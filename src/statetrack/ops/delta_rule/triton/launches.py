"""What shapes, dtypes and options of the inputs decide: the room for results, and the launches.

A call object is made once per `key` and then only run.
"""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.delta_rule.triton.chunk_backward import (
    gradients_kernel,
    prepare_back_kernel,
    sweep_back_kernel,
)
from statetrack.ops.delta_rule.triton.chunk_forward import outputs_kernel, prepare_kernel, sweep_kernel
from statetrack.ops.delta_rule.triton.chunk_pairs import (
    join_kernel,
    sweep_pairs_back_kernel,
    sweep_pairs_kernel,
)
from statetrack.ops.delta_rule.triton.chunk_prepare_narrow import prepare_narrow_kernel
from statetrack.ops.delta_rule.triton.plan import Plan, constants, make_plan, unrolled
from statetrack.ops.delta_rule.triton.short_backward import fused_back_kernel
from statetrack.ops.delta_rule.triton.short_forward import fused_kernel
from statetrack.ops.triton_runtime.launcher import Launcher

_KERNELS = {
    "fused": fused_kernel,
    "fused_back": fused_back_kernel,
    "prepare": prepare_kernel,
    "prepare_narrow": prepare_narrow_kernel,
    "sweep": sweep_kernel,
    "join": join_kernel,
    "sweep_pairs": sweep_pairs_kernel,
    "sweep_pairs_back": sweep_pairs_back_kernel,
    "outputs": outputs_kernel,
    "prepare_back": prepare_back_kernel,
    "sweep_back": sweep_back_kernel,
    "gradients": gradients_kernel,
    "gradients_q": gradients_kernel,
    "gradients_k": gradients_kernel,
}
Room = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor to be filled


class Case:
    """The inputs as far as results and launches depend on them, and the plan for them."""

    def __init__(self, q, v, g, state, cu_seqlens, n: int, longest: int):
        self.B, self.T, self.H, self.K = q.shape
        self.V, self.n, self.steps = v.shape[-1], n, self.T * n
        self.dtype, self.device = v.dtype, q.get_device()
        self.gated, self.stateful, self.packed = g is not None, state is not None, cu_seqlens is not None
        self.sequences = cu_seqlens.numel() - 1 if self.packed else self.B
        self.plan = self._plan(q.dtype, (longest or self.T) * n)
        chunks = self.B * -(-self.steps // self.plan.C)
        # needs no look at the device: each packed sequence wastes less than one chunk
        self.chunks = chunks + self.sequences if self.packed else chunks
        self.pairs = 0 if self.plan.join is None else self.B * -(-self.steps // (2 * self.plan.C))

    def _plan(self, dtype: torch.dtype, steps: int) -> Plan:
        # torch.compile may ask with symbols for sizes, which no cache can hold; widths are always numbers
        programs, plain = self.sequences * self.H, not (self.gated or self.stateful)
        known = isinstance(steps, int) and isinstance(programs, int)
        plan_for = make_plan if known else make_plan.__wrapped__
        return plan_for(int(self.K), int(self.V), steps, programs, dtype, plain, self.packed)

    def room(self, save: bool, want_final: bool) -> list[Room]:
        """For the outputs, the last states if wanted, and what the backward reads.

        The latter is X, norms and U for short sequences, a row of each for every step, and A, M, norms, E,
        states, and corners of inverses of two chunks else.
        """
        plan, B, H, K, V, chunks = self.plan, self.B, self.H, self.K, self.V, self.chunks
        results: list[Room] = [((B, self.T, H, V), self.dtype)]
        if want_final:
            results.append(((self.sequences, H, K, V), torch.float32))
        E = (B, self.steps, H, V), plan.dtype
        if plan.fused is None:
            A, states = ((chunks, H, plan.C, plan.C), torch.float32), ((chunks, H, K, V), plan.dtype)
            save = save or plan.outputs is not None
            M, norms = (A[0], plan.dtype), ((chunks, H, 2, plan.C), torch.float32)
            corner = (self.pairs, H, plan.C, plan.C), torch.float32
            return [*results, A, M, norms, E, states if save else ((0, H, K, V), plan.dtype), corner]
        if not save:
            return results
        X, norms = (B, self.steps, H, plan.C), (B, self.steps, H, 2)
        return [*results, (X, torch.float32), (norms, torch.float32), E]


def make_room(like: Tensor, room: list[Room]) -> list[Tensor]:
    return [like.new_empty(*shape, dtype=dtype) for shape, dtype in room]


class _Call:
    def __init__(self, case: Case, scale: float, l2norm: bool, sigmoid: float):
        self.case, self.plan, self.scale = case, case.plan, scale
        self.flags = {"GATED": case.gated, "PACKED": case.packed, "L2NORM": l2norm}
        self.flags |= {"LOGITS": sigmoid != 0.0, "SIGMOID": sigmoid}

    def launch(self, name: str, grid: tuple[int, int], scaled: bool = False, **flags: Any) -> Launcher:
        """`flags` are the kernel's constexprs beyond those of every kernel and of the plan."""
        case, kernel = self.case, _KERNELS[name]
        shape = case.K, case.V, case.n
        known = constants(self.plan, name, kernel.arg_names, shape, self.flags | flags)
        numbers = (case.T, case.H, self.scale) if scaled else (case.T, case.H)
        launch = getattr(self.plan, name)
        return Launcher(kernel, case.device, grid, numbers, known, launch.warps, launch.registers)

    def sweep_grid(self, name: str) -> tuple[int, int]:
        slices = -(-self.case.V // getattr(self.plan, name).slice)
        return slices * self.case.sequences * self.case.H, 1


class FusedForward(_Call):
    """One kernel: a program does a whole short sequence."""

    def __init__(self, case: Case, save: bool, want_final: bool, scale: float, l2norm: bool, sigmoid: float):
        super().__init__(case, scale, l2norm, sigmoid)
        self.room = case.room(save, want_final)
        flags = {"SAVE": save, "FINAL": want_final} | unrolled(case.plan, case.steps, case.n, case.packed)
        self.fused = self.launch("fused", (case.sequences * case.H, 1), scaled=True, **flags)

    def run(self, q, k, v, beta, gate, state, tables, out, final, kept) -> None:
        X, norms, U = kept or (out, out, out)
        bounds = out if tables is None else tables[2]
        self.fused(q, k, v, beta, X, norms, U, out, out if final is None else final, bounds)


class FusedBackward(_Call):
    def __init__(self, case: Case, dfinal: bool, scale: float, l2norm: bool, sigmoid: float):
        super().__init__(case, scale, l2norm, sigmoid)
        grid = case.sequences * case.H, 1
        flags = {"FINAL": dfinal} | unrolled(case.plan, case.steps, case.n, case.packed)
        self.fused_back = self.launch("fused_back", grid, scaled=True, **flags)

    def run(self, q, k, beta, gate, state, tables, kept, dout, dfinal, dq, dk, dv, dbeta, dg, dstate) -> None:
        X, norms, U = kept
        last, bounds = dout if dfinal is None else dfinal, dout if tables is None else tables[2]
        self.fused_back(q, k, beta, X, norms, U, dout, last, dq, dk, dv, dbeta, bounds)


class ChunkedForward(_Call):
    """Chunks side by side, then from chunk to chunk, then the outputs unless the sweep makes them."""

    def __init__(self, case: Case, save: bool, want_final: bool, scale: float, l2norm: bool, sigmoid: float):
        super().__init__(case, scale, l2norm, sigmoid)
        self.room, apart = case.room(save, want_final), case.plan.outputs is not None
        flags = {"STATE": case.stateful, "SAVE": save or apart, "FINAL": want_final, "READ": not apart}
        chunks = case.chunks, case.H
        narrow = case.plan.prepare_narrow is not None and not case.gated
        self.prepare = self.launch("prepare_narrow" if narrow else "prepare", chunks, scaled=True)
        self.join = self.launch("join", (case.pairs, case.H)) if case.pairs else None
        sweep = "sweep_pairs" if case.pairs else "sweep"
        self.sweep = self.launch(sweep, self.sweep_grid(sweep), **flags)
        self.outputs = self.launch("outputs", chunks) if apart else None

    def run(self, q, k, v, beta, gate, state, tables, out, final, kept) -> None:
        A, M, norms, E, states, corner = kept
        table, first_chunk, bounds = tables or (A, A, A)
        first, final = A if state is None else state, A if final is None else final
        self.prepare(q, k, beta, gate, A, M, norms, table)
        if self.join is not None:
            self.join(k, beta, gate, A, norms, corner)
            self.sweep(k, v, beta, gate, first, A, corner, norms, E, states, final)
        else:
            self.sweep(
                q, k, v, beta, gate, first, A, M, norms, out, E, states, final, bounds, first_chunk
            )  # fmt: skip
        if self.outputs is not None:
            self.outputs(q, beta, gate, M, norms, E, states, out, table)


class ChunkedBackward(_Call):
    def __init__(self, case: Case, dfinal: bool, scale: float, l2norm: bool, sigmoid: float):
        super().__init__(case, scale, l2norm, sigmoid)
        chunks, prepared = (case.chunks, case.H), case.plan.prepare_back is not None
        flags = {"FINAL": dfinal, "DSTATE": case.stateful, "PREPARED": prepared}
        self.prepare_back = self.launch("prepare_back", chunks) if prepared else None
        sweep = "sweep_pairs_back" if case.pairs else "sweep_back"
        self.sweep_back = self.launch(sweep, self.sweep_grid(sweep), **flags)
        parts = ("gradients_q", "gradients_k") if case.plan.gradients_q and not case.gated else ("gradients",)
        self.gradients = [
            self.launch(part, chunks, DQ=part != "gradients_k", DK=part != "gradients_q") for part in parts
        ]

    def run(self, q, k, beta, gate, state, tables, kept, dout, dfinal, dq, dk, dv, dbeta, dg, dstate) -> None:
        A, M, norms, E, states, corner = kept
        table, first_chunk, bounds = tables or (A, A, A)
        last, dg, dstate = (A if x is None else x for x in (dfinal, dg, dstate))
        dstates = torch.empty_like(states)
        if self.prepare_back is not None:
            self.prepare_back(q, gate, M, norms, dout, dv, dstates, table)
        if self.case.pairs:
            self.sweep_back(k, beta, gate, A, corner, norms, last, dv, dstates, dstate)
        else:
            self.sweep_back(
                q, k, beta, gate, A, M, norms, dout, last, dv, dstates, dstate, bounds, first_chunk
            )  # fmt: skip
        dM = torch.empty_like(M) if len(self.gradients) == 2 else M  # from the first to the second
        for launch in self.gradients:
            launch(q, k, beta, gate, M, norms, E, dv, states, dstates, dout, dq, dk, dbeta, dg, dM, table)
