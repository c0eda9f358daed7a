"""The delta rule as a loop over time: the definition every other backend is tested against."""

import itertools

import torch
from torch import Tensor

from statetrack.ops.checks import can_look
from statetrack.ops.delta_rule.options import HARD_BETA_MARGIN, DeltaRuleOptions
from statetrack.ops.gated_linear_attention.rotation import both_of_pair, rotate

BETAS = ("sigmoid", "hard")  # how `beta_values` makes them of logits, for the options of layers


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: DeltaRuleOptions,
    a: Tensor | None = None,
    angle: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence of Eq. 1 with the DeltaNet row of Table 1.

        S_t = (I - beta_t k_t k_t^T) diag(a_t) R(angle_t) S_{t-1} + beta_t k_t v_t^T     o_t = scale S_t^T q_t

    Shapes: q (B, T, H, K); k (B, T n, H, K); v (B, T n, H, V); beta (B, T n, H); initial_state (N, H, K, V),
    where n = `householders` and N is B, or the number of packed sequences. The gate is a = exp(g), or `a`
    itself: one per head (B, T, H), per channel (B, T, H, K), or with an angle (B, T, H, K/2) per pair of
    channels. With ||k_t|| = 1 and no gate the transition has eigenvalue 1 - beta_t once and 1 elsewhere, so
    beta in [0, 2] gives the range [-1, 1] of Eq. 2. A token makes n such steps, is multiplied by its gate
    before the first and read after the last (DeltaProduct). Returns the outputs and the last state of every
    sequence.
    """
    beta = beta_values(beta, options.beta_from_logits, options.hard_beta)
    scale, householders = options.scale, options.householders
    if cu_seqlens is not None:
        return _one_by_one(q, k, v, beta, g, initial_state, cu_seqlens, options, a, angle)

    # Halves accumulate in float32, float64 stays.
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    if options.l2norm:
        q, k = l2_normalise(q), l2_normalise(k)
    (B, T, H, K), V = q.shape, v.shape[-1]
    S = q.new_zeros(B, H, K, V) if initial_state is None else initial_state.to(dtype)
    a = a if g is None else g.to(dtype).exp()
    if a is not None:
        a = a.to(dtype)
        a = a[..., None] if a.ndim == 3 else a if angle is None else both_of_pair(a)
    outputs = []
    for t in range(T):
        if angle is not None:
            turn = angle[:, t, :, :, None].to(dtype)
            S = rotate(S, turn.cos(), turn.sin(), dim=-2)
        if a is not None:
            S = a[:, t, :, :, None] * S
        for i in range(t * householders, (t + 1) * householders):
            error = v[:, i] - torch.einsum("bhkv,bhk->bhv", S, k[:, i])
            S = S + torch.einsum("bhk,bhv->bhkv", beta[:, i, :, None] * k[:, i], error)
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, dim=1) if outputs else v.new_zeros(B, 0, H, V), S


def _one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor,
    options: DeltaRuleOptions,
    a: Tensor | None,
    angle: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Each packed sequence as a call of its own; `beta` holds no logits any more."""
    n, options = options.householders, options._replace(beta_from_logits=None)
    results = [
        delta_rule_reference(
            q[:, start:stop],
            k[:, start * n : stop * n],
            v[:, start * n : stop * n],
            beta[:, start * n : stop * n],
            None if g is None else g[:, start:stop],
            None if initial_state is None else initial_state[i : i + 1],
            None,
            options,
            None if a is None else a[:, start:stop],
            None if angle is None else angle[:, start:stop],
        )
        for i, (start, stop) in enumerate(itertools.pairwise(cu_seqlens.tolist()))
    ]
    return torch.cat([o for o, _ in results], dim=1), torch.cat([S for _, S in results], dim=0)


def beta_values(beta: Tensor, beta_from_logits: float | None, hard: bool = False) -> Tensor:
    """beta itself; or from logits x, with s = `beta_from_logits` and in float32 at least

        s sigmoid(x)        or, if `hard`, with m = 0.01:        s clamp((1 + 2 m) sigmoid(x) - m, 0, 1)

    The latter is 0 or s, with a gradient of 0, where |x| is above 4.6: a reflection can be exact.
    """
    if beta_from_logits is None:
        return beta
    share = torch.sigmoid(beta.to(torch.promote_types(beta.dtype, torch.float32)))
    if hard:
        share = ((1 + 2 * HARD_BETA_MARGIN) * share - HARD_BETA_MARGIN).clamp(0, 1)
    return beta_from_logits * share


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(||x||^2 + eps) along the last axis, as in flash-linear-attention."""
    return x * inverse_norm(x, eps)


def inverse_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """1 / sqrt(||x||^2 + eps) along the last axis, also where ||x||^2 is too large for the dtype."""
    squares = x.square().sum(-1, keepdim=True)
    if can_look(x) and bool(squares.isfinite().all()):
        return torch.rsqrt(squares + eps)
    # rows that overflow are measured in another unit; their own is 1, which changes no bit of the others
    large = 2.0**-67 if x.dtype == torch.float32 else 2.0**-520
    unit = torch.where(squares.detach().isinf(), large, 1.0).to(x.dtype)
    return unit * torch.rsqrt((unit * x).square().sum(-1, keepdim=True) + eps * unit * unit)


def floor_decay(g: Tensor) -> Tensor:
    """g with a lower bound at which exp(g) is zero for all purposes.

    Chunked forms take differences of running sums of g: without the bound g = -10000 would leave too few
    bits for the decays after it, and g = -inf would make them NaN.
    """
    return g.clamp(min=-40.0 if g.dtype == torch.float32 else -700.0)
