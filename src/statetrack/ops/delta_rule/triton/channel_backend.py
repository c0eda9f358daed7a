"""The Triton backend of the delta rule with a gate per key channel: buffers, launches, and autograd."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.call_cache import CallCache
from statetrack.ops.delta_rule.options import DeltaRuleOptions
from statetrack.ops.delta_rule.reference import floor_decay
from statetrack.ops.delta_rule.triton import channel_pairs, channel_sweep
from statetrack.ops.delta_rule.triton.backend import chunk_tables
from statetrack.ops.delta_rule.triton.plan import OUT
from statetrack.ops.triton_runtime.launcher import Launcher
from statetrack.ops.triton_runtime.sizes import block, gpu_limits

CALLS = CallCache()


class ChannelPlan(NamedTuple):
    """Block sizes. No tile has 64 rows, so that Triton does not take wgmma: see `make_plan` in plan.py."""

    C: int  # rows of a chunk: one or two blocks of 16
    slice: int  # columns of v that a sweep takes
    warps: int  # of the kernels on whole chunks
    pair_warps: int  # of those on blocks of 16 rows


def make_channel_plan(K: int, V: int, programs: int, multiprocessors: int) -> ChannelPlan:
    """The plan for `programs` = sequences x heads."""
    wide, BV = max(block(K), block(V)), block(V)
    few = programs * (BV // 32) < multiprocessors
    return ChannelPlan(
        16 if wide > 128 else 32,
        min(BV, 16 if few else 32),
        4 if wide <= 64 else 8,
        1 if wide <= 32 else 4,
    )


def delta_rule_channel_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: DeltaRuleOptions,
) -> tuple[Tensor, Tensor]:
    """As `delta_rule_reference` with g (B, T, H, K) and one step per token; outputs in the dtype of v."""
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    beta, g = beta.contiguous(), floor_decay(g.float()).contiguous()
    initial_state = None if initial_state is None else initial_state.contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    save = needs_gradient((q, k, v, beta, g, initial_state))
    return _ChannelRule.apply(q, k, v, beta, g, initial_state, cu_seqlens, options, save)


class _Case:
    """The inputs as far as buffers and launches depend on them."""

    def __init__(self, q: Tensor, v: Tensor, initial_state, cu_seqlens, options: DeltaRuleOptions, save: bool):
        self.B, self.T, self.H, self.K = q.shape
        self.V, self.options, self.device = v.shape[-1], options, q.get_device()
        self.sequences = self.B if cu_seqlens is None else cu_seqlens.numel() - 1
        limits = gpu_limits(q.device)
        self.plan = make_channel_plan(self.K, self.V, self.sequences * self.H, limits.multiprocessors)
        self.chunks = self.B * -(-self.T // self.plan.C)
        if cu_seqlens is not None:  # an upper bound that does not read the offsets
            self.chunks += self.sequences
        self.bf16 = q.dtype == torch.bfloat16
        self.saved = torch.bfloat16 if self.bf16 else torch.float32
        self.flags = {"K": self.K, "V": self.V, "BK": block(self.K), "C": self.plan.C, "OUT": OUT}
        self.flags |= {"PACKED": cu_seqlens is not None, "L2NORM": options.l2norm, "BF16": self.bf16}
        self.flags |= {"BETA_FROM_LOGITS": options.beta_from_logits, "SAVE_STATES": save}
        self.flags["HAS_INITIAL_STATE"] = initial_state is not None
        self.flags["BV"] = self.plan.slice
        self.made: dict[tuple, Launcher] = {}

    def launch(self, kernel: Any, grid: tuple[int, int], warps: int, *, scaled: bool = False, **flags: Any):
        """The launcher of a kernel, made at its first call."""
        key = kernel, *flags.values()
        if key not in self.made:
            known = self.flags | flags
            constants = tuple([known[name] for name in kernel.arg_names if name in known])
            numbers = (self.T, self.H, self.options.scale) if scaled else (self.T, self.H)
            self.made[key] = Launcher(kernel, self.device, grid, numbers, constants, warps)
        return self.made[key]

    @property
    def per_chunk(self) -> tuple[int, int]:
        return self.chunks, self.H

    @property
    def per_block(self) -> tuple[int, int]:
        return self.chunks * (self.plan.C // 16), self.H

    @property
    def per_slice(self) -> tuple[int, int]:
        return -(-self.V // self.plan.slice) * self.sequences * self.H, 1


def _case(q, k, v, beta, initial_state, cu_seqlens, options: DeltaRuleOptions, save: bool) -> _Case:
    packed = None if cu_seqlens is None else (cu_seqlens.shape, cu_seqlens.dtype)
    state = None if initial_state is None else initial_state.dtype
    key = options, save, q.shape, v.shape, q.dtype, beta.dtype, q.get_device(), state, packed
    return CALLS.get_or_make(key, lambda: _Case(q, v, initial_state, cu_seqlens, options, save))


class _ChannelRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, g, initial_state, cu_seqlens, options, save):
        case = _case(q, k, v, beta, initial_state, cu_seqlens, options, save)
        C, H, warps, small = case.plan.C, case.H, case.plan.warps, case.plan.pair_warps
        tables = chunk_tables(cu_seqlens, C, 1, case.chunks)
        G, out, E = torch.empty_like(g), torch.empty_like(v), torch.empty_like(v, dtype=case.saved)
        norms = g.new_empty(case.chunks, H, 2, C)
        inverse = g.new_empty(case.chunks, H, C, C)
        A = torch.empty_like(inverse, dtype=case.saved)
        states = g.new_empty(case.chunks if save else 0, H, case.V, case.K, dtype=case.saved)
        final = g.new_empty(case.sequences, H, case.K, case.V)
        chunk_table, first_chunk, offsets = tables or (A, A, A)
        state = A if initial_state is None else initial_state
        case.launch(channel_pairs.decays_kernel, case.per_chunk, warps, scaled=True)(
            q, k, g, G, norms, chunk_table
        )
        case.launch(channel_pairs.pairs_kernel, case.per_block, small)(
            q, k, beta, G, norms, inverse, A, chunk_table
        )
        case.launch(channel_pairs.inverse_kernel, case.per_chunk, 4)(inverse, chunk_table)
        case.launch(channel_sweep.sweep_kernel, case.per_slice, warps)(
            q, k, v, beta, G, state, inverse, A, norms, out, E, states, final, offsets, first_chunk
        )
        if save:
            ctx.save_for_backward(q, k, v, beta, G, inverse, A, norms, E, states)
            ctx.case, ctx.tables, ctx.has_state = case, tables, initial_state is not None
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dfinal):
        q, k, v, beta, G, inverse, A, norms, E, states = ctx.saved_tensors
        case, warps = ctx.case, ctx.case.plan.warps
        dout = torch.zeros_like(v) if dout is None else dout.contiguous()
        chunk_table, first_chunk, offsets = ctx.tables or (A, A, A)
        dfinal = None if dfinal is None else dfinal.contiguous()
        dq, dk, dv, dbeta, dg = (torch.empty_like(x) for x in (q, k, v, beta, G))
        dstates, dA, dN = torch.empty_like(states), torch.empty_like(inverse), torch.empty_like(inverse)
        dq_states, dk_states = torch.empty_like(G), torch.empty_like(G)
        dinitial = G.new_empty(case.sequences, case.H, case.K, case.V) if ctx.has_state else None
        case.launch(
            channel_sweep.sweep_backward_kernel, case.per_slice, warps, HAS_DFINAL_STATE=dfinal is not None
        )(
            q, k, beta, G, inverse, A, norms, dout, A if dfinal is None else dfinal, dv, dstates,
            A if dinitial is None else dinitial, offsets, first_chunk,
        )  # fmt: skip
        case.launch(channel_sweep.gradients_kernel, case.per_chunk, warps)(
            q, k, beta, G, norms, E, dv, states, dstates, dout, dA, dN, dq_states, dk_states, dg, dbeta,
            chunk_table,
        )  # fmt: skip
        case.launch(channel_pairs.pair_gradients_kernel, case.per_block, case.plan.pair_warps)(
            q, k, G, norms, dA, dN, dq_states, dk_states, dg, dq, dk, chunk_table
        )
        return dq, dk, dv, dbeta, dg, dinitial, None, None, None
