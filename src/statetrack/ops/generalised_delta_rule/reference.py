"""The generalised delta rule as a loop over time."""

import itertools

import torch
from torch import Tensor


def generalised_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run a recurrence whose transition is a diagonal less a product of two vectors.

        S_t = (diag(w_t) - a_t b_t^T) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    Shapes: q, k, w, a, b (B, T, H, K); v (B, T, H, V); initial_state (N, H, K, V), N being B or the number of
    packed sequences. Returns the outputs and the last state of every sequence.
    """
    if cu_seqlens is not None:
        return _one_by_one((q, k, v, w, a, b), initial_state, cu_seqlens, scale)
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, w, a, b = (x.to(dtype) for x in (q, k, v, w, a, b))
    (B, T, H, K), V = q.shape, v.shape[-1]
    S = q.new_zeros(B, H, K, V) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(T):
        read = torch.einsum("bhkv,bhk->bhv", S, b[:, t])
        S = w[:, t, :, :, None] * S - torch.einsum("bhk,bhv->bhkv", a[:, t], read)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, dim=1) if outputs else v.new_zeros(B, 0, H, V), S


def _one_by_one(inputs, initial_state, cu_seqlens, scale) -> tuple[Tensor, Tensor]:
    """Each packed sequence as a call of its own."""
    results = [
        generalised_delta_rule_reference(
            *(x[:, start:stop] for x in inputs),
            initial_state=None if initial_state is None else initial_state[i : i + 1],
            cu_seqlens=None,
            scale=scale,
        )
        for i, (start, stop) in enumerate(itertools.pairwise(cu_seqlens.tolist()))
    ]
    return torch.cat([o for o, _ in results], dim=1), torch.cat([S for _, S in results], dim=0)
