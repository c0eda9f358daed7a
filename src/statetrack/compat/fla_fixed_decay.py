"""Linear attention, RetNet, lightning attention and HGRN of fla 0.6.0; see `statetrack.compat.fla`."""

from typing import Any

import torch
from torch import Tensor

from statetrack.compat.fla_arguments import read_extras
from statetrack.compat.fla_linear_attention import (
    CHUNK_SIZES,
    attend,
    chunk_simple_gla,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
)
from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.gated_linear_attention import gated_linear_attention

State = Tensor | tuple[Tensor, Tensor] | tuple[Tensor | None, Tensor] | None


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Linear attention, as `fla.ops.linear_attn.chunk_linear_attn`.

        S_t = S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t
        z_t = z_{t-1} + k_t              with `normalize`, o_t is divided by scale z_t . q_t + 1e-10

    Shapes: q, k (B, T, H, K); v (B, T, H, V). The state is S (N, H, K, V) or, with `normalize`, a pair of it
    and z (N, 1, H, K), N = B or the number of sequences that `cu_seqlens` packs into B = 1. Returns o
    (B, T, H, V) and the last state, in float32; S is None unless `output_final_state`.

    >>> q, k, v = torch.rand(3, 2, 16, 4, 32).unbind()
    >>> o, (S, z) = chunk_linear_attn(q, k, v, output_final_state=True)
    >>> o.shape, S.shape, z.shape
    (torch.Size([2, 16, 4, 32]), torch.Size([2, 4, 32, 32]), torch.Size([2, 1, 4, 32]))
    """
    return _linear(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """As `fla.ops.linear_attn.fused_chunk_linear_attn`: see `chunk_linear_attn`."""
    return _linear(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """As `fla.ops.linear_attn.fused_recurrent_linear_attn`: see `chunk_linear_attn`.

    Not normalised by default. With `reverse` time runs from the last step of each sequence to the first.
    """
    return _linear(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens, reverse)


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """RetNet's attention, as `fla.ops.retention.chunk_retention`.

    `chunk_simple_gla` with the decay 1 - 2^(-5 - i) of head i = 0, 1, ... `chunk_size` changes nothing here.
    """
    read_extras("chunk_retention", kwargs, (), chunk_sizes=CHUNK_SIZES)
    options: dict[str, Any] = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    return chunk_simple_gla(q, k, v, g_gamma=_of_retnet(q), output_final_state=output_final_state, **options)


def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `fla.ops.retention.fused_chunk_retention`: see `chunk_retention`."""
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `fla.ops.retention.fused_recurrent_retention`: see `chunk_retention`.

    The other options are those of `fused_recurrent_simple_gla`.
    """
    options: dict[str, Any] = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, **kwargs}
    options |= {"reverse": reverse, "state_v_first": state_v_first, "scale": scale}
    gamma = _of_retnet(q)
    return fused_recurrent_simple_gla(
        q, k, v, g_gamma=gamma, output_final_state=output_final_state, **options
    )


def parallel_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `fla.ops.retention.parallel_retention`: see `chunk_retention`.

    Its results are those of `parallel_simple_gla`.
    """
    return parallel_simple_gla(
        q, k, v, _of_retnet(q).expand(v.shape[:3]), scale, output_attentions, cu_seqlens
    )


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention, as `fla.ops.lightning_attn.chunk_lightning_attn`.

    `chunk_simple_gla` with the log decay -(8 / H) (1 - layer_idx / num_layers) i of head i = 0, 1, ...
    `chunk_size` changes nothing here.
    """
    read_extras("chunk_lightning_attn", kwargs, (), chunk_sizes=CHUNK_SIZES)
    gamma = _of_lightning("chunk_lightning_attn", q, layer_idx, num_layers)
    options: dict[str, Any] = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    return chunk_simple_gla(q, k, v, g_gamma=gamma, output_final_state=output_final_state, **options)


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `fla.ops.lightning_attn.fused_recurrent_lightning_attn`: see `chunk_lightning_attn`.

    With `reverse` time runs from the last step of each sequence to the first.
    """
    gamma = _of_lightning("fused_recurrent_lightning_attn", q, layer_idx, num_layers)
    options: dict[str, Any] = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    options |= {"reverse": reverse, "output_final_state": output_final_state}
    return fused_recurrent_simple_gla(q, k, v, g_gamma=gamma, **options)


def chunk_hgrn(
    x: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The elementwise recurrence of HGRN, as `fla.ops.hgrn.chunk_hgrn`.

        h_t = exp(g_t) h_{t-1} + x_t

    Shapes: x, g (B, T, D), g at most 0; initial_state (N, D). Returns all h (B, T, D) in the dtype of x, and
    the last one (N, D) in float32, or None unless `output_final_state`. Here every channel is a head of width
    1. (HGRN2 is `chunk_gla` with k = 1 - exp(g).)

    >>> h, last = chunk_hgrn(torch.randn(2, 16, 8), -torch.rand(2, 16, 8), output_final_state=True)
    >>> h.shape, last.shape
    (torch.Size([2, 16, 8]), torch.Size([2, 8]))
    """
    return _elementwise("chunk_hgrn", x, g, initial_state, output_final_state, None)


def fused_recurrent_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `fla.ops.hgrn.fused_recurrent_hgrn`: see `chunk_hgrn`; N sequences may be packed by `cu_seqlens`."""
    return _elementwise("fused_recurrent_hgrn", x, g, initial_state, output_final_state, cu_seqlens)


def _elementwise(op, x, g, initial_state, output_final_state, cu_seqlens) -> tuple[Tensor, Tensor | None]:
    checks.check_tensors(op, x=x, g=g, initial_state=initial_state)
    if x.ndim != 3:
        raise UserError(f"{op}: x has shape {tuple(x.shape)}, expected (batch, time, channels).")
    checks.check_shape(op, "g", g, tuple(x.shape), "the shape of x")
    if initial_state is not None:
        initial_state = initial_state[..., None, None]
    ones = torch.ones_like(x[..., None])
    o, state = gated_linear_attention(
        ones,
        ones,
        x[..., None],
        g,
        scale=1.0,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    return o[..., 0], None if state is None else state[..., 0, 0]


def _linear(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens, reverse=False):
    """z is one more column of S, of the value 1, so that it is carried, packed and reversed with S."""
    options: dict[str, Any] = {"scale": scale, "cu_seqlens": cu_seqlens, "reverse": reverse}
    if not normalize:
        options["output_final_state"] = output_final_state
        return attend(q, k, v, None, initial_state=initial_state, **options)
    S, z = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    given = S if z is None else z
    if given is not None:
        sequences = len(given)
        shape = sequences, q.shape[2], q.shape[3]
        S = q.new_zeros(*shape, v.shape[-1], dtype=torch.float32) if S is None else S
        z = q.new_zeros(sequences, 1, *shape[1:], dtype=torch.float32) if z is None else z
        checks.check_shape("linear_attn", "the second initial state", z, (sequences, 1, *shape[1:]), "z")
        S = torch.cat([S, z.transpose(1, 2).transpose(-1, -2).to(S.dtype)], dim=-1)
    wide = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    o, S = attend(
        q,
        k,
        wide.to(torch.promote_types(v.dtype, torch.float32)),
        None,
        initial_state=S,
        output_final_state=True,
        **options,
    )
    assert S is not None
    o = (o[..., :-1] / (o[..., -1:] + 1e-10)).to(v.dtype)
    return o, (S[..., :-1] if output_final_state else None, S[..., -1][:, None])


def _of_retnet(q: Tensor) -> Tensor:
    """(H,)"""
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    return torch.log1p(-torch.exp2(-5 - heads))


def _of_lightning(op: str, q: Tensor, layer: int, layers: int) -> Tensor:
    """(H,)"""
    if not 0 <= layer < layers:
        raise UserError(f"{op}: layer_idx is {layer}, expected from 0 to num_layers - 1 = {layers - 1}.")
    H = q.shape[2]
    heads = torch.arange(H, dtype=torch.float32, device=q.device)
    return -(8 / H) * (1 - layer / layers) * heads
