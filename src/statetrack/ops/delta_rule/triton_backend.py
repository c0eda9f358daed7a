"""The Triton backend of the delta rule: two `torch.library` ops, forward and backward, around the kernels."""

import functools

import torch
from torch import Tensor

from statetrack.ops.delta_rule.reference import floor_decay
from statetrack.ops.delta_rule.triton_chunk_kernels import (
    gradients_kernel,
    outputs_kernel,
    prepare_back_kernel,
    prepare_kernel,
    sweep_back_kernel,
    sweep_kernel,
)
from statetrack.ops.delta_rule.triton_kernels import fused_back_kernel, fused_kernel
from statetrack.ops.delta_rule.triton_launch import launch
from statetrack.ops.delta_rule.triton_plan import Plan, constants, make_plan
from statetrack.ops.derivatives import first_derivative_only, wants_gradient
from statetrack.ops.dispatch import define, direct

_KERNELS = {
    "fused": fused_kernel,
    "fused_back": fused_back_kernel,
    "prepare": prepare_kernel,
    "sweep": sweep_kernel,
    "outputs": outputs_kernel,
    "prepare_back": prepare_back_kernel,
    "sweep_back": sweep_back_kernel,
    "gradients": gradients_kernel,
}


def delta_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor | None,
    *,
    scale: float,
    householders: int,
    l2norm: bool,
    cu_seqlens: Tensor | None,
    beta_from_logits: float | None = None,
    final: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Same arguments and results as `delta_rule_reference`; outputs come in the dtype of v."""
    if q.numel() == 0 or v.numel() == 0:
        from statetrack.ops.delta_rule.chunked import delta_rule_chunked

        rest = {"scale": scale, "householders": householders, "l2norm": l2norm, "cu_seqlens": cu_seqlens}
        return delta_rule_chunked(q, k, v, beta, g, state, **rest)
    if not q.dtype == k.dtype == v.dtype:
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    g = None if g is None else floor_decay(g.float())
    options = scale, householders, l2norm, beta_from_logits or 0.0
    inputs = q, k, v, beta, g, state, cu_seqlens
    if wants_gradient(inputs):
        return _DeltaRule.apply(*inputs, options, final)
    forward = direct(q, _forward, torch.ops.statetrack.delta_rule_forward)
    o, S, *_ = forward(*inputs, *options, False, final)
    return o, S if final else None


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, g, state, cu_seqlens, options, final):
        forward = direct(q, _forward, torch.ops.statetrack.delta_rule_forward)
        o, S, *kept = forward(q, k, v, beta, g, state, cu_seqlens, *options, True, final)
        ctx.save_for_backward(q, k, v, beta, g, state, cu_seqlens, *kept)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return o, S if final else None

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dfinal):
        q, k, v, beta, g, state, cu_seqlens, *kept = ctx.saved_tensors
        if dout is None:
            dout = v.new_zeros(*q.shape[:-1], v.shape[-1])
        backward = direct(q, _backward, torch.ops.statetrack.delta_rule_backward)
        dq, dk, dv, dbeta, dg, dstate = backward(
            q, k, v, beta, g, state, cu_seqlens, kept, dout, dfinal, *ctx.options
        )
        dg, dstate = dg if g is not None else None, dstate if state is not None else None
        return dq, dk, dv, dbeta, dg, dstate, None, None, None


def _plan(q, v, g, state, cu_seqlens, n: int) -> tuple[Plan, int, int]:
    """The plan, the number of sequences, and of chunks (an upper bound where they are packed)."""
    B, T, H, K = q.shape
    sequences = B if cu_seqlens is None else cu_seqlens.numel() - 1
    plain = g is None and state is None and cu_seqlens is None
    # torch.compile may ask with symbols for sizes, which no cache can hold; widths are numbers in any case
    steps, programs = T * n, sequences * H
    plan_for = make_plan if isinstance(steps, int) and isinstance(programs, int) else make_plan.__wrapped__
    plan = plan_for(int(K), int(v.shape[-1]), steps, programs, q.dtype, plain)
    chunks = B * -(-T * n // plan.C)
    # needs no look at the device: each packed sequence wastes less than one chunk
    return plan, sequences, chunks if cu_seqlens is None else chunks + sequences


@functools.lru_cache(maxsize=4096)
def _constants(plan: Plan, kernel: str, shape: tuple[int, int, int], flags: tuple) -> tuple:
    return constants(plan, kernel, _KERNELS[kernel].arg_names, shape, dict(flags))


class _Call:
    """What the launches of one call share: plan, shape and options."""

    def __init__(self, q, v, g, state, cu_seqlens, n, l2norm, sigmoid):
        self.plan, self.sequences, self.chunks = _plan(q, v, g, state, cu_seqlens, n)
        _, self.T, self.H, K = q.shape
        self.shape = K, v.shape[-1], n
        self.flags = (
            ("GATED", g is not None),
            ("PACKED", cu_seqlens is not None),
            ("L2NORM", l2norm),
            ("LOGITS", sigmoid != 0.0),
            ("SIGMOID", sigmoid),
        )

    def run(self, kernel: str, grid: tuple[int, int], *tensors: Tensor, scale=None, **flags: bool) -> None:
        known = _constants(self.plan, kernel, self.shape, (*self.flags, *flags.items()))
        numbers = (self.T, self.H) if scale is None else (self.T, self.H, scale)
        launch(_KERNELS[kernel], grid, tensors, numbers, known, getattr(self.plan, kernel).warps)

    def sweep_grid(self, kernel: str) -> tuple[int, int]:
        return -(-self.shape[1] // getattr(self.plan, kernel).slice), self.sequences * self.H


def _results(
    q, k, v, beta, g, state, cu_seqlens, scale, n, l2norm, sigmoid, save, want_final
) -> list[Tensor]:
    """Empty tensors for outputs, last states, and what the backward reads: A, M, norms, E, states."""
    (B, T, H, K), V = q.shape, v.shape[-1]
    plan, sequences, chunks = _plan(q, v, g, state, cu_seqlens, n)
    C, empty, kept, fused = plan.C, q.new_empty, plan.dtype, plan.fused is not None
    save = save or plan.outputs is not None
    stored = chunks if save and not (fused and T * n <= C) else 0
    return [
        v.new_empty(B, T, H, V),
        empty((sequences, H, K, V) if want_final else (0,), dtype=torch.float32),
        empty((chunks, H, C, C), dtype=torch.float32),
        empty((0,) if fused else (chunks, H, C, C), dtype=kept),
        empty((0,) if fused else (chunks, H, 2, C), dtype=torch.float32),
        empty(v.shape if save or not fused else (0,), dtype=kept),
        empty((stored, H, K, V), dtype=kept),
    ]


def _tables(cu_seqlens: Tensor, chunks: int, C: int, n: int) -> tuple[Tensor, Tensor]:
    """First row and number of rows of every chunk, and the first chunk of every packed sequence."""
    bounds = cu_seqlens.long() * n
    per_sequence = (bounds.diff() + C - 1) // C
    last = per_sequence.cumsum(0)
    first_chunk = last - per_sequence
    chunk = torch.arange(chunks, device=cu_seqlens.device)
    sequence = torch.searchsorted(last, chunk, right=True)
    unused = sequence == last.numel()
    sequence = sequence.clamp(max=last.numel() - 1)
    within = (chunk - first_chunk[sequence]) * C
    start = torch.where(unused, 0, bounds[sequence] + within)
    rows = torch.where(unused, 0, bounds[sequence + 1] - start).clamp(max=C)
    return torch.stack([start, rows], dim=1), first_chunk


def _forward(
    q, k, v, beta, g, state, cu_seqlens, scale, n, l2norm, sigmoid, save, want_final
) -> list[Tensor]:
    q, k, v, beta = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous()
    results = _results(q, k, v, beta, g, state, cu_seqlens, scale, n, l2norm, sigmoid, save, want_final)
    out, final, A, M, norms, E, states = results
    call = _Call(q, v, g, state, cu_seqlens, n, l2norm, sigmoid)
    plan, chunks, H = call.plan, call.chunks, call.H
    gate = beta if g is None else g.contiguous()
    first = A if state is None else state.contiguous()
    flags = {"STATE": state is not None, "SAVE": save or plan.outputs is not None, "FINAL": want_final}
    if plan.fused is not None:
        tensors = q, k, v, beta, gate, first, A, out, E, states, final
        single = call.T * n <= plan.C
        call.run("fused", (call.sequences * H, 1), *tensors, scale=scale, SINGLE=single, **flags)
        return results
    table, first_chunk = (A, A) if cu_seqlens is None else _tables(cu_seqlens, chunks, plan.C, n)
    bounds = A if cu_seqlens is None else cu_seqlens
    call.run("prepare", (chunks, H), q, k, beta, gate, A, M, norms, table, scale=scale)
    tensors = q, k, v, beta, gate, first, A, M, norms, out, E, states, final, bounds, first_chunk
    call.run("sweep", call.sweep_grid("sweep"), *tensors, READ=plan.outputs is None, **flags)
    if plan.outputs is not None:
        call.run("outputs", (chunks, H), q, beta, gate, M, norms, E, states, out, table)
    return results


def _gradients(
    q, k, v, beta, g, state, cu_seqlens, kept, dout, dfinal, scale, n, l2norm, sigmoid
) -> list[Tensor]:
    """Empty tensors for the gradients of q, k, v, beta, g and the state."""
    inputs = [q, k, v, beta, g, state]
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs]


def _backward(
    q, k, v, beta, g, state, cu_seqlens, kept, dout, dfinal, scale, n, l2norm, sigmoid
) -> list[Tensor]:
    q, k, v, beta, dout = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous(), dout.contiguous()
    gradients = _gradients(q, k, v, beta, g, state, cu_seqlens, kept, dout, dfinal, scale, n, l2norm, sigmoid)
    dq, dk, dv, dbeta, dg, dstate = gradients
    A, M, norms, E, states = kept
    call = _Call(q, v, g, state, cu_seqlens, n, l2norm, sigmoid)
    plan, chunks, H = call.plan, call.chunks, call.H
    gate = beta if g is None else g.contiguous()
    last = A if dfinal is None else dfinal.contiguous()
    if plan.fused is not None:
        first = A if state is None else state.contiguous()
        tensors = q, k, beta, gate, first, A, E, states, dout, last, dq, dk, dv, dbeta, dg, dstate
        flags = {"STATE": state is not None, "FINAL": dfinal is not None, "SINGLE": call.T * n <= plan.C}
        call.run("fused_back", (call.sequences * H, 1), *tensors, scale=scale, **flags)
        return gradients
    table, first_chunk = (A, A) if cu_seqlens is None else _tables(cu_seqlens, chunks, plan.C, n)
    bounds = A if cu_seqlens is None else cu_seqlens
    dstates = torch.empty_like(states)
    if plan.prepare_back is not None:
        call.run("prepare_back", (chunks, H), q, gate, M, norms, dout, dv, dstates, table)
    flags = {
        "FINAL": dfinal is not None,
        "DSTATE": state is not None,
        "PREPARED": plan.prepare_back is not None,
    }
    tensors = q, k, beta, gate, A, M, norms, dout, last, dv, dstates, dstate, bounds, first_chunk
    call.run("sweep_back", call.sweep_grid("sweep_back"), *tensors, **flags)
    tensors = q, k, beta, gate, M, norms, E, dv, states, dstates, dout, dq, dk, dbeta, dg, table
    if plan.apart and g is None:
        call.run("gradients", (chunks, H), *tensors, DQ=True, DK=False)
        call.run("gradients", (chunks, H), *tensors, DQ=False, DK=True)
    else:
        call.run("gradients", (chunks, H), *tensors, DQ=True, DK=True)
    return gradients


_SHARED = "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, Tensor? state, Tensor? cu_seqlens"
_OPTIONS = "float scale, int n, bool l2norm, float sigmoid"
define(
    f"delta_rule_forward({_SHARED}, {_OPTIONS}, bool save, bool want_final) -> Tensor[]", _forward, _results
)
define(
    f"delta_rule_backward({_SHARED}, Tensor[] kept, Tensor dout, Tensor? dfinal, {_OPTIONS}) -> Tensor[]",
    _backward,
    _gradients,
)
