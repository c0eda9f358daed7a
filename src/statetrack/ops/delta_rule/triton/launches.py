"""What shapes, dtypes and options of the inputs decide: the buffers for results, and the launches.

A call object is made once per kind of inputs (`backend.py` caches it) and then only run.
"""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.delta_rule.options import DeltaRuleOptions
from statetrack.ops.delta_rule.triton.chunk_backward import (
    gradients_kernel,
    prepare_backward_kernel,
    sweep_backward_kernel,
)
from statetrack.ops.delta_rule.triton.chunk_forward import outputs_kernel, prepare_kernel, sweep_kernel
from statetrack.ops.delta_rule.triton.chunk_pairs import (
    join_pairs_kernel,
    sweep_pairs_backward_kernel,
    sweep_pairs_kernel,
)
from statetrack.ops.delta_rule.triton.chunk_prepare_narrow import prepare_narrow_kernel
from statetrack.ops.delta_rule.triton.plan import Plan, constants, make_plan, unrolled
from statetrack.ops.delta_rule.triton.short_backward import short_backward_kernel
from statetrack.ops.delta_rule.triton.short_forward import short_forward_kernel
from statetrack.ops.triton_runtime.launcher import Launcher
from statetrack.ops.triton_runtime.sizes import gpu_limits

# By the names of the fields of a `Plan`.
KERNELS = {
    "short_forward": short_forward_kernel,
    "short_backward": short_backward_kernel,
    "prepare": prepare_kernel,
    "prepare_narrow": prepare_narrow_kernel,
    "sweep": sweep_kernel,
    "join_pairs": join_pairs_kernel,
    "sweep_pairs": sweep_pairs_kernel,
    "sweep_pairs_backward": sweep_pairs_backward_kernel,
    "outputs": outputs_kernel,
    "prepare_backward": prepare_backward_kernel,
    "sweep_backward": sweep_backward_kernel,
    "gradients": gradients_kernel,
    "gradients_q": gradients_kernel,
    "gradients_k": gradients_kernel,
}
CHUNK_BUFFERS = 6  # that the backward of the chunk kernels reads: the last of `Case.buffers`
BufferSpec = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor that a kernel fills


class Case:
    """The inputs as far as buffers and launches depend on them, and the plan for them."""

    def __init__(self, q, v, g, initial_state, cu_seqlens, options: DeltaRuleOptions, signed: bool = False):
        self.options, self.householders, self.signed = options, options.householders, signed
        self.B, self.T, self.H, self.K = q.shape
        self.V, self.steps = v.shape[-1], self.T * self.householders
        self.dtype, self.device = v.dtype, q.get_device()
        self.gated, self.packed = g is not None, cu_seqlens is not None
        self.has_initial_state = initial_state is not None
        self.sequences = cu_seqlens.numel() - 1 if self.packed else self.B
        self.plan = self._plan(q, (options.max_seqlen or self.T) * self.householders)
        chunks = self.B * -(-self.steps // self.plan.C)
        # an upper bound that does not read the offsets: each packed sequence wastes less than one chunk
        self.chunks = chunks + self.sequences if self.packed else chunks
        self.pairs = 0 if self.plan.join_pairs is None else self.B * -(-self.steps // (2 * self.plan.C))

    def _plan(self, q: Tensor, steps: int) -> Plan:
        # torch.compile may call this with symbols for sizes, which no cache can hold; widths are numbers
        programs, plain = self.sequences * self.H, not (self.gated or self.has_initial_state)
        known = isinstance(steps, int) and isinstance(programs, int)
        plan_for = make_plan if known else make_plan.__wrapped__
        widths = int(self.K), int(self.V)
        return plan_for(*widths, steps, programs, q.dtype, plain, self.packed, gpu_limits(q.device))

    def buffers(self, save: bool) -> list[BufferSpec]:
        """For the outputs, the last states if asked for, and what the backward reads.

        The latter is a row of the inverse, two inverse norms and a row of U for every step of short
        sequences; else the inverse, A, inverse norms, E, states, and corners of the inverses of pairs of
        chunks.
        """
        plan, B, H, K, V, chunks = self.plan, self.B, self.H, self.K, self.V, self.chunks
        results: list[BufferSpec] = [((B, self.T, H, V), self.dtype)]
        if self.options.output_final_state:
            results.append(((self.sequences, H, K, V), torch.float32))
        E = (B, self.steps, H, V), plan.saved_dtype
        if plan.short_forward is not None:
            if not save:
                return results
            inverse_rows, inverse_norms = (B, self.steps, H, plan.C), (B, self.steps, H, 2)
            return [*results, (inverse_rows, torch.float32), (inverse_norms, torch.float32), E]
        square = chunks, H, plan.C, plan.C
        states = (chunks if save or plan.outputs is not None else 0, H, K, V), plan.saved_dtype
        inverse, A = (square, torch.float32), (square, plan.saved_dtype)
        inverse_norms = (chunks, H, 2, plan.C), torch.float32
        corner = (self.pairs, H, plan.C, plan.C), torch.float32
        return [*results, inverse, A, inverse_norms, E, states, corner]


def new_buffers(like: Tensor, specs: list[BufferSpec]) -> list[Tensor]:
    return [like.new_empty(*shape, dtype=dtype) for shape, dtype in specs]


class _Call:
    """Launches of the kernels of one direction. Pointers that a kernel does not read may be any tensor."""

    def __init__(self, case: Case):
        self.case, self.plan = case, case.plan
        options = case.options
        self.flags = {"GATED": case.gated, "PACKED": case.packed, "L2NORM": options.l2norm}
        self.flags |= {"SIGNED": case.signed}
        self.flags |= {"BETA_FROM_LOGITS": options.beta_from_logits, "HARD_BETA": options.hard_beta}
        self.flags |= {"HAS_INITIAL_STATE": case.has_initial_state}

    def launch(self, name: str, grid: tuple[int, int], scaled: bool = False, **flags: Any) -> Launcher:
        """`flags` are the kernel's constexprs beyond those of every kernel and of the plan."""
        case, kernel = self.case, KERNELS[name]
        widths = case.K, case.V, case.householders
        known = constants(self.plan, name, kernel.arg_names, *widths, self.flags | flags)
        numbers = (case.T, case.H, case.options.scale) if scaled else (case.T, case.H)
        launch = getattr(self.plan, name)
        return Launcher(kernel, case.device, grid, numbers, known, launch.warps, launch.registers)

    def sweep_grid(self, name: str) -> tuple[int, int]:
        slices = -(-self.case.V // getattr(self.plan, name).slice)
        return slices * self.case.sequences * self.case.H, 1


class ShortForward(_Call):
    """One kernel: a program does a whole short sequence."""

    def __init__(self, case: Case, save: bool):
        super().__init__(case)
        self.buffers = case.buffers(save)
        flags = {"SAVE": save, "OUTPUT_FINAL_STATE": case.options.output_final_state}
        flags |= unrolled(case.plan, case.steps, case.householders, case.packed)
        self.short_forward = self.launch("short_forward", (case.sequences * case.H, 1), scaled=True, **flags)

    def run(self, q, k, v, beta, g, signs, initial_state, tables, out, final_state, saved) -> None:
        inverse_rows, inverse_norms, U = saved or (out, out, out)
        cu_seqlens = out if tables is None else tables[2]
        final_state = out if final_state is None else final_state
        self.short_forward(q, k, v, beta, inverse_rows, inverse_norms, U, out, final_state, cu_seqlens)


class ShortBackward(_Call):
    def __init__(self, case: Case, has_dfinal_state: bool):
        super().__init__(case)
        grid = case.sequences * case.H, 1
        flags = {"HAS_DFINAL_STATE": has_dfinal_state}
        flags |= unrolled(case.plan, case.steps, case.householders, case.packed)
        self.short_backward = self.launch("short_backward", grid, scaled=True, **flags)

    def run(self, q, k, beta, g, tables, saved, dout, dfinal_state, dq, dk, dv, dbeta, dg, dinitial_state):
        dfinal_state = dout if dfinal_state is None else dfinal_state
        cu_seqlens = dout if tables is None else tables[2]
        self.short_backward(q, k, beta, *saved, dout, dfinal_state, dq, dk, dv, dbeta, cu_seqlens)


class ChunkForward(_Call):
    """All chunks at once, then from chunk to chunk, then the outputs unless the sweep makes them."""

    def __init__(self, case: Case, save: bool):
        super().__init__(case)
        self.buffers, apart = case.buffers(save), case.plan.outputs is not None
        flags = {"SAVE_STATES": save or apart, "WRITE_OUTPUTS": not apart}
        flags |= {"OUTPUT_FINAL_STATE": case.options.output_final_state}
        chunks = case.chunks, case.H
        self.narrow = case.plan.prepare_narrow is not None and not case.gated
        self._prepare = self.launch("prepare_narrow" if self.narrow else "prepare", chunks, scaled=True)
        self.join_pairs = self.launch("join_pairs", (case.pairs, case.H)) if case.pairs else None
        sweep = "sweep_pairs" if case.pairs else "sweep"
        self.sweep = self.launch(sweep, self.sweep_grid(sweep), **flags)
        self.outputs = self.launch("outputs", chunks) if apart else None

    def prepare(self, q, k, beta, g, signs, inverse, A, inverse_norms, chunk_table) -> None:
        tensors = q, k, beta, g, inverse, A, inverse_norms, chunk_table
        if self.narrow:
            self._prepare(*tensors)
        else:
            self._prepare(*tensors, A if signs is None else signs)

    def run(self, q, k, v, beta, g, signs, initial_state, tables, out, final_state, saved) -> None:
        inverse, A, inverse_norms, E, states, corner = saved
        chunk_table, first_chunk, cu_seqlens = tables or (A, A, A)
        initial_state, final_state = (A if x is None else x for x in (initial_state, final_state))
        self.prepare(q, k, beta, g, signs, inverse, A, inverse_norms, chunk_table)
        if self.join_pairs is not None:
            self.join_pairs(k, beta, g, inverse, inverse_norms, corner)
            self.sweep(
                k, v, beta, g, initial_state, inverse, corner, inverse_norms, E, states, final_state
            )  # fmt: skip
        else:
            self.sweep(
                q, k, v, beta, g, initial_state, inverse, A, inverse_norms, out, E, states, final_state,
                cu_seqlens, first_chunk,
            )  # fmt: skip
        if self.outputs is not None:
            self.outputs(q, beta, g, A, inverse_norms, E, states, out, chunk_table)


class ChunkBackward(_Call):
    def __init__(self, case: Case, has_dfinal_state: bool):
        super().__init__(case)
        chunks, prepared = (case.chunks, case.H), case.plan.prepare_backward is not None
        flags = {"HAS_DFINAL_STATE": has_dfinal_state, "PREPARED": prepared}
        self.prepare_backward = self.launch("prepare_backward", chunks) if prepared else None
        sweep = "sweep_pairs_backward" if case.pairs else "sweep_backward"
        self.sweep_backward = self.launch(sweep, self.sweep_grid(sweep), **flags)
        apart = case.plan.gradients_q is not None and not case.gated
        self.gradients = [
            self.launch(name, chunks, COMPUTE_DQ=name != "gradients_k", COMPUTE_DK=name != "gradients_q")
            for name in (("gradients_q", "gradients_k") if apart else ("gradients",))
        ]

    def run(self, q, k, beta, g, tables, saved, dout, dfinal_state, dq, dk, dv, dbeta, dg, dinitial_state):
        inverse, A, inverse_norms, E, states, corner = saved
        chunk_table, first_chunk, cu_seqlens = tables or (A, A, A)
        dfinal_state, dg, dinitial_state = (A if x is None else x for x in (dfinal_state, dg, dinitial_state))
        dstates = torch.empty_like(states)
        half = dv
        if dv.dtype == torch.float16:  # Z, whose quotient by beta is read, would underflow
            dv = torch.empty_like(dv, dtype=torch.float32)
        if self.prepare_backward is not None:
            self.prepare_backward(q, g, A, inverse_norms, dout, dv, dstates, chunk_table)
        if self.case.pairs:
            self.sweep_backward(
                k, beta, g, inverse, corner, inverse_norms, dfinal_state, dv, dstates, dinitial_state
            )
        else:
            self.sweep_backward(
                q, k, beta, g, inverse, A, inverse_norms, dout, dfinal_state, dv, dstates, dinitial_state,
                cu_seqlens, first_chunk,
            )  # fmt: skip
        dA = torch.empty_like(A) if len(self.gradients) == 2 else A  # from the first launch to the second
        for launch in self.gradients:
            launch(
                q, k, beta, g, A, inverse_norms, E, dv, states, dstates, dout, dq, dk, dbeta, dg, dA,
                chunk_table
            )  # fmt: skip
        if half is not dv:
            half.copy_(dv)
