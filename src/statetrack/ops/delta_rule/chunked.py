"""The delta rule in chunks, in plain PyTorch, with a hand-written backward. Runs on any device.

For one chunk of C steps with state S0 entering, rows of Q, K, V, column b, and G the log-decay summed from
the chunk's start (G = 0 without a gate):

    P = strictly_lower(K K^T o exp(G_i - G_j))      M = I + diag(b) P
    A = lower(Q K^T o exp(G_i - G_j))               U = M^-1 diag(b) (V - exp(G) K S0)
    O = exp(G) Q S0 + A U                           S1 = exp(G_C) S0 + (exp(G_C - G) K)^T U

b in [0, 2] changes no equation. Only U and S depend on the chunk before, so everything else is computed for
all chunks at once and the loop over chunks holds two matrix products. Arithmetic is float32 (float64 for
float64 inputs) at every length: near b = 2 rounding errors do not decay, and half precision would not
suffice. Derivation, forward and backward: docs/delta_rule.md, "Forward" and "Backward".
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only
from statetrack.ops.checks import can_look
from statetrack.ops.delta_rule.head_decay import GateGradient, readable, token_decay
from statetrack.ops.delta_rule.layout import DenseLayout, PackedLayout, make_layout
from statetrack.ops.delta_rule.options import DeltaRuleOptions
from statetrack.ops.delta_rule.reference import (
    beta_values,
    delta_rule_reference,
    floor_decay,
    inverse_norm,
    l2_normalise,
)


def delta_rule_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: DeltaRuleOptions,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `delta_rule_reference`.

    A NaN or infinity of step t would make all outputs of its chunk NaN, since the zeros above the diagonal of
    A and M^-1 meet it. Where numbers can be looked at for free, on a CPU, such a call is repeated step by
    step, and outputs before t are as if it were not there.
    """
    o, final_state = _in_chunks(q, k, v, beta, g, initial_state, cu_seqlens, options)
    # a row of the state sums over all steps: where one is bad, so is the row
    if can_look(o) and not bool(final_state[..., :1, :].detach().sum().isfinite()):
        return delta_rule_reference(q, k, v, beta, g, initial_state, cu_seqlens, options)
    return o, final_state


def _in_chunks(q, k, v, beta, g, initial_state, cu_seqlens, options) -> tuple[Tensor, Tensor]:
    beta, householders = beta_values(beta, options.beta_from_logits), options.householders
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    g = None if g is None else floor_decay(g.to(dtype))
    initial_state = None if initial_state is None else initial_state.to(dtype)
    if q.shape[0] == 0 or q.shape[1] == 0:
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        empty = q.new_zeros(sequences, q.shape[2], q.shape[3], v.shape[3])
        return v.new_zeros(*q.shape[:3], v.shape[3]), empty if initial_state is None else initial_state
    scalars = options.scale, householders, options.l2norm
    tokens = segment_length(q.shape[0] * q.shape[2] * max(q.shape[3], v.shape[3]) * householders)
    if cu_seqlens is not None or q.shape[1] <= tokens:
        layout = make_layout(q, cu_seqlens, householders)
        return _Chunked.apply(q, k, v, beta, g, initial_state, *scalars, layout)
    return _in_segments(q, k, v, beta, g, initial_state, scalars, tokens)


def segment_length(numbers_per_token: int) -> int:
    """Tokens per segment. Above some millions of numbers, allocation costs more than the arithmetic."""
    return max(1024, (1 << 21) // numbers_per_token)


def _in_segments(q, k, v, beta, g, state, scalars, tokens: int) -> tuple[Tensor, Tensor]:
    """The same, one segment of time after the other, with the state carried over."""
    householders = scalars[1]
    gates = [None] * -(-q.shape[1] // tokens) if g is None else g.split(tokens, 1)
    segments = zip(
        q.split(tokens, 1), *(x.split(tokens * householders, 1) for x in (k, v, beta)), gates, strict=True
    )
    outputs = []
    for segment in segments:
        o, state = _Chunked.apply(*segment, state, *scalars, make_layout(segment[0], None, householders))
        outputs.append(o)
    assert state is not None
    return torch.cat(outputs, dim=1), state


@dataclass
class _Chunk:
    """What every chunk knows without the state that enters it. Leading axes (chunks, heads) throughout."""

    q: Tensor  # scale q                                    (C, K)
    k: Tensor  #                                            (C n, K)
    v: Tensor  #                                            (C n, V)
    beta: Tensor  #                                         (C n, 1)
    P: Tensor  # K K^T o exp(G_i - G_j), lower part valid   (C n, C n)
    A: Tensor  # lower(Q K^T o exp(G_i - G_j))              (C, C n)
    k_in: Tensor  # exp(G) k, what meets the entering state
    q_in: Tensor  # exp(G) q, the same for queries
    k_out: Tensor  # exp(G_C - G) k, what reaches the leaving state
    G: Tensor | None  # (C n, 1)
    end: Tensor | None  # exp(G_C), the decay of the state   (1, 1)

    @classmethod
    def make(cls, q, k, v, beta, g, householders: int, layout: DenseLayout | PackedLayout) -> "_Chunk":
        q, k, v, beta = (
            layout.to_chunks(q),
            layout.to_chunks(k, householders),
            layout.to_chunks(v, householders),
            layout.to_chunks(beta[..., None], householders),
        )
        P, A = k @ k.mT, q @ k.mT
        if g is None:
            return cls(q, k, v, beta, P, A.mul_(readable(A, householders)), k, q, k, None, None)
        G = layout.to_chunks(g[..., None]).cumsum(-2)
        G_q, G = G, G.repeat_interleave(householders, dim=-2)
        # exp only where i >= j: above the diagonal the difference is positive and may overflow
        A = A * (G_q - G.mT).masked_fill(readable(A, householders) == 0, -torch.inf).exp()
        P = P * (G - G.mT).masked_fill(torch.ones_like(P).triu(1) != 0, -torch.inf).exp()
        end = G[..., -1:, :]
        return cls(q, k, v, beta, P, A, G.exp() * k, G_q.exp() * q, (end - G).exp() * k, G, end.exp())


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, g, state, scale, householders, l2norm, layout):
        ctx.save_for_backward(q, k, v, beta, g)
        ctx.set_materialize_grads(False)
        if l2norm:
            q, k = l2_normalise(q), l2_normalise(k)
        c = _Chunk.make(scale * q, k, v, beta, g, householders, layout)
        inverse = _unit_lower_inverse(c.beta * c.P)  # M^-1
        U = inverse @ (c.beta * c.v)
        entering, W, final = None, None, None
        if state is None and layout.steps == 1 and c.k.shape[0] == layout.sequences:  # no state to carry
            final = c.k_out.mT @ U
        else:
            W = inverse @ (c.beta * c.k_in)
            entering, final = _run_states(c, U, W, state, layout)
        O = c.A @ U
        if entering is not None:
            O += c.q_in @ entering
        ctx.saved = (inverse, U, W, entering) if any(ctx.needs_input_grad) else None
        ctx.options = scale, householders, l2norm, layout
        return layout.from_chunks(O).contiguous(), layout.unsort_states(final)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dO, dS):
        q, k, v, beta, g = ctx.saved_tensors
        inverse, U, W, entering = ctx.saved
        scale, householders, l2norm, layout = ctx.options
        q_n, k_n = (l2_normalise(q), l2_normalise(k)) if l2norm else (q, k)
        c = _Chunk.make(scale * q_n, k_n, v, beta, g, householders, layout)
        dO = c.v.new_zeros(*c.q.shape[:-1], c.v.shape[-1]) if dO is None else layout.to_chunks(dO)

        dU = c.A.mT @ dO
        # gradients of the state leaving each chunk, and of the first one entering
        leaving, dinitial_state = None, None
        if entering is not None:
            leaving, dinitial_state = _run_state_gradients(c, dO, dU, W, dS, layout)
        elif dS is not None:
            leaving = layout.sort_states(dS)
            dU += c.k_out @ leaving
        dq, dk, dv, dbeta, dg = _input_gradients(c, inverse, U, dU, dO, entering, leaving, householders)

        dq, dk = scale * layout.from_chunks(dq), layout.from_chunks(dk, householders)
        if l2norm:
            dq, dk = _l2_backward(dq, q, q_n), _l2_backward(dk, k, k_n)
        dg = None if dg is None else layout.from_chunks(dg[..., None]).squeeze(-1)
        dbeta = layout.from_chunks(dbeta, householders).squeeze(-1)
        dinitial_state = dinitial_state if ctx.needs_input_grad[5] else None
        return dq, dk, layout.from_chunks(dv, householders), dbeta, dg, dinitial_state, None, None, None, None


def _unit_lower_inverse(L: Tensor) -> Tensor:
    """(I + strictly_lower(L))^-1; the solver reads nothing on or above the diagonal."""
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(L, eye.expand_as(L), upper=False, unitriangular=True)


def _run_states(c: _Chunk, U: Tensor, W: Tensor, state: Tensor | None, layout) -> tuple[Tensor, Tensor]:
    """Loop over chunks: finish U in place, return the state entering every chunk and each sequence's last."""
    shape = (layout.sequences, U.shape[1], c.k.shape[-1], U.shape[-1])
    S = U.new_zeros(shape) if state is None else layout.sort_states(state).clone()
    entering = U.new_empty(U.shape[0], *shape[1:])
    k_out = c.k_out.mT
    for start, stop in layout.slices():
        active = S[: stop - start]
        entering[start:stop] = active
        u = U[start:stop]
        u -= W[start:stop] @ active
        if c.end is not None:
            active *= c.end[start:stop]
        active += k_out[start:stop] @ u
    return entering, S


def _run_state_gradients(c: _Chunk, dO, dU, W, dS, layout) -> tuple[Tensor, Tensor]:
    """Loop over chunks backwards: finish dU in place, return the gradients of leaving states."""
    direct = c.q_in.mT @ dO  # what O sends straight to the entering state
    shape = (layout.sequences, *direct.shape[1:])
    D = direct.new_zeros(shape) if dS is None else layout.sort_states(dS).clone()
    leaving = torch.empty_like(direct)
    W = W.mT
    for start, stop in reversed(layout.slices()):
        active = D[: stop - start]
        leaving[start:stop] = active
        du = dU[start:stop]
        du += c.k_out[start:stop] @ active
        if c.end is not None:
            active *= c.end[start:stop]
        active += direct[start:stop]
        active -= W[start:stop] @ du
    return leaving, layout.unsort_states(D)


def _input_gradients(c: _Chunk, inverse, U, dU, dO, entering, leaving, householders: int):
    """Gradients of q, k, v, beta and g of every chunk, once dU and the states around it are known."""
    read = slice(householders - 1, None, householders)  # a token's last step, after which it is read
    X = inverse.mT @ dU  # gradient of diag(b) (V - k_in S0)
    residual = c.v if entering is None else c.v - c.k_in @ entering
    dL = (X @ U.mT).tril_(-1).neg_()
    dbeta = (X * residual).sum(-1, keepdim=True) + (dL * c.P).sum(-1, keepdim=True)
    dv = c.beta * X
    dP, dA = dL.mul_(c.beta), dO @ U.mT  # in place: dL is not read again

    gate = None
    if c.G is None:
        dA *= readable(dA, householders)
    else:
        gate = GateGradient(dP * c.P, dA * c.A, householders)
        decay = (c.G - c.G.mT).masked_fill(torch.ones_like(dP).triu(1) != 0, -torch.inf).exp()
        dP *= decay
        dA *= decay if householders == 1 else token_decay(c.G, householders)
    sym = dP + dP.mT
    dq, dk = dA @ c.k, sym @ c.k
    dk.add_(dA.mT @ c.q)
    if entering is not None:
        dk_in, dq_in = dv @ entering.mT, dO @ entering.mT
        dq += dq_in if c.G is None else dq_in * c.G[..., read, :].exp()
        dk -= dk_in if c.G is None else dk_in * c.G.exp()
        if gate is not None:
            gate.add_entering((dq_in * c.q_in).sum(-1), (dk_in * c.k_in).sum(-1))
    if leaving is not None:
        dk_out = U @ leaving.mT
        dk += dk_out if c.G is None else dk_out * (c.G[..., -1:, :] - c.G).exp()
        if gate is not None:
            gate.add_leaving((dk_out * c.k_out).sum(-1))
            if entering is not None and c.end is not None:
                gate.dg += c.end[..., 0] * (leaving * entering).sum((-2, -1))[..., None]
    return dq, dk, dv, dbeta, None if gate is None else gate.dg


def _l2_backward(dy: Tensor, x: Tensor, y: Tensor, eps: float = 1e-6) -> Tensor:
    """Gradient of `l2_normalise` at x, where y is its value."""
    return inverse_norm(x, eps) * (dy - y * (y * dy).sum(-1, keepdim=True))
