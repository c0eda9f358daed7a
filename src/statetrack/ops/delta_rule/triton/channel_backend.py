"""The Triton backend of the delta rule with a gate per key channel: buffers, launches, and autograd."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.call_cache import CallCache
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.delta_rule.options import OPTIONS_SCHEMA, DeltaRuleOptions
from statetrack.ops.delta_rule.reference import floor_decay
from statetrack.ops.delta_rule.triton import channel_pairs, channel_sweep
from statetrack.ops.delta_rule.triton.backend import chunk_tables
from statetrack.ops.delta_rule.triton.plan import OUT
from statetrack.ops.triton_runtime.launcher import Launcher
from statetrack.ops.triton_runtime.sizes import block, gpu_limits

CALLS = CallCache()
INVERSE_WARPS = 4


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
        2 if wide <= 32 else 4,
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
    inputs = q, k, v, beta, g, initial_state, cu_seqlens
    if needs_gradient(inputs):
        return _ChannelRule.apply(*inputs, options)
    out, final, *_ = without_dispatcher(q, _forward, _forward_op)(*inputs, options, False)
    return out, final


class _Case:
    """The inputs as far as buffers and launches depend on them."""

    def __init__(
        self, q: Tensor, v: Tensor, initial_state, cu_seqlens, options: DeltaRuleOptions, save: bool
    ):
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
        self.flags |= {"BETA_FROM_LOGITS": options.beta_from_logits, "HARD_BETA": options.hard_beta}
        self.flags["SAVE_STATES"] = save
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

    def buffers(self, q: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
        """For the outputs, the last states, G, inverse, A, inverse norms, E and states."""
        chunks, H, C = self.chunks, self.H, self.plan.C
        inverse, norms = g.new_empty(chunks, H, C, C), g.new_empty(chunks, H, 2, C)
        A, E = torch.empty_like(inverse, dtype=self.saved), torch.empty_like(v, dtype=self.saved)
        saved_chunks = chunks if self.flags["SAVE_STATES"] else 0
        states = g.new_empty(saved_chunks, H, self.V, self.K, dtype=self.saved)
        final = g.new_empty(self.sequences, H, self.K, self.V)
        return [torch.empty_like(v), final, torch.empty_like(g), inverse, A, norms, E, states]

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
    def forward(ctx, q, k, v, beta, g, initial_state, cu_seqlens, options):
        inputs = q, k, v, beta, g, initial_state, cu_seqlens
        out, final, *saved = without_dispatcher(q, _forward, _forward_op)(*inputs, options, True)
        ctx.save_for_backward(*inputs, *saved)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dfinal):
        kept = ctx.saved_tensors  # read once: a checkpointed block computes them again to give them
        inputs, saved = kept[:7], list(kept[7:])
        q, _, v, *_, initial_state, _ = inputs
        dout = torch.zeros_like(v) if dout is None else dout
        backward = without_dispatcher(q, _backward, _backward_op)
        gradients = backward(*inputs, saved, dout, dfinal, ctx.options)
        return *gradients[:5], None if initial_state is None else gradients[5], None, None


def _forward(
    q, k, v, beta, g, initial_state, cu_seqlens, options: DeltaRuleOptions, save: bool
) -> list[Tensor]:
    """Outputs, last states, and what the backward reads: G, inverse, A, inverse norms, E, states."""
    case = _case(q, k, v, beta, initial_state, cu_seqlens, options, save)
    warps = case.plan.warps
    results = case.buffers(q, v, g)
    out, final, G, inverse, A, norms, E, states = results
    tables = chunk_tables(cu_seqlens, case.plan.C, 1, case.chunks)
    chunk_table, first_chunk, offsets = tables or (A, A, A)
    state = A if initial_state is None else initial_state
    case.launch(channel_pairs.decays_kernel, case.per_chunk, warps, scaled=True)(
        q, k, g, G, norms, chunk_table
    )
    case.launch(channel_pairs.pairs_kernel, case.per_block, case.plan.pair_warps)(
        q, k, beta, G, norms, inverse, A, chunk_table
    )
    case.launch(channel_pairs.inverse_kernel, case.per_chunk, INVERSE_WARPS)(inverse, chunk_table)
    case.launch(channel_sweep.sweep_kernel, case.per_slice, warps)(
        q, k, v, beta, G, state, inverse, A, norms, out, E, states, final, offsets, first_chunk
    )
    return results


def _backward(
    q, k, v, beta, g, initial_state, cu_seqlens, saved, dout, dfinal, options: DeltaRuleOptions
) -> list[Tensor]:
    """Gradients of q, k, v, beta, g, and of the initial state if there is one."""
    case = _case(q, k, v, beta, initial_state, cu_seqlens, options, True)
    warps, dout = case.plan.warps, dout.contiguous()
    G, inverse, A, norms, E, states = saved
    tables = chunk_tables(cu_seqlens, case.plan.C, 1, case.chunks)
    chunk_table, first_chunk, offsets = tables or (A, A, A)
    gradients = _new_gradients(q, k, v, beta, g, initial_state)
    dq, dk, dv, dbeta, dg = gradients[:5]
    dinitial = A if initial_state is None else gradients[5]
    dstates, dA, dN = torch.empty_like(states), torch.empty_like(inverse), torch.empty_like(inverse)
    dq_states, dk_states = torch.empty_like(G), torch.empty_like(G)
    case.launch(
        channel_sweep.sweep_backward_kernel, case.per_slice, warps, HAS_DFINAL_STATE=dfinal is not None
    )(
        q, k, beta, G, inverse, A, norms, dout, A if dfinal is None else dfinal.contiguous(), dv, dstates,
        dinitial, offsets, first_chunk,
    )  # fmt: skip
    case.launch(channel_sweep.gradients_kernel, case.per_chunk, warps)(
        q, k, beta, G, norms, E, dv, states, dstates, dout, dA, dN, dq_states, dk_states, dg, dbeta,
        chunk_table,
    )  # fmt: skip
    case.launch(channel_pairs.pair_gradients_kernel, case.per_block, case.plan.pair_warps)(
        q, k, G, norms, dA, dN, dq_states, dk_states, dg, dq, dk, chunk_table
    )
    return gradients


def _new_gradients(q, k, v, beta, g, initial_state) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, v, beta, g, initial_state) if x is not None]


# The same as `torch.library` ops, whose options are plain scalars.


def _forward_op(*arguments: Any) -> list[Tensor]:
    *inputs, options, save = arguments
    return torch.ops.statetrack.channel_delta_rule_forward(*inputs, *options, save)


def _backward_op(*arguments: Any) -> list[Tensor]:
    *tensors, options = arguments
    return torch.ops.statetrack.channel_delta_rule_backward(*tensors, *options)


def _forward_real(*arguments: Any) -> list[Tensor]:
    return _forward(*arguments[:7], DeltaRuleOptions(*arguments[7:-1]), arguments[-1])


def _forward_fake(*arguments: Any) -> list[Tensor]:
    q, _, v, _, g, initial_state, cu_seqlens, *options, save = arguments
    return _Case(q, v, initial_state, cu_seqlens, DeltaRuleOptions(*options), save).buffers(q, v, g)


def _backward_real(*arguments: Any) -> list[Tensor]:
    return _backward(*arguments[:10], DeltaRuleOptions(*arguments[10:]))


def _backward_fake(*arguments: Any) -> list[Tensor]:
    return _new_gradients(*arguments[:6])


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor g, Tensor? initial_state, Tensor? cu_seqlens"
register_op(
    f"channel_delta_rule_forward({_INPUTS}, {OPTIONS_SCHEMA}, bool save) -> Tensor[]",
    _forward_real,
    _forward_fake,
)
register_op(
    f"channel_delta_rule_backward({_INPUTS}, Tensor[] saved, Tensor dout, Tensor? dfinal, {OPTIONS_SCHEMA}) "
    "-> Tensor[]",
    _backward_real,
    _backward_fake,
)
