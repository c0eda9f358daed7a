"""Delta rules with two vectors (RWKV-7, DPLR, IPLR, Gated DeltaNet-2) of fla 0.6.0, by a plain loop.

Exported by `statetrack.compat.fla`. They run on `statetrack.generalised_delta_rule`, which has no fast
backend.
"""

from typing import Any

import torch
from torch import Tensor

from statetrack.compat.fla_arguments import (
    check_per_channel,
    decay_of_channel_gate,
    grouped_heads,
    longest_sequence,
    read_extras,
    refuse_context,
)
from statetrack.compat.fla_kda import check_safe_gate, refuse_serving_options
from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.delta_rule.reference import l2_normalise
from statetrack.ops.generalised_delta_rule import generalised_delta_rule


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """A diagonal plus a product of two vectors, as `fla.ops.generalized_delta_rule.chunk_dplr_delta_rule`.

        S_t = (diag(exp(gk_t)) + b_t a_t^T) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    Shapes: q, k, a, b, gk (B, T, H, K); v (B, T, H, V); initial_state (N, H, K, V), N = B, or the number of
    sequences that `cu_seqlens` packs into B = 1. `scale` is K^-1/2 by default. Returns o (B, T, H, V) and the
    last states in float32, or None unless `output_final_state`. `safe_gate`, `lower_bound`, `chunk_size` and
    `disable_recompute` change nothing here; `cp_context` is refused. A loop over time, on every device.

    >>> q, k, v, x = torch.randn(4, 2, 16, 4, 32).unbind()
    >>> x, w = torch.nn.functional.normalize(x, dim=-1), -torch.rand(2, 16, 4, 32)
    >>> o, S = chunk_dplr_delta_rule(q, k, v, -x, x, w, output_final_state=True)
    >>> o.shape, S.shape
    (torch.Size([2, 16, 4, 32]), torch.Size([2, 4, 32, 32]))
    """
    op = "chunk_dplr_delta_rule"
    refuse_context(op, cp_context)
    read_extras(op, kwargs, ())
    if lower_bound is not None and not lower_bound < 0:
        raise UserError(f"{op}: lower_bound is {lower_bound!r}, expected a negative number: gk is at most 0.")
    lengths = cu_seqlens, cu_seqlens_cpu
    return _rule(op, q, k, v, a, b, gk, scale, initial_state, output_final_state, *lengths)


def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `fla.ops.generalized_delta_rule.fused_recurrent_dplr_delta_rule`: see `chunk_dplr_delta_rule`.

    With `reverse` time runs from the last step of each sequence to the first. Unlike fla's, it has gradients.
    """
    op = "fused_recurrent_dplr_delta_rule"
    return _rule(op, q, k, v, a, b, gk, scale, initial_state, output_final_state, cu_seqlens, reverse=reverse)


def chunk_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `fla.ops.generalized_delta_rule.chunk_iplr_delta_rule`: `chunk_dplr_delta_rule` without a decay.

    `chunk_size` changes nothing here.
    """
    op = "chunk_iplr_delta_rule"
    read_extras(op, kwargs, ())
    lengths = cu_seqlens, cu_seqlens_cpu
    return _rule(op, q, k, v, a, b, None, scale, initial_state, output_final_state, *lengths)


def fused_recurrent_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `fla.ops.generalized_delta_rule.fused_recurrent_iplr_delta_rule`: see `chunk_iplr_delta_rule`."""
    op = "fused_recurrent_iplr_delta_rule"
    return _rule(op, q, k, v, a, b, None, scale, initial_state, output_final_state, cu_seqlens)


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7, as `fla.ops.rwkv7.chunk_rwkv7`: `chunk_dplr_delta_rule` with other names, q = r and gk = w."""
    op = "chunk_rwkv7"
    refuse_context(op, cp_context)
    lengths = cu_seqlens, cu_seqlens_cpu
    return _rule(op, r, k, v, a, b, w, scale, initial_state, output_final_state, *lengths)


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `fla.ops.rwkv7.fused_recurrent_rwkv7`: see `chunk_rwkv7`. `scale` is K^-1/2 by default, not 1."""
    op = "fused_recurrent_rwkv7"
    return _rule(op, r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens)


def fused_mul_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `fla.ops.rwkv7.fused_mul_recurrent_rwkv7`: `chunk_rwkv7` with -kk as a and kk * a as b."""
    op = "fused_mul_recurrent_rwkv7"
    checks.check_tensors(op, kk=kk, a=a)
    checks.check_shape(op, "a", a, tuple(kk.shape), "the shape of kk")
    return _rule(
        op, r, k, v, -kk, kk * a, w, scale, initial_state, output_final_state, cu_seqlens, reverse=reverse
    )


def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet-2, as `fla.ops.gdn2.chunk_gdn2`.

        S_t = (I - k_t (b_t * k_t)^T) diag(exp(g_t)) S_{t-1} + k_t (w_t * v_t)^T        o_t = scale S_t^T q_t

    Shapes: q, k (B, T, H, K); v, w (B, T, G, V); g, b (B, T, G, K); initial_state (N, G, K, V), or
    (N, G, V, K) with `state_v_first`. `b` erases by key channel, `w` writes by value channel. The gate inside
    (`use_gate_in_kernel`, `A_log=`, `dt_bias=`, `lower_bound`) is that of `chunk_kda`; options that change
    nothing and those refused are its as well. G may be a multiple of H, as in fla's `fused_recurrent_gdn2`.
    """
    op = "chunk_gdn2"
    refuse_context(op, cp_context)
    refuse_serving_options(op, return_intermediate_states, use_graph=False)
    check_safe_gate(op, safe_gate and use_gate_in_kernel, lower_bound)
    known = ("A_log", "dt_bias", "transpose_state_layout")
    extras = read_extras(op, kwargs, known, state_v_first, (64,))
    if use_gate_in_kernel:
        check_per_channel(op, "g", g, q, v)
        g = decay_of_channel_gate(op, g, extras.get("A_log"), extras.get("dt_bias"), lower_bound)
    turned = bool(extras.get("transpose_state_layout", state_v_first))
    lengths, unit = (cu_seqlens, cu_seqlens_cpu), use_qk_l2norm_in_kernel
    return _gdn2(op, q, k, v, g, b, w, scale, initial_state, output_final_state, unit, turned, *lengths)


def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `fla.ops.gdn2.fused_recurrent_gdn2`: see `chunk_gdn2`. Unlike fla's, it has gradients."""
    op = "fused_recurrent_gdn2"
    extras = read_extras(op, kwargs, ("transpose_state_layout",), state_v_first)
    if use_gate_in_kernel:
        check_per_channel(op, "g", g, q, v)
        g = decay_of_channel_gate(op, g, A_log, dt_bias, lower_bound)
    turned = bool(extras.get("transpose_state_layout", state_v_first))
    unit = use_qk_l2norm_in_kernel
    return _gdn2(op, q, k, v, g, b, w, scale, initial_state, output_final_state, unit, turned, cu_seqlens)


def _gdn2(op, q, k, v, g, b, w, scale, initial_state, output_final_state, unit, turned, *lengths):
    """(I - k (b k)^T) diag(exp(g)) is diag(exp(g)) - k (exp(g) b k)^T."""
    checks.check_tensors(op, q=q, k=k, v=v, g=g, b=b, w=w)
    for name, gate in (("g", g), ("b", b)):
        check_per_channel(op, name, gate, q, v)
    checks.check_shape(op, "w", w, tuple(v.shape), "the shape of v")
    q, k = grouped_heads(op, q, k, v)
    dtype = torch.promote_types(q.dtype, torch.float32)
    out, (q, k, g, b) = v.dtype, (x.to(dtype) for x in (q, k, g, b))
    if unit:
        q, k = l2_normalise(q), l2_normalise(k)
    if turned and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    erased, written = g.exp() * b * k, w.to(dtype) * v.to(dtype)
    options = scale, initial_state, output_final_state
    o, state = _rule(op, q, k, written, erased, -k, g, *options, *lengths)
    if turned and state is not None:
        state = state.transpose(-1, -2).contiguous()
    return o.to(out), state


def _rule(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    reverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """diag(exp(gk)) + b a^T as the op has it, diag(w) - a' b'^T with a' = -b and b' = a."""
    checks.check_tensors(op, q=q, k=k, v=v, a=a, b=b, gk=gk)
    dtype = torch.promote_types(q.dtype, torch.float32)
    w = torch.ones_like(q) if gk is None else gk.to(dtype).exp()
    inputs, packed = [q, k, v, w, -b, a], cu_seqlens is not None
    if reverse:  # the sequences of a row change places as well
        inputs = [x.flip(1) for x in inputs]
        initial_state = initial_state.flip(0) if packed and initial_state is not None else initial_state
        cu_seqlens = None if cu_seqlens is None else q.shape[1] - cu_seqlens.flip(0)
    o, state = generalised_delta_rule(
        *inputs,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        max_seqlen=longest_sequence(cu_seqlens, cu_seqlens_cpu),
    )
    if reverse:
        o = o.flip(1)
        state = state.flip(0) if packed and state is not None else state
    return o, state
