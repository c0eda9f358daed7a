"""The delta rule in chunks with gates given as numbers, in plain PyTorch: any size, sign, and zero.

For one chunk of C steps with state S0 entering, P_t = a_1 ... a_t and X_t = a_{t+1} ... a_C (products per
channel), and with D_ts = a_{s+1} ... a_t between the steps s <= t,

    L_ts = b_t sum_k k_tk D_ts k_sk  (t > s)         A_ts = sum_k q_tk D_ts k_sk  (t >= s)
    U = (I + L)^-1 diag(b) (V - (P o K) S0)
    O = (P o Q) S0 + A U                             S1 = P_C o S0 + (X o K)^T U

No logarithm is taken and nothing is divided: all products of gates are built by doubling (`gate_products`),
so that signs, zeros and gates of 1e-8 need no case of their own, and neither do their gradients. Angles are
folded into q and k first. Derivation: docs/internals/gates.md.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from statetrack.ops.autograd import first_derivative_only
from statetrack.ops.checks import can_look
from statetrack.ops.delta_rule.gate_products import gate_products
from statetrack.ops.delta_rule.gates import Gate, fold, gated_reference
from statetrack.ops.delta_rule.layout import DenseLayout, PackedLayout
from statetrack.ops.delta_rule.options import DeltaRuleOptions
from statetrack.ops.delta_rule.reference import beta_values, l2_normalise
from statetrack.ops.gated_linear_attention.rotation import both_of_pair

GROUP = 1 << 20  # numbers of k and v in chunks that are computed at once: more would leave the cache
KEEP = 1 << 23  # with more numbers than that in all, the backward pass computes the chunks again


def gated_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gate: Gate,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: DeltaRuleOptions,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `gated_reference`.

    As in `delta_rule_chunked`, a call with NaN or infinity is repeated step by step where numbers can be
    looked at for free, so that outputs before it are as if it were not there.
    """
    o, final_state = _in_chunks(q, k, v, beta, gate, initial_state, cu_seqlens, options)
    if can_look(o) and not bool(final_state[..., :1, :].detach().sum().isfinite()):
        return gated_reference(q, k, v, beta, gate, initial_state, cu_seqlens, options)
    return o, final_state


def _in_chunks(q, k, v, beta, gate: Gate, initial_state, cu_seqlens, options) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    beta = beta_values(beta, options.beta_from_logits, options.hard_beta)
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    (B, T, H, K), V, n = q.shape, v.shape[-1], options.householders
    sequences = B if cu_seqlens is None else cu_seqlens.numel() - 1
    state = q.new_zeros(sequences, H, K, V) if initial_state is None else initial_state.to(dtype)
    if B == 0 or T == 0:
        return v.new_zeros(B, T, H, V), state
    if options.l2norm:
        q, k = l2_normalise(q), l2_normalise(k)
    a, unfold = gate.values(), None
    if gate.angle is not None:
        q, k, _, unfold = fold(q, k, Gate(None, None, None, gate.angle), cu_seqlens, n)
        a = both_of_pair(a) if a is not None and a.ndim == 4 else a
    a = q.new_ones(B, T, H) if a is None else a.to(dtype)
    a = a[..., None] if a.ndim == 3 else a
    q = options.scale * q
    if n > 1:  # a token as n steps: its gate stands before the first, and the last one is read
        q, a = _at_step(q, n, n - 1, 0.0), _at_step(a, n, 0, 1.0)
        cu_seqlens = None if cu_seqlens is None else n * cu_seqlens
    layout = _layout(B, T * n, K, cu_seqlens)
    a = layout.to_chunks(a) + (1 - layout.to_chunks(a.new_ones(*a.shape[:2], 1, 1)))  # 1 in the padding
    q, k, v, beta = (layout.to_chunks(x) for x in (q, k, v, beta[..., None]))
    O, state = _all_chunks(q, k, v, beta, a, state, layout)
    o = layout.from_chunks(O)
    return o if n == 1 else o[:, n - 1 :: n], state if unfold is None else unfold(state)


def _at_step(x: Tensor, n: int, step: int, other: float) -> Tensor:
    """(B, T, ...) -> (B, T n, ...): x at this step of every token, and `other` at its other steps."""
    rest = torch.full_like(x, other)
    return torch.stack([x if i == step else rest for i in range(n)], dim=2).flatten(1, 2)


def _layout(B: int, T: int, K: int, cu_seqlens: Tensor | None) -> DenseLayout | PackedLayout:
    """Chunks of a power of two of steps: 32, or 64 for heads wider than 64."""
    longest = T if cu_seqlens is None else int(cu_seqlens.diff().max())
    chunk = min(32 if K <= 64 else 64, 1 << (longest - 1).bit_length())
    return DenseLayout(B, T, chunk, -(-T // chunk)) if cu_seqlens is None else PackedLayout(cu_seqlens, chunk)


def _all_chunks(q, k, v, beta, a, state, layout) -> tuple[Tensor, Tensor]:
    """Outputs of every chunk (chunks, H, C, V) and the last states."""
    numbers = k.numel() + v.numel()
    group = max(1, k.shape[0] * GROUP // numbers)
    inputs = zip(*(x.split(group) for x in (q, k, v, beta, a)), strict=True)
    if numbers > KEEP and torch.is_grad_enabled():
        parts = [checkpoint(_within_chunks, *part, use_reentrant=False) for part in inputs]
    else:
        parts = [_within_chunks(*part) for part in inputs]
    A, U, W, q_in, k_out, end = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    U, entering, final = _States.apply(U, W, k_out, end, state, layout)
    return A @ U + q_in @ entering, final


def _within_chunks(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, a: Tensor) -> tuple[Tensor, ...]:
    """What chunks (n, H, C, .) compute without the state that enters them.

    A; U without that state; W = (I + L)^-1 diag(b) (P o K), which takes it off; P o Q; X o K; and P_C, of
    shape (n, H, K, 1).
    """
    if a.shape[-1] == 1:  # one gate per head: the decays (C, C) are the same for all channels
        D, P, X = gate_products(torch.ones_like(a)[:, :, None], torch.ones_like(a), a)
        KK, A = (k @ k.mT) * D[:, :, 0], (q @ k.mT) * D[:, :, 0]
    else:
        pairs, P, X = gate_products(torch.stack([k, q], dim=2), k, a)
        KK, A = pairs.unbind(2)
    right = beta * torch.cat([v, P * k], dim=-1)
    # reads nothing on or above the diagonal
    solved = torch.linalg.solve_triangular(beta * KK, right, upper=False, unitriangular=True)
    U, W = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    return A, U, W, P * q, X * k, P[..., -1, :, None]


class _States(torch.autograd.Function):
    """U_c = U_c - W_c S_c,  S_{c+1} = E_c o S_c + K_c^T U_c over the chunks of every sequence.

    Returns U, the states that enter the chunks, and the last states.
    """

    @staticmethod
    def forward(ctx, U: Tensor, W: Tensor, k_out: Tensor, E: Tensor, state: Tensor, layout):
        S = layout.sort_states(state).clone()
        entering = U.new_empty(U.shape[0], *S.shape[1:])
        U, k_t = U.clone(), k_out.mT
        for start, stop in layout.slices():
            active, u = S[: stop - start], U[start:stop]
            entering[start:stop] = active
            u -= W[start:stop] @ active
            active *= E[start:stop]
            active += k_t[start:stop] @ u
        ctx.save_for_backward(U, W, k_out, E, entering)
        ctx.layout = layout
        return U, entering, layout.unsort_states(S)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dU, d_entering, d_final):
        (U, W, k_out, E, entering), layout = ctx.saved_tensors, ctx.layout
        D = layout.sort_states(d_final).clone()
        dU, leaving, W_t = dU.clone(), torch.empty_like(entering), W.mT
        for start, stop in reversed(layout.slices()):
            active, du = D[: stop - start], dU[start:stop]
            leaving[start:stop] = active
            du += k_out[start:stop] @ active
            active *= E[start:stop]
            active += d_entering[start:stop]
            active -= W_t[start:stop] @ du
        dE = (leaving * entering).sum(-1, keepdim=True)
        dE = dE if E.shape[-2] > 1 else dE.sum(-2, keepdim=True)
        return dU, -(dU @ entering.mT), U @ leaving.mT, dE, layout.unsort_states(D), None
