"""q, k and v of a delta rule: linear maps, short convolutions and activations, in few products."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.layers.convolution import ShortConvolution
from statetrack.layers.fusion import joined_product, joins, may_read
from statetrack.layers.mixer import Mixer, Packing, offsets, returns_states
from statetrack.ops.short_convolution import convolved_split

ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "identity": lambda x: x}


class ConvolvedQKV(Mixer):
    """A mixer whose q, k and v are silu(conv(W x)), or without a convolution act(W x) and silu(W x).

    `to_q`, `to_k`, `to_v` and `convolutions` are set by the layer, `qk_activation` is in its config.
    """

    config: Any
    to_q: nn.Linear
    to_k: nn.Linear
    to_v: nn.Linear
    convolutions: nn.ModuleList | None

    @abstractmethod
    def _others(self) -> dict[str, nn.Linear]:
        """The other linear maps of x that the layer needs, by name; at least one."""

    def _next_past(self, qkv: Sequence[Tensor], packing: Packing | None) -> tuple[Tensor, ...] | None:
        """The last inputs of the convolutions, where there are any and a state is returned."""
        if self.convolutions is None or not returns_states(packing):
            return None
        each: Any = zip(self.convolutions, qkv, strict=True)
        return tuple(convolution.next_state(y, None, packing) for convolution, y in each)

    def _projections(self, x: Tensor, past: tuple[Tensor, ...] | None, packing: Packing | None):
        """q, k, v after convolution and activation; the other products by name; next past."""
        rest = self._others()
        linears = (self.to_q, self.to_k, self.to_v, *rest.values())
        if joins(x, *linears):
            qkv, others, next_past = self._joined_projections(x, linears, past, packing)
        else:
            parts = [linear(x) for linear in linears]
            others = parts[3:]
            qkv, next_past = self._filtered(parts[:3], past, packing)
        return qkv, dict(zip(rest, others, strict=True)), next_past

    def _joined_projections(
        self,
        x: Tensor,
        linears: Sequence[nn.Linear],
        past: tuple[Tensor, ...] | None,
        packing: Packing | None,
    ):
        """q, k, v after convolution and activation; the other products; next past. All from one product.

        One more kernel splits its columns, convolves and activates, where it can: it takes no past, and has
        no ReLU.
        """
        widths = [linear.out_features for linear in linears]
        joined = joined_product(x, linears)
        parts = joined[..., : sum(widths)].split(widths, dim=-1)
        qkv, others = parts[:3], parts[3:]
        convolutions: tuple[Any, ...] = tuple(self.convolutions or ())
        if (
            past is not None
            or self.config.qk_activation == "relu"
            or not may_read(ShortConvolution, *convolutions)
        ):
            qkv, next_past = self._filtered(qkv, past, packing)
            return qkv, others, next_past
        next_past = self._next_past(qkv, packing)
        silu = self.config.qk_activation == "silu"
        *qkv, rest = convolved_split(
            joined,
            (*widths[:3], sum(widths[3:])),
            [convolution.taps for convolution in convolutions],
            [convolution.bias for convolution in convolutions if convolution.bias is not None],
            silu=(silu, silu, True),
            **offsets(packing),
        )
        return qkv, rest.split(widths[3:], dim=-1) if len(others) > 1 else [rest], next_past

    def _filtered(self, qkv: Sequence[Tensor], past: tuple[Tensor, ...] | None, packing: Packing | None):
        """q, k, v after convolution and activation, and the next past."""
        q, k, v = qkv
        activation = ACTIVATIONS[self.config.qk_activation]
        if self.convolutions is None:
            return (activation(q), activation(k), F.silu(v)), None
        silu = self.config.qk_activation == "silu"
        options = {} if packing is None else {"packing": packing}
        each = zip(self.convolutions, qkv, past or [None] * 3, (silu, silu, True), strict=True)
        (q, k, v), next_past = zip(
            *(convolution(y, p, silu=s, **options) for convolution, y, p, s in each), strict=True
        )
        if not silu:
            q, k = activation(q), activation(k)
        return (q, k, v), next_past if returns_states(packing) else None
