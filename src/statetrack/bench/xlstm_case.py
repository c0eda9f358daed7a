"""Whole xLSTM models timed on a CPU beside those of the xlstm package, which has the same blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from statetrack.errors import require
from statetrack.layers import build

VOCABULARY = 3  # parity's


@dataclass(frozen=True)
class XlstmCase:
    """Forward and backward of a model of mLSTM or sLSTM blocks, float32; the peer is the package's own model.

    Both have the published widths, convolutions and gates, so that one computes what the other does on the
    same weights; ours has biases in its norms.
    """

    B: int
    T: int
    mixer: str  # mlstm or slstm
    layers: int = 2
    d_model: int = 128
    heads: int = 4

    peer_name = "xlstm"

    @property
    def name(self) -> str:
        return f"{self.mixer} model B{self.B} T{self.T} L{self.layers} d{self.d_model}"

    def ours(self, backend: str = "auto") -> Callable[[], None]:
        """The recurrences of xLSTM have one backend on a CPU: the same work whatever `backend` is."""
        model = self.our_model()
        return self._work(model, lambda tokens: model(tokens)[0])

    def peer(self) -> Callable[[], None]:
        model = self.peer_model()
        return self._work(model, model)

    def our_model(self) -> nn.Module:
        torch.manual_seed(0)
        sizes = {"layers": self.layers, "d_model": self.d_model, "heads": self.heads}
        return build(self.mixer, vocab_size=VOCABULARY, **sizes)

    def peer_model(self) -> nn.Module:
        package: Any = require("xlstm", extra="dev", for_="comparing with xlstm")
        if self.mixer == "mlstm":
            layer = package.mLSTMLayerConfig(num_heads=self.heads)
            blocks = {"mlstm_block": package.mLSTMBlockConfig(mlstm=layer)}
        else:
            layer = package.sLSTMLayerConfig(num_heads=self.heads, backend="vanilla", dtype="float32")
            blocks = {"slstm_block": package.sLSTMBlockConfig(slstm=layer)}
        config = package.xLSTMLMModelConfig(
            vocab_size=VOCABULARY,
            context_length=self.T,
            num_blocks=self.layers,
            embedding_dim=self.d_model,
            **blocks,
        )
        torch.manual_seed(0)
        model = package.xLSTMLMModel(config)
        model.reset_parameters()
        return model

    def _work(self, model: nn.Module, logits: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(VOCABULARY, (self.B, self.T), generator=generator)
        gradient = torch.randn(self.B, self.T, VOCABULARY, generator=generator)

        def work() -> None:
            model.zero_grad()
            logits(tokens).backward(gradient)

        return work
