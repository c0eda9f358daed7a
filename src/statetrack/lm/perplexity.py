"""The loss of language models by position, far past the training length, at constant memory."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from statetrack.errors import UserError, unknown_name
from statetrack.layers import Model
from statetrack.lm.layout import Layout
from statetrack.tasks.token_shards import TokenShards
from statetrack.training.heldout import entropy

__all__ = ["WindowReader", "check_vocabulary", "frequency_losses", "measure", "token_losses"]

LOGITS = 2**25  # most logits held at once: 128 MiB in float32


@dataclass(frozen=True)
class WindowReader:
    """How sequences are read: `batch` of them at once, `window` tokens at a time, the state carried on."""

    window: int = 2048
    batch: int = 4
    precision: Literal["float32", "bfloat16"] = "float32"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        if self.window < 1 or self.batch < 1:
            raise UserError(f"window is {self.window} and batch {self.batch}, expected at least 1 each.")
        if self.precision not in ("float32", "bfloat16"):
            raise unknown_name("precision", self.precision, ["float32", "bfloat16"])

    def autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def pieces(self, shards: TokenShards, split: str, layout: Layout) -> Iterator[tuple[range, int, Tensor]]:
        """Yields for all sequences in turn: their numbers, the position, and tokens (B, count + 1)."""
        for low in range(0, len(layout.starts), self.batch):
            sequences = range(low, min(low + self.batch, len(layout.starts)))
            for position in range(0, layout.length, self.window):
                count = min(self.window, layout.length - position)
                read = [shards.read(split, int(layout.starts[i]) + position, count + 1) for i in sequences]
                tokens = torch.from_numpy(np.stack(read).astype(np.int64))
                yield sequences, position, tokens.to(self.device)


@torch.no_grad()
def token_losses(
    model: Model, tokens: Tensor, state: Sequence[Any] | None = None
) -> tuple[Tensor, list[Any]]:
    """The cross-entropy of each next token, and the states to continue from.

        losses[b, t] = -log p(tokens[b, t + 1] | everything up to tokens[b, t])

    Shapes: tokens (B, T + 1); losses (B, T), float32. Logits are made for a few positions at a time.
    """
    hidden, states = model(tokens[:, :-1], state, read_out=False)
    hidden, targets = hidden.flatten(0, 1), tokens[:, 1:].flatten()
    size = max(1, LOGITS // model.head.out_features)
    losses = [
        F.cross_entropy(model.head(x).float(), y, reduction="none")
        for x, y in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    return torch.cat(losses).view(tokens.shape[0], -1), states


def measure(
    model: Model,
    shards: TokenShards,
    layouts: dict[str, Layout],
    reader: WindowReader,
    progress: Callable[[str, int, int], None] = lambda split, done, of: None,
) -> dict[str, np.ndarray]:
    """The sum of losses in every cell of every split, in float64; memory does not depend on the length.

    `progress` is called with a split's name, and how many of its tokens are done of how many.
    """
    check_vocabulary(model, shards)
    model = model.to(reader.device).eval()
    found = {}
    for split, layout in layouts.items():
        sums, state, done = np.zeros(len(layout.tokens)), None, 0
        for sequences, position, tokens in reader.pieces(shards, split, layout):
            with reader.autocast():
                losses, state = token_losses(model, tokens, state if position else None)
            for i, values in zip(sequences, losses.cpu().numpy(), strict=True):
                layout.add(sums, i, position, values)
            done += losses.numel()
            progress(split, done, len(layout.starts) * layout.length)
        found[split] = sums
    return found


def frequency_losses(shards: TokenShards, layouts: dict[str, Layout]) -> dict[str, float]:
    """By split, the loss of giving every predicted token its share among them, in nats per token.

    No guess that does not look at the text loses less: it is the entropy of these frequencies.
    """
    found = {}
    for split, layout in layouts.items():
        counts = np.zeros(shards.vocab_size, np.int64)
        for start in layout.starts:
            counts += np.bincount(
                shards.read(split, int(start) + 1, layout.length), minlength=shards.vocab_size
            )
        found[split] = entropy(counts)
    return found


def check_vocabulary(model: Model, shards: TokenShards) -> None:
    """Refuse tokens that the model has no embedding for."""
    known = model.embedding.num_embeddings
    if shards.vocab_size > known:
        raise UserError(
            f"the data have a vocabulary of {shards.vocab_size} tokens and the model one of {known}. "
            "Use data made with the model's tokenizer."
        )
