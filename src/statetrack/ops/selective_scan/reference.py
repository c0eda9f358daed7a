"""The selective scan as a loop over time: the definition every other backend is tested against."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor


def selective_scan_reference(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    state: Tensor | None,
    *,
    delta_softplus: bool,
    eigenvalues: str,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence of Eq. 1 with the Mamba row of Table 1 (tab:LRNNs; Gu and Dao 2023).

        h_t = a_t h_{t-1} + delta_t B_t u_t        y_t = sum_n C_t h_t + D u_t        out_t = y_t silu(z_t)

        a_t = exp(delta_t A)           for "[0,1]"
        a_t = 2 exp(delta_t A) - 1     for "[-1,1]", Table 2 (tab:eigenvalue_range); B is not doubled

    Shapes: u, delta, z (B, D, T); A (D, N); D, delta_bias (D,); state (B, D, N). B and C are each (D, N),
    constant in time, or (B, N, T), or (B, G, N, T) with channel d in group d G / D. Per channel and state
    the recurrence is scalar, so the a_t are the eigenvalues. With delta >= 0 and A <= 0 they lie in the
    range named. delta has `delta_bias` added and goes through softplus if `delta_softplus`.
    Returns the outputs (B, D, T) and the last state. With `cu_seqlens` batch 1 holds S sequences one after
    the other, steps cu_seqlens[s] to cu_seqlens[s + 1], and the states are (S, D, N).
    """
    if cu_seqlens is not None:
        parts = [
            selective_scan_reference(
                u[..., start:stop],
                delta[..., start:stop],
                A,
                B if B.ndim == 2 else B[..., start:stop],
                C if C.ndim == 2 else C[..., start:stop],
                D,
                None if z is None else z[..., start:stop],
                delta_bias,
                None if state is None else state[s : s + 1],
                delta_softplus=delta_softplus,
                eigenvalues=eigenvalues,
            )
            for s, (start, stop) in enumerate(itertools.pairwise(cu_seqlens.tolist()))
        ]
        return torch.cat([y for y, _ in parts], dim=-1), torch.cat([h for _, h in parts])
    # Halves accumulate in float32, float64 stays.
    dtype = torch.promote_types(u.dtype, torch.float32)
    (batch, channels, T), N = u.shape, A.shape[1]
    delta = step_sizes(delta, delta_bias, delta_softplus, dtype)
    u, A, B, C = (x.to(dtype) for x in (u, A, B, C))
    B, C = (_per_channel(x, batch, channels, T) for x in (B, C))
    h = u.new_zeros(batch, channels, N) if state is None else state.to(dtype)
    outputs = []
    for t in range(T):
        a = torch.exp(delta[:, :, t, None] * A)
        if eigenvalues == "[-1,1]":
            a = 2 * a - 1
        h = a * h + (delta[:, :, t] * u[:, :, t])[..., None] * B[..., t]
        outputs.append((C[..., t] * h).sum(-1))
    y = torch.stack(outputs, dim=-1) if outputs else torch.zeros_like(u)
    if D is not None:
        y = y + D.to(dtype)[:, None] * u
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y, h


def step_sizes(delta: Tensor, bias: Tensor | None, softplus: bool, dtype: torch.dtype) -> Tensor:
    """delta as the recurrence uses it, (B, D, T): bias added, through softplus if asked."""
    delta = delta.to(dtype)
    if bias is not None:
        delta = delta + bias.to(dtype)[:, None]
    return F.softplus(delta) if softplus else delta


def _per_channel(x: Tensor, batch: int, channels: int, T: int) -> Tensor:
    """B or C in any of its three forms as (B, D, N, T)."""
    if x.ndim == 2:
        return x[None, :, :, None].expand(batch, -1, -1, T)
    x = x[:, None] if x.ndim == 3 else x
    return x.repeat_interleave(channels // x.shape[1], dim=1)
