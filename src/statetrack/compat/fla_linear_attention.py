"""GLA and simple GLA of fla 0.6.0 on `gated_linear_attention`; exported by `statetrack.compat.fla`."""

from typing import Any

import torch
from torch import Tensor

from statetrack.compat.fla_arguments import (
    check_per_channel,
    longest_sequence,
    read_extras,
    refuse_value_gates,
)
from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.gated_linear_attention import gated_linear_attention

CHUNK_SIZES = (16, 32, 64, 128, 256)


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention with a decay per key channel, as `fla.ops.gla.chunk_gla`.

        S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    Shapes: q, k (B, T, H, K); v (B, T, H, V); g (B, T, H, K), the logarithm of the decay, at most 0;
    initial_state (N, H, K, V), or (N, H, V, K) with `state_v_first`, N = B, or the number of sequences that
    `cu_seqlens` packs into B = 1. `scale` is K^-1/2 by default. Returns o (B, T, H, V) and the last states,
    in float32, or None unless `output_final_state`.

    >>> q, k, v = torch.randn(3, 2, 16, 4, 32).unbind()
    >>> o, S = chunk_gla(q, k, v, -torch.rand(2, 16, 4, 32), output_final_state=True)
    >>> o.shape, S.shape
    (torch.Size([2, 16, 4, 32]), torch.Size([2, 4, 32, 32]))
    """
    return attend(
        q,
        k,
        v,
        check_per_channel("chunk_gla", "g", g, q, v),
        state_v_first=state_v_first,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        max_seqlen=longest_sequence(cu_seqlens, cu_seqlens_cpu),
    )


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention, as `fla.ops.gla.fused_recurrent_gla`.

    Equation, shapes and results: see `chunk_gla`; `gk` (B, T, H, K) is its g, and None means no decay. With
    `reverse` time runs from the last step of each sequence to the first. `gv`, a decay of every value
    channel, is refused.
    """
    op = "fused_recurrent_gla"
    refuse_value_gates(op, gv, "gated_linear_attention")
    extras = read_extras(op, kwargs, ("transpose_state_layout",), state_v_first)
    return attend(
        q,
        k,
        v,
        None if gk is None else check_per_channel(op, "gk", gk, q, v),
        state_v_first=bool(extras.get("transpose_state_layout", state_v_first)),
        reverse=reverse,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a decay per head (Mamba-2, RetNet), as `fla.ops.simple_gla.chunk_simple_gla`.

        S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    Shapes and results are those of `chunk_gla`, but g is (B, T, H). `g_gamma` (H,), in its place, is the same
    at every step; neither means no decay. `chunk_size` changes nothing here. Unlike in fla, g_gamma has a
    gradient.
    """
    op = "chunk_simple_gla"
    read_extras(op, kwargs, (), chunk_sizes=CHUNK_SIZES)
    return attend(
        q,
        k,
        v,
        _decay_per_head(op, v, g, g_gamma),
        state_v_first=state_v_first,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        max_seqlen=longest_sequence(cu_seqlens, cu_seqlens_cpu),
    )


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a decay per head, as `fla.ops.simple_gla.fused_recurrent_simple_gla`.

    Equation, shapes and results: see `chunk_simple_gla`. With `reverse` time runs from the last step of each
    sequence to the first.
    """
    op = "fused_recurrent_simple_gla"
    extras = read_extras(op, kwargs, ("transpose_state_layout",), state_v_first)
    return attend(
        q,
        k,
        v,
        _decay_per_head(op, v, g, g_gamma),
        state_v_first=bool(extras.get("transpose_state_layout", state_v_first)),
        reverse=reverse,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `fla.ops.simple_gla.fused_chunk_simple_gla`: see `chunk_simple_gla`."""
    return attend(
        q,
        k,
        v,
        _decay_per_head("fused_chunk_simple_gla", v, g, g_gamma),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `fla.ops.simple_gla.parallel_simple_gla`; equation and shapes: see `chunk_simple_gla`.

    Returns o and, with `output_attentions`, the weights scale q_t . k_s exp(g_{s+1} + ... + g_t) (B, H, T, T)
    with which o_t adds the values v_s, 0 for s > t; else None. Packed sequences have no such weights.
    """
    op = "parallel_simple_gla"
    g = _decay_per_head(op, v, g, None)
    o, _ = attend(
        q,
        k,
        v,
        g,
        scale=scale,
        initial_state=None,
        cu_seqlens=cu_seqlens,
        max_seqlen=longest_sequence(cu_seqlens, cu_seqlens_cpu),
    )
    if not output_attentions:
        return o, None
    if cu_seqlens is not None:
        raise UserError(f"{op}: output_attentions=True has no packed form. Call it per sequence instead.")
    return o, _weights(q, k, g, q.shape[-1] ** -0.5 if scale is None else scale)


def _weights(q: Tensor, k: Tensor, g: Tensor | None, scale: float) -> Tensor:
    """(B, H, T, T), in the dtype of q."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    products = torch.einsum("bthk,bshk->bhts", q.to(dtype), k.to(dtype)) * scale
    if g is not None:
        total = g.double().cumsum(1).transpose(1, 2)
        # later steps would overflow before they are masked
        products = products * (total[..., :, None] - total[..., None, :]).clamp(max=0).exp().to(dtype)
    return products.tril().to(q.dtype)


def _decay_per_head(op: str, v: Tensor, g: Tensor | None, g_gamma: Tensor | None) -> Tensor | None:
    """g, refused if it is per channel, or g_gamma at every step; None for no decay."""
    checks.check_tensors(op, v=v, g=g, g_gamma=g_gamma)
    if g is not None and g_gamma is not None:
        raise UserError(f"{op}: give g or g_gamma, not both. Their sum, g + g_gamma, decays by both.")
    if g is not None and g.ndim == 4:
        raise UserError(
            f"{op}: g has shape {tuple(g.shape)}, expected (batch, time, heads). chunk_gla and "
            "fused_recurrent_gla take a decay per key channel."
        )
    if g_gamma is None or v.ndim != 4:
        return g
    checks.check_shape(op, "g_gamma", g_gamma, (v.shape[2],), "(heads,)")
    return g_gamma.expand(v.shape[:3])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool = False,
    reverse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention with states in either layout and time in either direction."""
    if g is None and isinstance(v, Tensor):
        g = torch.zeros_like(v[..., 0])
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    packed = cu_seqlens is not None
    if reverse:  # the sequences of a row change places as well
        q, k, v = q.flip(1), k.flip(1), v.flip(1)
        g = None if g is None else g.flip(1)
        initial_state = initial_state.flip(0) if packed and initial_state is not None else initial_state
        cu_seqlens = q.shape[1] - cu_seqlens.flip(0) if packed else None
    o, state = gated_linear_attention(
        q, k, v, g, initial_state=initial_state, cu_seqlens=cu_seqlens, **options
    )
    if reverse:
        o = o.flip(1)
        state = state.flip(0) if packed and state is not None else state
    if state_v_first and state is not None:
        state = state.transpose(-1, -2).contiguous()
    return o, state
