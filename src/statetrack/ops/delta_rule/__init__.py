"""The delta rule: products of generalised Householder matrices, with eigenvalues in [-1, 1]."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.backends import choose_once, no_triton, pick_backend
from statetrack.ops.call_cache import CallCache


def _reference():
    from statetrack.ops.delta_rule.reference import delta_rule_reference

    return delta_rule_reference


def _chunked():
    from statetrack.ops.delta_rule.chunked import delta_rule_chunked

    return delta_rule_chunked


def _triton():
    from statetrack.ops.delta_rule.triton.backend import delta_rule_triton

    return delta_rule_triton


def _native():
    from statetrack.ops.delta_rule.native import delta_rule_native

    return delta_rule_native


# A backend is a function with the arguments of `delta_rule_reference`.
BACKENDS = {"reference": _reference, "chunked": _chunked, "native": _native, "triton": _triton}
_choices = CallCache()


def _triton_refuses(q: Tensor, v: Tensor) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    if reason := no_triton(q):
        return reason
    from statetrack.ops.delta_rule.triton.plan import WIDEST

    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"heads are {q.shape[-1]} and {v.shape[-1]} wide, more than {WIDEST}"
    if v.shape[1] * q.shape[2] * max(q.shape[-1], v.shape[-1]) >= 1 << 31:  # offsets there have 32 bits
        return "a sequence has 2^31 numbers or more"
    return "float64 is not offered there" if q.dtype == torch.float64 else None


def _native_refuses(q: Tensor, v: Tensor) -> str | None:
    """Why the native kernels cannot take these inputs, or None."""
    from statetrack.ops.delta_rule.native import refuses

    return refuses(q, v)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    g: Tensor | None = None,
    householders: int = 1,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    beta_from_logits: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Apply the delta rule along time. Equation and shapes: `reference.delta_rule_reference`.

    The contract is flash-linear-attention's: time before heads, `scale` defaults to K^-1/2, outputs in
    the dtype of v, states in float32 (float64 when q is), `final_state` None unless asked for.
    `cu_seqlens` (N + 1 offsets in tokens, B = 1) packs N sequences into one row. Where they are known to be
    short, say so: `max_seqlen`, no less than the longest in tokens, lets a GPU take kernels made for that.
    Keys need unit norm for the eigenvalues to stay in [-1, 1]: pass them normalised, or set
    `use_qk_l2norm_in_kernel`, which also spares low-precision keys a rounding after normalisation.
    With `beta_from_logits` = s, `beta` holds logits x and the rule runs with s sigmoid(x), in float32.
    """
    if not isinstance(householders, int) or householders < 1:
        raise UserError(
            f"delta_rule: householders is {householders!r}, expected a whole number of at least 1."
        )
    if beta_from_logits is not None and not beta_from_logits > 0:
        raise UserError(
            f"delta_rule: beta_from_logits is {beta_from_logits!r}, expected the largest beta: 1 for "
            "eigenvalues in [0,1], 2 for [-1,1]."
        )
    inputs = q, k, v, beta, g, initial_state, cu_seqlens
    run = choose_once(
        _choices, (backend, householders), inputs, lambda: _choose(backend, householders, *inputs)
    )
    checks.check_offsets("delta_rule", cu_seqlens, max_seqlen, q.shape[1])
    if checks.is_checked():
        _check_values(q, k, v, beta, g, initial_state, use_qk_l2norm_in_kernel, beta_from_logits)
    # Autocast would run the products inside in half precision.
    autocast = torch.is_autocast_enabled(q.device.type)
    with torch.autocast(q.device.type, enabled=False) if autocast else contextlib.nullcontext():
        o, final_state = run(
            q,
            k,
            v,
            beta,
            g,
            initial_state,
            scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
            householders=householders,
            l2norm=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            beta_from_logits=beta_from_logits,
            final=output_final_state,
        )
    o = o if o.dtype == v.dtype else o.to(v.dtype)
    return o, final_state if output_final_state else None


def _choose(backend: str, householders: int, q, k, v, beta, g, initial_state, cu_seqlens) -> Callable:
    """The backend for these inputs, their shapes, dtypes and devices checked."""
    _check(q, k, v, beta, g, householders, initial_state, cu_seqlens)
    refusals = {"triton": lambda: _triton_refuses(q, v), "native": lambda: _native_refuses(q, v)}
    return pick_backend("delta_rule", backend, q.device, BACKENDS, refusals)


def _check(q, k, v, beta, g, householders, initial_state, cu_seqlens) -> None:
    op, order = "delta_rule", "Time comes before heads in this library."
    given = {"q": q, "k": k, "v": v, "beta": beta, "g": g, "initial_state": initial_state}
    for name, x in given.items():
        if not isinstance(x, Tensor) and (x is not None or name in ("q", "k", "v", "beta")):
            raise UserError(f"{op}: {name} is a {type(x).__name__}, expected a tensor.")
    if q.ndim != 4 or v.ndim != 4:
        raise UserError(
            f"{op}: q has shape {tuple(q.shape)} and v {tuple(v.shape)}, expected four axes "
            f"(batch, time, heads, width). {order}"
        )
    checks.check_floating(op, q.device, q=q, k=k, v=v, beta=beta, g=g, initial_state=initial_state)
    (B, T, H, K), V = q.shape, v.shape[-1]
    steps = T * householders
    time = "time" if householders == 1 else f"time * {householders} householders"
    checks.check_shape(op, "k", k, (B, steps, H, K), f"(batch, {time}, heads, K)", order)
    checks.check_shape(op, "v", v, (B, steps, H, V), f"(batch, {time}, heads, V)", order)
    checks.check_shape(op, "beta", beta, (B, steps, H), f"(batch, {time}, heads)", order)
    if g is not None:
        checks.check_shape(op, "g", g, (B, T, H), "(batch, time, heads)", order)
    sequences = B if cu_seqlens is None else checks.check_packing(op, cu_seqlens, B, q.device)
    if initial_state is not None:
        checks.check_shape(
            op, "initial_state", initial_state, (sequences, H, K, V), "(sequences, heads, K, V)"
        )


def _check_values(q, k, v, beta, g, initial_state, l2norm, logits) -> None:
    op = "delta_rule"
    checks.check_finite(op, q=q, k=k, v=v, initial_state=initial_state)
    if logits is None:
        checks.check_range(op, "beta", beta, 0.0, 2.0, "Use sigmoid for [0,1], 2 * sigmoid for [-1,1].")
    else:
        checks.check_finite(op, beta=beta)
    if g is not None:
        checks.check_range(op, "g", g, -float("inf"), 0.0, "g is the logarithm of a decay in [0, 1].")
    if not l2norm:
        slack = 1e-5 if k.dtype in (torch.float32, torch.float64) else 2e-2
        hint = "Normalise the keys, or set use_qk_l2norm_in_kernel=True."
        checks.check_range(op, "|k|", k.float().norm(dim=-1), 0.0, 1.0 + slack, hint)


__all__ = ["delta_rule"]
