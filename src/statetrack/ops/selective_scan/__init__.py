"""The selective scan of Mamba: a diagonal recurrence, with eigenvalues in [0, 1] or [-1, 1]."""

from collections.abc import Callable

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.autograd import run_backend
from statetrack.ops.backends import choose_once, load, no_triton, pick_backend
from statetrack.ops.call_cache import CallCache
from statetrack.ops.selective_scan.arguments import ScanInputs, ScanOptions

# A backend takes a `ScanInputs` and a `ScanOptions` and returns out and the last state.
BACKENDS = {
    "reference": "statetrack.ops.selective_scan.reference:selective_scan_reference",
    "chunked": "statetrack.ops.selective_scan.chunked:selective_scan_chunked",
    "native": "statetrack.ops.selective_scan.native:selective_scan_native",
    "triton": "statetrack.ops.selective_scan.triton.backend:selective_scan_triton",
}


def _triton_refuses(inputs: ScanInputs) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    if reason := no_triton(inputs.u):
        return reason
    if any(x.ndim == 2 or (x.ndim == 4 and x.shape[1] > 1) for x in (inputs.B, inputs.C)):
        return "B and C are constant or come in several groups"
    refuses = load("statetrack.ops.selective_scan.triton.backend:refuses")
    return refuses(inputs.u, inputs.A, inputs.cu_seqlens)


def _native_refuses(inputs: ScanInputs) -> str | None:
    """Why the native kernels cannot take these inputs, or None."""
    refuses = load("statetrack.ops.selective_scan.native:refuses")
    return refuses(inputs.u, inputs.A, inputs.B, inputs.C)


_choices = CallCache()


def selective_scan(
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
    eigenvalues: str = "[-1,1]",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Apply the selective scan of Mamba along time (Eq. 1 with the Mamba row of Table 1, tab:LRNNs).

        h_t = a_t h_{t-1} + delta_t B_t u_t        y_t = sum_n C_t h_t + D u_t        out_t = y_t silu(z_t)

        a_t = exp(delta_t A)           for eigenvalues="[0,1]"
        a_t = 2 exp(delta_t A) - 1     for eigenvalues="[-1,1]", and nothing else changes

    Shapes, with batch b, channels d, states n, groups g and time t; channels come before time:

        u, delta, z      (b, d, t)       input, step size, gate (no gate when z is None)
        A                (d, n)          <= 0; Mamba uses -exp(A_log)
        B, C             (b, n, t), or (b, g, n, t) with d / g channels per group, or (d, n), constant in time
        D, delta_bias    (d,)            skip connection; added to delta
        initial_state    (b, d, n)       h_0, zeros when None

    - `delta_softplus`: delta + delta_bias goes through softplus. delta must be >= 0 after that.
    - `return_last_state`: return (out, last_state) instead of out.
    - `eigenvalues`: the range of the a_t, "[0,1]" or "[-1,1]", for delta >= 0 and A <= 0. The default is
      that of `MambaConfig`; mamba-ssm's range is "[0,1]", the default in `statetrack.compat.mamba_ssm`.
    - `cu_seqlens`: s + 1 offsets in steps, with b = 1: s sequences packed one after the other into one row,
      steps cu_seqlens[i] to cu_seqlens[i + 1]; states are then (s, d, n).
    - `max_seqlen`: the length of the longest packed sequence or more. A backend that must know it on the host
      then does not read the offsets from a GPU. torch.compile needs it on a CPU. Triton kernels ignore it.
    - `backend`: "auto", or "reference", "chunked", "native" (CPU), "triton" (GPU). Where B or C is constant,
      or groups are narrower than 16 channels, or come in several on a GPU, "auto" takes "chunked".

    Returns out (b, d, t) in the dtype of u and, if asked for, the last state (b, d, n), float32 (float64 if u
    is): pass it on as `initial_state`, with t = 1 for decoding. For "[0,1]" the contract is that of
    mamba-ssm's `selective_scan_fn`. Arithmetic is float32, float64 for float64 inputs.

    A state that flips its sign at every step, which needs a negative eigenvalue: a_t = 2 exp(-30) - 1 = -1.

        >>> import torch
        >>> from statetrack import selective_scan
        >>> u, delta = torch.zeros(1, 1, 4), torch.full((1, 1, 4), 30.0)
        >>> A, B, C = torch.tensor([[-1.0]]), torch.ones(1, 1, 4), torch.ones(1, 1, 4)
        >>> selective_scan(u, delta, A, B, C, eigenvalues="[-1,1]", initial_state=torch.ones(1, 1, 1))
        tensor([[[-1.,  1., -1.,  1.]]])
    """
    checks.check_eigenvalues("selective_scan", eigenvalues)
    checks.check_flags("selective_scan", delta_softplus=delta_softplus)
    inputs = ScanInputs(u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens)
    options = ScanOptions(delta_softplus, eigenvalues, max_seqlen)
    run = choose_once(_choices, backend, inputs, lambda: _choose(backend, inputs))
    checks.check_offsets("selective_scan", cu_seqlens, max_seqlen, u.shape[2])
    if checks.is_checked():
        _check_values(inputs, options)
    out, last_state = run_backend("selective_scan", run, u.device, inputs, options)
    out = out if out.dtype == u.dtype else out.to(u.dtype)
    return (out, last_state) if return_last_state else out


def _choose(backend: str, inputs: ScanInputs) -> Callable:
    """The backend for these inputs, after their shapes, dtypes and devices are checked."""
    _check(inputs)
    refusals = {"triton": lambda: _triton_refuses(inputs), "native": lambda: _native_refuses(inputs)}
    return pick_backend("selective_scan", backend, inputs.u.device, BACKENDS, refusals)


def _check(inputs: ScanInputs) -> None:
    """Refuse wrong shapes, dtypes and devices."""
    u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens = inputs
    op, order = "selective_scan", "Channels come before time here, as in mamba-ssm."
    checks.require_tensors(op, u=u, delta=delta, A=A, B=B, C=C)
    checks.check_tensors(op, D=D, z=z, delta_bias=delta_bias, initial_state=initial_state)
    if u.ndim != 3 or A.ndim != 2:
        raise UserError(
            f"{op}: u has shape {tuple(u.shape)} and A {tuple(A.shape)}, expected (batch, channels, time) "
            f"and (channels, states). {order}"
        )
    for name, tensor in (("A", A), ("B", B), ("C", C)):
        if tensor.is_complex():
            raise UserError(
                f"{op}: {name} is {tensor.dtype}, expected a real tensor. Complex states are not offered."
            )
    floating = inputs._asdict()
    del floating["cu_seqlens"]
    checks.check_floating(op, u.device, **floating)
    (batch, channels, T), N = u.shape, A.shape[1]
    checks.check_shape(op, "delta", delta, (batch, channels, T), "(batch, channels, time)", order)
    checks.check_shape(op, "A", A, (channels, N), "(channels, states)")
    _check_weights("B", B, batch, channels, N, T)
    _check_weights("C", C, batch, channels, N, T)
    if D is not None:
        checks.check_shape(op, "D", D, (channels,), "(channels,)")
    if z is not None:
        checks.check_shape(op, "z", z, (batch, channels, T), "(batch, channels, time)", order)
    if delta_bias is not None:
        checks.check_shape(op, "delta_bias", delta_bias, (channels,), "(channels,)")
    sequences = batch if cu_seqlens is None else checks.check_packing(op, cu_seqlens, batch, u.device)
    if initial_state is not None:
        checks.check_shape(
            op, "initial_state", initial_state, (sequences, channels, N), "(sequences, channels, states)"
        )


def _check_weights(name: str, weights: Tensor, batch: int, channels: int, N: int, T: int) -> None:
    """B and C come constant, per time step, or per time step and group."""
    op = "selective_scan"
    if weights.ndim == 2:
        checks.check_shape(op, name, weights, (channels, N), "(channels, states)")
    elif weights.ndim == 3:
        checks.check_shape(op, name, weights, (batch, N, T), "(batch, states, time)")
    elif weights.ndim == 4:
        groups = weights.shape[1]
        checks.check_shape(op, name, weights, (batch, groups, N, T), "(batch, groups, states, time)")
        if groups == 0 or channels % groups:
            raise UserError(
                f"{op}: {name} has {groups} groups, expected a number that divides u's {channels} channels."
            )
    else:
        raise UserError(
            f"{op}: {name} has shape {tuple(weights.shape)}, expected (channels, states), "
            f"(batch, states, time) or (batch, groups, states, time)."
        )


def _check_values(inputs: ScanInputs, options: ScanOptions) -> None:
    """In checked mode: everything finite, A <= 0, delta >= 0."""
    from statetrack.ops.selective_scan.reference import step_sizes

    op, finite = "selective_scan", inputs._asdict()
    del finite["cu_seqlens"]
    checks.check_finite(op, **finite)
    checks.check_range(op, "A", inputs.A, -float("inf"), 0.0, "Mamba uses A = -exp(A_log).")
    dtype = torch.promote_types(inputs.u.dtype, torch.float32)
    hint = "Set delta_softplus=True, or pass delta through softplus."
    steps = step_sizes(inputs.delta, inputs.delta_bias, options.delta_softplus, dtype)
    checks.check_range(op, "delta", steps, 0.0, float("inf"), hint)


__all__ = ["selective_scan"]
