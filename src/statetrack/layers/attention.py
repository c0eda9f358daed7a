"""Causal softmax attention: the Transformer baseline, whose state grows with the sequence."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.config import added
from statetrack.errors import UserError
from statetrack.layers.checks import check_eps, check_sizes, divide
from statetrack.layers.fusion import fuses
from statetrack.layers.mixer import Mixer, Packing, returns_states
from statetrack.layers.norm import RMSNorm
from statetrack.layers.padding import run_padded
from statetrack.ops.padded_rows import PaddedRows
from statetrack.ops.rotary import positions, rotate, rotated_split


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
        _check_batch(state, len(qkv))
        past = _past(state)
        q, k, v = self._heads(qkv, past)
        after = _extended(state, k, v)
        y = _attend(q, after.k, after.v, past, self.config.window).transpose(1, 2).flatten(-2)
        if rows is not None:
            # the padding lies behind the steps that count, and later ones are written over it
            y, after = rows.packed(y), after._replace(lengths=past + rows.lengths)
        return self.to_out(y), after if returns_states(packing) else None

    def _heads(self, qkv: Tensor, past: int | Tensor = 0) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, heads, T, K), k and v (B, kv_heads, T, K) from the product of x (B, T, ...), rotated."""
        base, normed = self.config.rotary_base, self.q_norm is not None
        if self.config.positions and not normed and isinstance(past, int) and past == 0 and fuses(qkv):
            q, k, v = rotated_split(qkv, self.config.heads, self.kv_heads, base)
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k, v = qkv.split(self.widths, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        heads = self.config.heads, self.kv_heads, self.kv_heads
        q, k, v = (y.unflatten(-1, (n, -1)).transpose(1, 2) for y, n in zip((q, k, v), heads, strict=True))
        if self.config.positions:
            q, k = rotate(q, past, base), rotate(k, past, base)
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
    own = positions(past, T, q.device)[..., None]
    seen = places <= own
    if window is not None:
        seen = seen & (places > own - window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
