"""The selective scan as a loop over time: the definition every other backend is tested against."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from statetrack.ops.selective_scan.arguments import ScanInputs, ScanOptions


def selective_scan_reference(inputs: ScanInputs, options: ScanOptions) -> tuple[Tensor, Tensor]:
    """Run the recurrence of Eq. 1 with the Mamba row of Table 1 (tab:LRNNs; Gu and Dao 2023).

        h_t = a_t h_{t-1} + delta_t B_t u_t        y_t = sum_n C_t h_t + D u_t        out_t = y_t silu(z_t)

        a_t = exp(delta_t A)           for "[0,1]"
        a_t = 2 exp(delta_t A) - 1     for "[-1,1]", Table 2 (tab:eigenvalue_range); B is not doubled

    Shapes: u, delta, z (B, D, T); A (D, N); D, delta_bias (D,); initial_state (B, D, N). B and C are each
    (D, N), constant in time, or (B, N, T), or (B, G, N, T) with channel d in group d G / D. Per channel and
    state the recurrence is scalar, so the a_t are the eigenvalues. With delta >= 0 and A <= 0 they lie in the
    range named. delta has `delta_bias` added and goes through softplus if `delta_softplus`.
    Returns the outputs (B, D, T) and the last state. With `cu_seqlens`, batch 1 holds S sequences one after
    the other, steps cu_seqlens[s] to cu_seqlens[s + 1], and the states are (S, D, N).
    """
    u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens = inputs
    if cu_seqlens is not None:
        return _scan_sequences(inputs, options)
    # Halves accumulate in float32, float64 stays.
    dtype = torch.promote_types(u.dtype, torch.float32)
    (batch, channels, T), N = u.shape, A.shape[1]
    delta = step_sizes(delta, delta_bias, options.delta_softplus, dtype)
    u, A, B, C = (x.to(dtype) for x in (u, A, B, C))
    B, C = (_per_channel(x, batch, channels, T) for x in (B, C))
    h = u.new_zeros(batch, channels, N) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(T):
        a = torch.exp(delta[:, :, t, None] * A)
        if options.eigenvalues == "[-1,1]":
            a = 2 * a - 1
        h = a * h + (delta[:, :, t] * u[:, :, t])[..., None] * B[..., t]
        outputs.append((C[..., t] * h).sum(-1))
    y = torch.stack(outputs, dim=-1) if outputs else torch.zeros_like(u)
    if D is not None:
        y = y + D.to(dtype)[:, None] * u
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y, h


def _scan_sequences(inputs: ScanInputs, options: ScanOptions) -> tuple[Tensor, Tensor]:
    """The scan of every packed sequence on its own."""
    assert inputs.cu_seqlens is not None
    results = []
    for s, (start, stop) in enumerate(itertools.pairwise(inputs.cu_seqlens.tolist())):
        timed = {
            name: x[..., start:stop]
            for name in ("u", "delta", "B", "C", "z")
            if (x := getattr(inputs, name)) is not None and x.ndim > 2
        }
        state = None if inputs.initial_state is None else inputs.initial_state[s : s + 1]
        sequence = inputs._replace(**timed, initial_state=state, cu_seqlens=None)
        results.append(selective_scan_reference(sequence, options))
    return torch.cat([y for y, _ in results], dim=-1), torch.cat([h for _, h in results])


def step_sizes(delta: Tensor, delta_bias: Tensor | None, delta_softplus: bool, dtype: torch.dtype) -> Tensor:
    """delta as the recurrence uses it, (B, D, T): bias added, through softplus if asked."""
    delta = delta.to(dtype)
    if delta_bias is not None:
        delta = delta + delta_bias.to(dtype)[:, None]
    return F.softplus(delta) if delta_softplus else delta


def _per_channel(x: Tensor, batch: int, channels: int, T: int) -> Tensor:
    """B or C in any of its three forms as (B, D, N, T)."""
    if x.ndim == 2:
        return x[None, :, :, None].expand(batch, -1, -1, T)
    x = x[:, None] if x.ndim == 3 else x
    return x.repeat_interleave(channels // x.shape[1], dim=1)
