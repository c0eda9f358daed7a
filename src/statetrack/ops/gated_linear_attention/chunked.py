"""Gated linear attention in chunks, in plain PyTorch. Runs on any device.

For one chunk of C steps with state S0 entering, P_t = a_1 ... a_t and X_t = a_{t+1} ... a_C,

    O = (P o Q) S0 + A V        S1 = P_C o S0 + (X o K)^T V        A_ts = sum_k q_tk (a_{s+1} ... a_t)_k k_sk

No logarithm is taken and nothing is divided: every product of gates is formed from the gates themselves, so
that signs, zeros and gates of 1e-8 need no case of their own, and neither do their gradients. P, X and A are
built by doubling: of two neighbouring blocks of m steps, the lower left part of A is

    A_ts = (P_t o q_t) . (X_s o k_s)        t in the second block, s in the first

with P counted from the start of the second block and X to the end of the first, one matrix product for all
pairs of blocks. Derivation: docs/internals/gates.md.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from statetrack.ops.autograd import first_derivative_only
from statetrack.ops.checks import can_look
from statetrack.ops.delta_rule.layout import DenseLayout, PackedLayout
from statetrack.ops.gated_linear_attention.reference import gated_linear_attention_reference
from statetrack.ops.gated_linear_attention.rotation import both_of_pair, fold_angles

CHUNK = 64
GROUP = 1 << 20  # numbers of q and v in chunks that are computed at once: more would leave the cache
KEEP = 1 << 24  # with more numbers than that in all, the backward pass computes the chunks again
SMALL = 2  # blocks of this many steps are too small for a batched matrix product


def gated_linear_attention_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    angle: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `gated_linear_attention_reference`.

    A NaN or infinity of step t would make all outputs of its chunk NaN, since the zeros above the diagonal of
    A meet it. Where numbers can be looked at for free, on a CPU, such a call is repeated step by step, and
    outputs before t are as if it were not there.
    """
    o, state = _in_chunks(q, k, v, a, angle, initial_state, cu_seqlens, scale)
    # a bad k, v or gate stays in the state
    if can_look(o) and not bool(state.detach().sum().isfinite()):
        return gated_linear_attention_reference(q, k, v, a, angle, initial_state, cu_seqlens, scale)
    return o, state


def _in_chunks(q, k, v, a, angle, initial_state, cu_seqlens, scale) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, a = (x.to(dtype) for x in (q, k, v, a))
    (B, T, H, K), V = q.shape, v.shape[-1]
    sequences = B if cu_seqlens is None else cu_seqlens.numel() - 1
    state = q.new_zeros(sequences, H, K, V) if initial_state is None else initial_state.to(dtype)
    if B == 0 or T == 0:
        return v.new_zeros(B, T, H, V), state
    unfold = None
    if angle is not None:
        q, k, unfold = fold_angles(q, k, angle, cu_seqlens)
        a = a if a.ndim == 3 else both_of_pair(a)
    layout = _layout(B, T, cu_seqlens)
    a = _chunk_gates(a[..., None] if a.ndim == 3 else a, layout)
    q, k, v = layout.to_chunks(scale * q), layout.to_chunks(k), layout.to_chunks(v)
    O, state = _all_chunks(q, k, v, a, state, layout)
    if unfold is not None:
        state = unfold(state)
    return layout.from_chunks(O), state


def _layout(B: int, T: int, cu_seqlens: Tensor | None) -> DenseLayout | PackedLayout:
    """Chunks of a power of two of steps, at most CHUNK."""
    longest = T if cu_seqlens is None else int(cu_seqlens.diff().max())
    chunk = min(CHUNK, 1 << (longest - 1).bit_length())
    return DenseLayout(B, T, chunk, -(-T // chunk)) if cu_seqlens is None else PackedLayout(cu_seqlens, chunk)


def _chunk_gates(a: Tensor, layout: DenseLayout | PackedLayout) -> Tensor:
    """The gates in chunks, where padding holds 1: the steps behind a sequence's end leave its state alone."""
    inside = layout.to_chunks(a.new_ones(*a.shape[:2], 1, 1))
    return layout.to_chunks(a) + (1 - inside)


def _all_chunks(q, k, v, a, state, layout) -> tuple[Tensor, Tensor]:
    """Outputs of every chunk (chunks, H, C, V) and the last states."""
    numbers = q.numel() + v.numel()
    group = max(1, q.shape[0] * GROUP // numbers)
    inputs = zip(*(x.split(group) for x in (q, k, v, a)), strict=True)
    if numbers > KEEP and torch.is_grad_enabled():
        parts = [checkpoint(_within_chunks, *part, use_reentrant=False) for part in inputs]
    else:
        parts = [_within_chunks(*part) for part in inputs]
    O, q_in, U, E = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    entering, final = _States.apply(U, E, state, layout)
    return O + q_in @ entering, final


def _within_chunks(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What chunks (n, H, C, .) compute without the state that enters them.

    The outputs of their own steps A V, the queries P o Q that meet the entering state, what the chunk adds
    to it, (X o K)^T V, and what it keeps of it, P_C (n, H, K, 1).
    """
    if a.shape[-1] == 1:  # one gate per head: the decays (C, C) are the same for all channels
        ones = a.new_ones(1)
        D, P, X = _by_doubling(ones, ones, a)
        A = (q @ k.mT) * D
    else:
        A, P, X = _by_doubling(q, k, a)
    return A @ v, P * q, (X * k).mT @ v, P[..., -1, :, None]


def _by_doubling(q: Tensor, k: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A (n, H, C, C), P and X (n, H, C, K) of chunks, from blocks of 1, 2, 4, ... steps."""
    C, m = a.shape[-2], 1
    # (n, H, blocks, m, .)
    P, X = a[..., None, :], torch.ones_like(a)[..., None, :]
    A = (q * k).sum(-1).expand(a.shape[:-1])[..., None, None]
    q, k = q.expand_as(a), k.expand_as(a)
    while m < C:
        (A0, A1), (P0, P1), (X0, X1) = (x.unflatten(-3, (-1, 2)).unbind(-3) for x in (A, P, X))
        q1 = q.unflatten(-2, (-1, 2, m)).select(-3, 1)
        k0 = k.unflatten(-2, (-1, 2, m)).select(-3, 0)
        lower = _products(P1 * q1, X0 * k0)
        A = torch.cat([torch.cat([A0, torch.zeros_like(A0)], -1), torch.cat([lower, A1], -1)], -2)
        P, X = (
            torch.cat([P0, P0[..., -1:, :] * P1], -2),
            torch.cat([X0 * P1[..., -1:, :], X1], -2),
        )
        m *= 2
    return A.squeeze(-3), P.squeeze(-3), X.squeeze(-3)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """q k^T of blocks (..., m, K)."""
    if q.shape[-1] == 1:
        return q * k.mT
    if q.shape[-2] <= SMALL:
        return (q[..., :, None, :] * k[..., None, :, :]).sum(-1)
    return q @ k.mT


class _States(torch.autograd.Function):
    """S_{c+1} = E_c o S_c + U_c over the chunks of every sequence: the states that enter, and the last."""

    @staticmethod
    def forward(ctx, U: Tensor, E: Tensor, state: Tensor, layout):
        S = layout.sort_states(state).clone()
        entering = torch.empty_like(U)
        for start, stop in layout.slices():
            active = S[: stop - start]
            entering[start:stop] = active
            active *= E[start:stop]
            active += U[start:stop]
        ctx.save_for_backward(E, entering)
        ctx.layout = layout
        return entering, layout.unsort_states(S)

    @staticmethod
    @first_derivative_only
    def backward(ctx, d_entering, d_final):
        (E, entering), layout = ctx.saved_tensors, ctx.layout
        D = layout.sort_states(d_final).clone()
        dU = torch.empty_like(entering)
        for start, stop in reversed(layout.slices()):
            active = D[: stop - start]
            dU[start:stop] = active
            active *= E[start:stop]
            active += d_entering[start:stop]
        dE = (dU * entering).sum(-1, keepdim=True)
        dE = dE if E.shape[-2] > 1 else dE.sum(-2, keepdim=True)
        return dU, dE, layout.unsort_states(D), None
