"""The delta rule as a loop over time: the definition every other backend is tested against."""

import itertools

import torch
from torch import Tensor


def delta_rule_reference(
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
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence of Eq. 1 with the DeltaNet row of Table 1.

        S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t

    Shapes: q (B, T, H, K); k (B, T n, H, K); v (B, T n, H, V); beta (B, T n, H); g (B, T, H);
    state (N, H, K, V), where n = `householders` and N is B, or the number of packed sequences.
    With ||k_t|| = 1 the transition has eigenvalue 1 - beta_t once and 1 elsewhere, so beta in [0, 2]
    gives the range [-1, 1] of Eq. 2. A token makes n such steps, decays before the first and is read
    after the last (DeltaProduct). Returns the outputs and the last state of every sequence, which a backend
    may leave out, as None, unless `final`. With `beta_from_logits`, beta is given as `strengths` describes.
    """
    beta = strengths(beta, beta_from_logits)
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        parts = [
            delta_rule_reference(
                q[:, start:stop],
                k[:, start * householders : stop * householders],
                v[:, start * householders : stop * householders],
                beta[:, start * householders : stop * householders],
                None if g is None else g[:, start:stop],
                None if state is None else state[i : i + 1],
                scale=scale,
                householders=householders,
                l2norm=l2norm,
                cu_seqlens=None,
            )
            for i, (start, stop) in enumerate(itertools.pairwise(bounds))
        ]
        return torch.cat([o for o, _ in parts], dim=1), torch.cat([S for _, S in parts], dim=0)

    # Halves accumulate in float32, float64 stays.
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    if l2norm:
        q, k = l2_normalise(q), l2_normalise(k)
    (B, T, H, K), V = q.shape, v.shape[-1]
    S = q.new_zeros(B, H, K, V) if state is None else state.to(dtype)
    outputs = []
    for t in range(T):
        if g is not None:
            S = S * g[:, t].to(dtype).exp()[..., None, None]
        for i in range(t * householders, (t + 1) * householders):
            error = v[:, i] - torch.einsum("bhkv,bhk->bhv", S, k[:, i])
            S = S + torch.einsum("bhk,bhv->bhkv", beta[:, i, :, None] * k[:, i], error)
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, dim=1) if outputs else v.new_zeros(B, 0, H, V), S


def strengths(beta: Tensor, from_logits: float | None) -> Tensor:
    """beta itself; or, where it holds logits x, s sigmoid(x) with s = `from_logits`, in float32 at least."""
    if from_logits is None:
        return beta
    return from_logits * torch.sigmoid(beta.to(torch.promote_types(beta.dtype, torch.float32)))


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(||x||^2 + eps) along the last axis, as in flash-linear-attention."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def floor_decay(g: Tensor) -> Tensor:
    """Log-decays no smaller than the dtype can tell from forgetting everything.

    Chunked forms take differences of running sums of g; without a floor a decay of exp(-10000) would cost
    the digits of all decays after it, and exp(-inf) would make them NaN.
    """
    return g.clamp(min=-40.0 if g.dtype == torch.float32 else -700.0)
