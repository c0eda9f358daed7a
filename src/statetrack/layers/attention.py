"""Causal softmax attention: the Transformer baseline, whose state grows with the sequence."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.config import added
from statetrack.errors import UserError
from statetrack.layers.checks import check_eps, check_sizes, divide
from statetrack.layers.mixer import Mixer, Packing, returns_states
from statetrack.layers.norm import RMSNorm
from statetrack.layers.padding import run_padded
from statetrack.layers.precision import at_least_float32
from statetrack.ops.padded_rows import PaddedRows


@dataclass(frozen=True)
class AttentionConfig:
    """Multi-head attention with rotary positions. The paper does not specify its Transformer."""

    heads: int = 4  # number of heads of the queries
    rotary_base: float = 10_000.0  # base of the rotary frequencies
    positions: bool = added(True)  # False: no rotary positions (NoPE)
    kv_heads: int | None = added(None)  # heads of keys and values, shared by groups of queries; all when None
    qk_norm: bool = added(False)  # RMS norms of the whole q and k, across their heads, as in OLMo
    qk_norm_eps: float = added(1e-5)  # eps of these norms
    qkv_bias: bool = added(False)  # whether q, k and v have a bias
    window: int | None = added(None)  # the last so many steps are seen, this one included; all when None

    def build(self, d_model: int, layers: int) -> "Attention":
        return Attention(self, d_model, layers)


class AttentionState(NamedTuple):
    """The rotated keys and the values of all steps so far.

    With `lengths` (B,) sequences differ in length: of row b the first lengths[b] steps count.
    """

    k: Tensor  # (B, H, T, K), H heads of keys
    v: Tensor  # (B, H, T, K)
    lengths: Tensor | None = None


class Attention(Mixer):
    """y_t = W_o sum_{s <= t} softmax_s(q_t . k_s / sqrt(K)) v_s, with q and k rotated by their position.

    With `window` w the sum is over t - w < s <= t; the state keeps all steps all the same.

    Packed sequences are padded to the longest for the softmax, and only there. Shapes: x, y (B, T, d_model);
    the state, keys and values of all steps so far, (B, H, T, K) with K = d_model / H.

    >>> layer = Attention(AttentionConfig(heads=4), d_model=64)
    >>> y, state = layer(torch.randn(2, 16, 64))                     # B, T, d_model
    >>> y.shape, state.k.shape
    (torch.Size([2, 16, 64]), torch.Size([2, 4, 16, 16]))
    """

    packs = True
    packs_by_padding = True
    is_recurrent = False

    def __init__(self, config: AttentionConfig, d_model: int, layers: int = 1):
        super().__init__()
        self.config = config
        check_sizes("Attention", kv_heads=config.kv_heads, window=config.window)
        check_eps("Attention", qk_norm_eps=config.qk_norm_eps)
        K = divide("Attention", d_model, config.heads, "heads")
        self.kv_heads = config.kv_heads or config.heads
        divide("Attention", config.heads, self.kv_heads, "kv_heads")
        if K % 2 and config.positions:
            raise UserError(
                f"Attention: a head is {K} wide, expected an even width: rotary positions rotate pairs of "
                "channels. Choose another number of heads."
            )
        self.widths = d_model, K * self.kv_heads, K * self.kv_heads  # of q, k and v
        self.to_qkv = nn.Linear(d_model, sum(self.widths), bias=config.qkv_bias)
        self.to_out = nn.Linear(d_model, d_model, bias=False)
        self.q_norm, self.k_norm = None, None
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(width, config.qk_norm_eps) for width in self.widths[:2])
        nn.init.normal_(self.to_qkv.weight, std=0.02)
        if config.qkv_bias:
            nn.init.zeros_(self.to_qkv.bias)
        nn.init.normal_(self.to_out.weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        *,
        packing: Packing | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState | None]:
        if attention_mask is not None:
            return run_padded("Attention", self, x, attention_mask, state, packing)
        qkv = self.to_qkv(x)  # (B, T, 3 d_model)
        rows = None if packing is None else PaddedRows("Attention", packing.cu_seqlens, packing.max_seqlen, x)
        if rows is not None:
            qkv = rows.padded(qkv)
        q, k, v = self._heads(qkv)
        _check_batch(state, len(k))
        past = _past(state)
        if self.config.positions:
            q, k = (rotate(y, past, self.config.rotary_base) for y in (q, k))
        after = _extended(state, k, v)
        y = _attend(q, after.k, after.v, past, self.config.window).transpose(1, 2).flatten(-2)
        if rows is not None:
            # the padding lies behind the steps that count, and later ones are written over it
            y, after = rows.packed(y), after._replace(lengths=past + rows.lengths)
        return self.to_out(y), after if returns_states(packing) else None

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, heads, T, K), k and v (B, kv_heads, T, K) from the product of x (B, T, ...)."""
        q, k, v = qkv.split(self.widths, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        heads = self.config.heads, self.kv_heads, self.kv_heads
        q, k, v = (y.unflatten(-1, (n, -1)).transpose(1, 2) for y, n in zip((q, k, v), heads, strict=True))
        return q, k, v

    def transition_eigenvalues(self, x: Tensor, state: AttentionState | None = None) -> Tensor:
        raise UserError(
            "Attention: no state transition, so no eigenvalues: attention keeps all keys and values."
        )


def _check_batch(state: AttentionState | None, batch: int) -> None:
    if state is not None and len(state.k) != batch:
        raise UserError(f"Attention: the state is of {len(state.k)} sequences, expected one of {batch}.")


def _past(state: AttentionState | None) -> int | Tensor:
    """The number of steps before: one number, or (B,) where sequences differ."""
    if state is None:
        return 0
    return state.k.shape[2] if state.lengths is None else state.lengths


def _extended(state: AttentionState | None, k: Tensor, v: Tensor) -> AttentionState:
    """The state with the keys and values (B, H, T, K) of T more steps."""
    if state is None:
        return AttentionState(k, v)
    if state.lengths is None:
        k, v = (torch.cat([old.to(new.dtype), new], dim=2) for old, new in ((state.k, k), (state.v, v)))
        return AttentionState(k, v)
    T = k.shape[2]
    places = (state.lengths[:, None] + torch.arange(T, device=k.device))[:, None, :, None].expand_as(k)
    k, v = (
        F.pad(old.to(new.dtype), (0, 0, 0, T)).scatter(2, places, new)
        for old, new in ((state.k, k), (state.v, v))
    )
    return AttentionState(k, v, state.lengths + T)


def _attend(q: Tensor, k: Tensor, v: Tensor, past: int | Tensor, window: int | None) -> Tensor:
    """The softmax average, where query t has position past + t and sees the keys up to that position.

    With a window it sees the last so many of them.
    """
    T, grouped = q.shape[2], q.shape[1] // k.shape[1]
    if grouped > 1:
        k, v = (x.repeat_interleave(grouped, dim=1) for x in (k, v))
    if isinstance(past, int) and past == 0 and (window is None or window >= T):
        return F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
    places = torch.arange(k.shape[2], device=q.device)
    positions = _positions(past, T, q.device)[..., None]
    seen = places <= positions
    if window is not None:
        seen = seen & (places > positions - window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def _positions(past: int | Tensor, T: int, device: torch.device) -> Tensor:
    """past, ..., past + T - 1: (T,), or (B, 1, T) where every sequence has its own past (B,)."""
    steps = torch.arange(T, device=device)
    return past + steps if isinstance(past, int) else past[:, None, None] + steps


def rotate(x: Tensor, past: int | Tensor, base: float) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of x (..., T, K), whose first step has position `past`.

    A tensor `past` (B,) gives every sequence of x (B, H, T, K) its own.

    Channels j and j + K/2 at position t are rotated by the angle t base^(-2j/K), so that q_t . k_s depends on
    the positions only through t - s.
    """
    T, half = x.shape[-2], x.shape[-1] // 2
    position = _positions(past, T, x.device).double()
    rate = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = position[..., None] * rate
    a, b = at_least_float32(x).chunk(2, dim=-1)
    cos, sin = angle.cos().to(a.dtype), angle.sin().to(a.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
