"""The selective scan of Mamba: a diagonal recurrence, with eigenvalues in [0, 1] or [-1, 1]."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import choose_once, no_triton, pick_backend
from statetrack.ops.call_cache import CallCache


def _reference():
    from statetrack.ops.selective_scan.reference import selective_scan_reference

    return selective_scan_reference


def _chunked():
    from statetrack.ops.selective_scan.chunked import selective_scan_chunked

    return selective_scan_chunked


def _triton():
    from statetrack.ops.selective_scan.triton.backend import selective_scan_triton

    return selective_scan_triton


def _native():
    from statetrack.ops.selective_scan.native import selective_scan_native

    return selective_scan_native


# A backend is a function with the arguments of `selective_scan_reference`.
BACKENDS = {"reference": _reference, "chunked": _chunked, "native": _native, "triton": _triton}


def _constant_or_grouped(B: Tensor, C: Tensor) -> str | None:
    if any(x.ndim == 2 or (x.ndim == 4 and x.shape[1] > 1) for x in (B, C)):
        return "B and C are constant or come in several groups"
    return None


def _triton_refuses(u: Tensor, A: Tensor, B: Tensor, C: Tensor, cu_seqlens: Tensor | None) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    if reason := no_triton(u) or _constant_or_grouped(B, C):
        return reason
    from statetrack.ops.selective_scan.triton.backend import refuses

    return refuses(u, A, cu_seqlens)


def _native_refuses(u: Tensor, A: Tensor, B: Tensor, C: Tensor) -> str | None:
    """Why the native kernels cannot take these inputs, or None."""
    from statetrack.ops.selective_scan.native import refuses

    return refuses(u, A) or _constant_or_grouped(B, C)


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
    eigenvalues: str = "[0,1]",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Apply the selective scan along time. Equation and shapes: `reference.selective_scan_reference`.

    For "[0,1]" the contract is that of mamba-ssm's `selective_scan_fn`: channels before time, outputs in
    the dtype of u, and (out, last_state) instead of out with `return_last_state`. The last state is
    float32 (float64 when u is), whatever the dtype of u: pass it on as `initial_state`, with T = 1 for
    decoding. `eigenvalues="[-1,1]"` replaces exp(delta A) by 2 exp(delta A) - 1 and nothing else.
    `cu_seqlens` (S + 1 offsets in steps, batch 1) packs S sequences into one row; states are then (S, D, N).
    `max_seqlen` says that none of them is longer: a backend that must know the longest one on the host then
    need not read the offsets from a GPU. The Triton kernels do without.
    """
    checks.check_eigenvalues("selective_scan", eigenvalues)
    inputs = u, delta, A, B, C, D, z, delta_bias, initial_state
    run = choose_once(_choices, backend, (*inputs, cu_seqlens), lambda: _choose(backend, *inputs, cu_seqlens))
    checks.check_offsets("selective_scan", cu_seqlens, max_seqlen, u.shape[2])
    if checks.is_checked():
        _check_values(u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state)
    # Autocast would run the sums over states in half precision.
    autocast = torch.is_autocast_enabled(u.device.type)
    with torch.autocast(u.device.type, enabled=False) if autocast else contextlib.nullcontext():
        out, last_state = run(
            *inputs,
            delta_softplus=delta_softplus,
            eigenvalues=eigenvalues,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )
    out = out if out.dtype == u.dtype else out.to(u.dtype)
    return (out, last_state) if return_last_state else out


def _choose(backend: str, u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens) -> Callable:
    """The backend for these inputs, their shapes, dtypes and devices checked."""
    _check(u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens)
    refusals = {
        "triton": lambda: _triton_refuses(u, A, B, C, cu_seqlens),
        "native": lambda: _native_refuses(u, A, B, C),
    }
    return pick_backend("selective_scan", backend, u.device, BACKENDS, refusals)


def _check(u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens) -> None:
    op, order = "selective_scan", "Channels come before time here, as in mamba-ssm."
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
    checks.check_floating(
        op,
        u.device,
        u=u,
        delta=delta,
        A=A,
        B=B,
        C=C,
        D=D,
        z=z,
        delta_bias=delta_bias,
        initial_state=initial_state,
    )
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


def _check_values(u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state) -> None:
    from statetrack.ops.selective_scan.reference import step_sizes

    op = "selective_scan"
    checks.check_finite(op, u=u, delta=delta, A=A, B=B, C=C, D=D, z=z, initial_state=initial_state)
    checks.check_finite(op, delta_bias=delta_bias)
    checks.check_range(op, "A", A, -float("inf"), 0.0, "Mamba uses A = -exp(A_log).")
    dtype = torch.promote_types(u.dtype, torch.float32)
    hint = "Set delta_softplus=True, or pass delta through softplus."
    steps = step_sizes(delta, delta_bias, delta_softplus, dtype)
    checks.check_range(op, "delta", steps, 0.0, float("inf"), hint)


__all__ = ["selective_scan"]
