"""Mamba-2's scan of mamba-ssm on `gated_linear_attention`; exported by `statetrack.compat.mamba_ssm`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.gated_linear_attention import gated_linear_attention

OP = "mamba_chunk_scan_combined"


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    *,
    eigenvalues: str = "[0,1]",
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2's scan, as `mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined`.

        S_t = a_t S_{t-1} + dt_t x_t B_t^T        y_t = (S_t C_t + D x_t) silu(z_t)        a_t = exp(dt_t A)

    Shapes: x, z (B, T, H, P); dt (B, T, H); A, dt_bias (H,), A below 0; B, C (B, T, G, N), shared by H / G
    heads each; D (H,) or (H, P); initial_states (B, H, P, N); `seq_idx` (B, T), the number of the sequence
    that a step belongs to: the state is empty again where it changes. dt is softplus(dt + dt_bias) with
    `dt_softplus`, kept within `dt_limit`. Returns the outputs (B, T, H, P) and, with `return_final_states`,
    the last states (B, H, P, N) in float32. `chunk_size` changes nothing here. `eigenvalues="[-1,1]"`, which
    mamba-ssm has not, puts 2 a_t - 1 in the place of a_t.

    >>> x, dt, A = torch.randn(2, 16, 4, 8), torch.rand(2, 16, 4), -torch.rand(4)
    >>> B, C = torch.randn(2, 2, 16, 1, 32).unbind()
    >>> y, S = mamba_chunk_scan_combined(x, dt, A, B, C, 256, return_final_states=True)
    >>> y.shape, S.shape
    (torch.Size([2, 16, 4, 8]), torch.Size([2, 4, 8, 32]))
    """
    if return_varlen_states:
        raise UserError(
            f"{OP}: return_varlen_states=True is not offered. statetrack.gated_linear_attention(..., "
            "cu_seqlens=..., output_final_state=True) returns a state per packed sequence."
        )
    checks.check_eigenvalues(OP, eigenvalues)
    checks.check_tensors(OP, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, seq_idx=seq_idx)
    if x.ndim != 4 or B.ndim != 4:
        raise UserError(
            f"{OP}: x has shape {tuple(x.shape)} and B {tuple(B.shape)}, expected (batch, time, heads, P) "
            "and (batch, time, groups, d_state)."
        )
    (batch, T, H, _), (groups, N) = x.shape, B.shape[2:]
    if groups == 0 or H % groups:
        raise UserError(f"{OP}: {groups} groups of B and C for {H} heads, expected a divisor of the heads.")
    checks.check_shape(OP, "dt", dt, (batch, T, H), "(batch, time, heads)")
    checks.check_shape(OP, "A", A, (H,), "(heads,)")
    checks.check_shape(OP, "B", B, (batch, T, groups, N), "(batch, time, groups, d_state)")
    checks.check_shape(OP, "C", C, tuple(B.shape), "the shape of B")
    dtype = torch.promote_types(x.dtype, torch.float32)
    steps = dt.to(dtype)
    if dt_bias is not None:
        checks.check_shape(OP, "dt_bias", dt_bias, (H,), "(heads,)")
        steps = steps + dt_bias.to(dtype)
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    g = steps * A.to(dtype)
    a = g.exp() if eigenvalues == "[0,1]" else 1 + 2 * torch.expm1(g)
    if seq_idx is not None:
        checks.check_shape(OP, "seq_idx", seq_idx, (batch, T), "(batch, time)")
        a = torch.cat([a[:, :1], a[:, 1:] * (seq_idx[:, 1:] == seq_idx[:, :-1])[..., None]], dim=1)
    o, S = gated_linear_attention(
        C.repeat_interleave(H // groups, dim=2),
        B.repeat_interleave(H // groups, dim=2),
        steps[..., None] * x.to(dtype),
        a=a,
        scale=1.0,
        initial_state=None if initial_states is None else initial_states.transpose(-1, -2),
        output_final_state=True,
    )
    assert S is not None
    if D is not None:
        o = o + (D if D.ndim == 2 else D[:, None]).to(dtype) * x
    o = (o if z is None else o * F.silu(z.to(dtype))).to(x.dtype)
    return (o, S.transpose(-1, -2).contiguous()) if return_final_states else o
