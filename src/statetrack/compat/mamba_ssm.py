"""The scans of mamba-ssm on `statetrack.selective_scan`, in both eigenvalue ranges.

    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn        # before
    from statetrack.compat.mamba_ssm import selective_scan_fn                   # after

Signatures, defaults and layouts (channels before time) are mamba-ssm's, with one more keyword: `eigenvalues`,
"[0,1]" as in mamba-ssm or "[-1,1]". All functions run on a CPU too. Complex A is refused.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from statetrack.compat.mamba_ssm_chunk_scan import mamba_chunk_scan_combined
from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.selective_scan import selective_scan
from statetrack.ops.short_convolution import short_convolution

__all__ = ["mamba_chunk_scan_combined", "mamba_inner_fn", "selective_scan_fn", "selective_state_update"]


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    eigenvalues: str = "[0,1]",
) -> Tensor | tuple[Tensor, Tensor]:
    """The selective scan, as `mamba_ssm.ops.selective_scan_interface.selective_scan_fn`.

        h_t = a_t h_{t-1} + delta_t B_t u_t        y_t = sum_n C_t h_t + D u_t        out_t = y_t silu(z_t)

        a_t = exp(delta_t A)           for eigenvalues="[0,1]"
        a_t = 2 exp(delta_t A) - 1     for eigenvalues="[-1,1]"

    Shapes: u, delta, z (b, d, t); A (d, n), real and <= 0; B, C (b, n, t), (b, g, n, t) or (d, n); D,
    delta_bias (d,). Returns out (b, d, t), and with `return_last_state` also the last h (b, d, n) in float32;
    unlike mamba-ssm's, it has gradients. `statetrack.selective_scan` also takes an initial state and packed
    sequences.

        >>> import torch
        >>> u, delta = torch.randn(2, 1, 4, 8).unbind()
        >>> A, B, C = -torch.rand(4, 3), torch.randn(1, 3, 8), torch.randn(1, 3, 8)
        >>> selective_scan_fn(u, delta, A, B, C, delta_softplus=True, eigenvalues="[-1,1]").shape
        torch.Size([1, 4, 8])
    """
    _refuse_complex("selective_scan_fn", A)
    return selective_scan(
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, eigenvalues=eigenvalues
    )


@torch.no_grad()
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    eigenvalues: str = "[0,1]",
) -> Tensor:
    """One step of decoding, as `mamba_ssm.ops.triton.selective_state_update.selective_state_update`.

    The equation is that of `selective_scan_fn`. `state` is updated in place and the output is returned; there
    are no gradients, as in mamba-ssm. Shapes, the second ones with heads h and groups g (Mamba-2):

        state            (b, d, n)     or (b, h, d, n)
        x, dt, z, out    (b, d)        or (b, h, d)
        A                (d, n)        or (h, d, n)
        B, C             (b, n)        or (b, g, n), h / g heads per group
        D, dt_bias       (d,)          or (h, d)

    With `state_batch_indices` (b,) row i of x continues row state_batch_indices[i] of `state`; a negative
    index marks padding: its output is 0, and no state changes.
    """
    op = "selective_state_update"
    _refuse_complex(op, A)
    if state.ndim not in (3, 4) or x.ndim != state.ndim - 1:
        raise UserError(
            f"{op}: state has shape {tuple(state.shape)} and x {tuple(x.shape)}, expected (batch, channels, "
            "states) and (batch, channels), or both with heads after the batch."
        )
    N, channels = state.shape[-1], x[0].numel() if len(x) else 0
    checks.check_shape(op, "x", x, (len(x), *state.shape[1:-1]), "(batch, ..., channels)")
    checks.check_shape(op, "A", A, tuple(state.shape[1:]), "(..., channels, states)")
    B, C = (y if y.ndim == 3 else y[:, None] for y in (B, C))  # (b, g, n)
    heads = state.shape[1] if state.ndim == 4 else 1
    if heads % max(B.shape[1], 1):
        raise UserError(f"{op}: B has {B.shape[1]} groups, expected a number that divides {heads} heads.")
    rows, kept = _rows(op, state, state_batch_indices, len(x))
    before = (state if rows is None else state[rows]).reshape(len(x), channels, N)

    def per_step(y: Tensor) -> Tensor:
        return y.reshape(len(x), channels, 1)

    result = selective_scan(
        per_step(x),
        per_step(dt),
        A.reshape(channels, N),
        B[..., None],
        C[..., None],
        None if D is None else D.reshape(channels),
        None if z is None else per_step(z),
        None if dt_bias is None else dt_bias.reshape(channels),
        dt_softplus,
        True,
        eigenvalues=eigenvalues,
        initial_state=before,
    )
    out, after = result[0].reshape(x.shape), result[1].reshape(len(x), *state.shape[1:]).to(state.dtype)
    if rows is None or kept is None:
        state.copy_(after)
        return out
    state[rows[kept]] = after[kept]
    return out.masked_fill(~kept.view(-1, *[1] * (out.ndim - 1)), 0)


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    *,
    eigenvalues: str = "[0,1]",
) -> Tensor:
    """A Mamba block after its input projection, as `mamba_ssm.ops.selective_scan_interface.mamba_inner_fn`.

        x, z = xz        u = silu(conv1d(x))        delta', B, C = W_x u        delta = W_delta delta'
        y = W_out selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, delta_softplus) + b_out

    Shapes: xz (b, 2 d, t); conv1d_weight (d, 1, width); x_proj_weight (r + 2 n, d); delta_proj_weight (d, r);
    out_proj_weight (d_model, d); A (d, n). Returns y (b, t, d_model). B and C can be given instead of
    computed, in the forms of `selective_scan_fn`. With `b_rms_weight` (n,), `c_rms_weight` (n,) and
    `dt_rms_weight` (d,) B, C and delta go through an RMS norm. `checkpoint_lvl`, 0 or 1, chooses in mamba-ssm
    what the backward pass computes again; here it changes nothing.
    """
    op = "mamba_inner_fn"
    _refuse_complex(op, A)
    if checkpoint_lvl not in (0, 1):
        raise UserError(f"{op}: checkpoint_lvl is {checkpoint_lvl!r}, expected 0 or 1.")
    if conv1d_weight.ndim != 3 or conv1d_weight.shape[1] != 1:
        raise UserError(
            f"{op}: conv1d_weight has shape {tuple(conv1d_weight.shape)}, expected (channels, 1, width)."
        )
    x, z = xz.chunk(2, dim=1)
    u = short_convolution(x.transpose(1, 2), conv1d_weight[:, 0], conv1d_bias, silu=True)
    rank, N = delta_proj_weight.shape[1], A.shape[1]
    checks.check_shape(op, "x_proj_weight", x_proj_weight, (rank + 2 * N, len(A)), "(r + 2 n, channels)")
    low_rank, B_t, C_t = F.linear(u, x_proj_weight).split((rank, N, N), dim=-1)
    delta = _rms_norm(F.linear(low_rank, delta_proj_weight), dt_rms_weight, b_c_dt_rms_eps)
    y = selective_scan(
        u.transpose(1, 2),
        delta.transpose(1, 2),
        A,
        _weights(op, "B", B, B_t, B_proj_bias, b_rms_weight, b_c_dt_rms_eps),
        _weights(op, "C", C, C_t, C_proj_bias, c_rms_weight, b_c_dt_rms_eps),
        D,
        z,
        delta_bias,
        delta_softplus,
        eigenvalues=eigenvalues,
    )
    assert isinstance(y, Tensor)
    return F.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias)


def _weights(
    op: str,
    name: str,
    given: Tensor | None,
    computed: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
) -> Tensor:
    """B or C as the scan takes it: the given one, or the computed one with bias and norm, (b, n, t)."""
    if given is not None:
        if norm is not None:
            raise UserError(f"{op}: a given {name} goes through no norm. Normalise it before the call.")
        return given
    computed = computed if bias is None else computed + bias.to(computed.dtype)
    return _rms_norm(computed, norm, eps).transpose(1, 2)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x weight / sqrt(mean(x^2) + eps) along the last axis, in float32 or better; x without a weight."""
    if weight is None:
        return x
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(dtype), (x.shape[-1],), weight.to(dtype), eps).to(x.dtype)


def _rows(op: str, state: Tensor, indices: Tensor | None, batch: int) -> tuple[Tensor | None, Tensor | None]:
    """The row of `state` for each row of the batch, 0 for padding; and which rows are not padding."""
    if indices is None:
        checks.check_shape(op, "state", state, (batch, *state.shape[1:]), "(batch, ..., states)")
        return None, None
    checks.check_shape(op, "state_batch_indices", indices, (batch,), "(batch,)")
    return indices.clamp(min=0).long(), indices >= 0


def _refuse_complex(op: str, A: Tensor) -> None:
    if A.is_complex():
        raise UserError(
            f"{op}: A is {A.dtype}, expected a real tensor. Complex states are not offered; eigenvalues of "
            'both signs are, with eigenvalues="[-1,1]".'
        )
