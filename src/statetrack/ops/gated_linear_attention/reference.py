"""Gated linear attention as a loop over time: the definition every other backend is tested against."""

import itertools

import torch
from torch import Tensor

from statetrack.ops.gated_linear_attention.rotation import both_of_pair, rotate


def gated_linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    angle: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence of Eq. 1 with the GLA and Mamba-2 rows of Table 1, and gates of either sign.

        S_t = diag(a_t) R(angle_t) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    Shapes: q, k (B, T, H, K); v (B, T, H, V); a (B, T, H, K), or (B, T, H) for one gate per head; angle
    (B, T, H, K/2), and then a (B, T, H, K/2) or (B, T, H); initial_state (N, H, K, V), N being B or the
    number of packed sequences. The transition has the eigenvalues a exp(+-i angle). Returns the outputs and
    the last state of every sequence.
    """
    if cu_seqlens is not None:
        return _one_by_one(q, k, v, a, angle, initial_state, cu_seqlens, scale)
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, a = (x.to(dtype) for x in (q, k, v, a))
    a = a[..., None] if a.ndim == 3 else a if angle is None else both_of_pair(a)
    (B, T, H, K), V = q.shape, v.shape[-1]
    S = q.new_zeros(B, H, K, V) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(T):
        if angle is not None:
            turn = angle[:, t, :, :, None].to(dtype)
            S = rotate(S, turn.cos(), turn.sin(), dim=-2)
        S = a[:, t, :, :, None] * S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, dim=1) if outputs else v.new_zeros(B, 0, H, V), S


def _one_by_one(q, k, v, a, angle, initial_state, cu_seqlens, scale) -> tuple[Tensor, Tensor]:
    """Each packed sequence as a call of its own."""
    results = [
        gated_linear_attention_reference(
            q[:, start:stop],
            k[:, start:stop],
            v[:, start:stop],
            a[:, start:stop],
            None if angle is None else angle[:, start:stop],
            None if initial_state is None else initial_state[i : i + 1],
            None,
            scale,
        )
        for i, (start, stop) in enumerate(itertools.pairwise(cu_seqlens.tolist()))
    ]
    return torch.cat([o for o, _ in results], dim=1), torch.cat([S for _, S in results], dim=0)
