"""The loss of language models by position, far past the training length, at constant memory."""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from statetrack.errors import UserError, unknown_name
from statetrack.files import write_text
from statetrack.layers import Model
from statetrack.lm.layout import Layout
from statetrack.tasks.token_shards import TokenShards

__all__ = [
    "Measured",
    "Perplexities",
    "PositionLoss",
    "Reading",
    "measure",
    "merge",
    "read_perplexities",
    "token_losses",
    "write_perplexities",
]

FORMAT = "statetrack perplexity 1"
LOGITS = 2**25  # most logits held at once: 128 MiB in float32


@dataclass(frozen=True)
class Reading:
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

    def pieces(self, shards: TokenShards, split: str, layout: Layout):
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


class PositionLoss(NamedTuple):
    """The mean loss in each bin of positions, in nats, over sequences; arrays (bins,)."""

    mean: np.ndarray
    standard_error: np.ndarray  # over sequences; NaN for a single one


@dataclass(frozen=True, eq=False)
class Measured:
    """What one model lost on every cell of the layouts. `losses` are sums in nats, by split."""

    id: str  # of the run, or a name
    label: str  # models of one label differ in nothing but their seed
    losses: dict[str, np.ndarray]
    seed: int = 0
    context: int = 0  # tokens of a training sequence; 0 if unknown
    parameters: int = 0


def measure(
    model: Model,
    shards: TokenShards,
    layouts: dict[str, Layout],
    reading: Reading,
    progress: Callable[[str, int, int], None] = lambda split, done, of: None,
) -> dict[str, np.ndarray]:
    """The sum of losses in every cell of every split, in float64; memory does not depend on the length.

    `progress` is called with a split's name, and how many of its tokens are done of how many.
    """
    check_vocabulary(model, shards)
    model = model.to(reading.device).eval()
    found = {}
    for split, layout in layouts.items():
        sums, state, done = np.zeros(len(layout.tokens)), None, 0
        for sequences, position, tokens in reading.pieces(shards, split, layout):
            with reading.autocast():
                losses, state = token_losses(model, tokens, state if position else None)
            for i, values in zip(sequences, losses.cpu().numpy(), strict=True):
                layout.add(sums, i, position, values)
            done += losses.numel()
            progress(split, done, len(layout.starts) * layout.length)
        found[split] = sums
    return found


def check_vocabulary(model: Model, shards: TokenShards) -> None:
    """Refuse tokens that the model has no embedding for."""
    known = model.embedding.num_embeddings
    if shards.vocab_size > known:
        raise UserError(
            f"the data have a vocabulary of {shards.vocab_size} tokens and the model one of {known}. "
            "Use data made with the model's tokenizer."
        )


@dataclass(frozen=True, eq=False)
class Perplexities:
    """Losses of several models on the same sequences, and what these were."""

    data: str  # sha256 of the shards' index
    rows: str
    layouts: dict[str, Layout]
    models: tuple[Measured, ...]
    reading: dict[str, Any] = field(default_factory=dict)  # how it was computed; changes rounding only

    def by_position(self, model: Measured, split: str) -> PositionLoss:
        """Mean and standard error over sequences of the loss in each bin of positions."""
        layout = self.layouts[split]
        shape = (len(layout.starts), len(layout.edges) - 1)
        sums = np.zeros(shape)
        np.add.at(sums, (layout.sequence, layout.bin), model.losses[split])
        means = sums / np.diff(layout.edges)
        n = len(means)
        error = means.std(0, ddof=1) / n**0.5 if n > 1 else np.full(shape[1], np.nan)
        return PositionLoss(means.mean(0), error)

    def mean_loss(self, model: Measured, split: str, low: int = 0, high: int | None = None) -> float:
        """The mean loss at positions [low, high), in nats per token; they must be edges of bins."""
        layout = self.layouts[split]
        inside = in_window(layout, low, layout.length if high is None else high)
        return float(model.losses[split][inside].sum() / layout.tokens[inside].sum())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Means by position are repeated there for readers of the file."""
        return {
            "format": FORMAT,
            "data_sha256": self.data,
            "rows": self.rows,
            "reading": self.reading,
            "splits": {
                split: {
                    "length": layout.length,
                    "sequences": len(layout.starts),
                    "documents": len(np.unique(layout.document)),
                    **layout.to_dict(),
                }
                for split, layout in self.layouts.items()
            },
            "models": [self._model_dict(model) for model in self.models],
        }

    def _model_dict(self, model: Measured) -> dict[str, Any]:
        splits = {}
        for split, losses in model.losses.items():
            mean, error = self.by_position(model, split)
            total = self.mean_loss(model, split)
            splits[split] = {
                "loss": total,
                "perplexity": float(np.exp(total)),
                "by_position": {
                    "mean": _short(mean),
                    "standard_error": [None if np.isnan(e) else e for e in _short(error)],
                    "perplexity": _short(np.exp(mean)),
                },
                "cells": _short(losses),
            }
        names = ("id", "label", "seed", "context", "parameters")
        return {name: getattr(model, name) for name in names} | {"splits": splits}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Perplexities":
        layouts = {split: Layout.from_dict(layout) for split, layout in data["splits"].items()}
        models = []
        for model in map(dict, data["models"]):
            splits = model.pop("splits")
            losses = {split: np.asarray(of["cells"], dtype=float) for split, of in splits.items()}
            models.append(Measured(losses=losses, **model))
        return cls(data["data_sha256"], data["rows"], layouts, tuple(models), data["reading"])


def in_window(layout: Layout, low: int, high: int) -> np.ndarray:
    """Which cells have positions in [low, high), bool (cells,)."""
    edges = layout.edges.tolist()
    if low not in edges or high not in edges or low >= high:
        raise UserError(
            f"positions {low} to {high} are not whole bins, expected two of the edges {edges}. Measure again "
            "with other --bins."
        )
    return (layout.position >= low) & (layout.position < high)


def merge(measured: Sequence[Perplexities]) -> Perplexities:
    """Models measured one by one, as one; refuses files about different sequences."""
    first = measured[0]
    for other in measured[1:]:
        same = (first.data, first.rows, list(first.layouts)) == (other.data, other.rows, list(other.layouts))
        if not same or any(
            first.layouts[split].to_dict() != layout.to_dict() for split, layout in other.layouts.items()
        ):
            raise UserError(
                "the losses are of different sequences (data, length, rows, bins or splits) and cannot "
                "be paired. Measure the models with the same options."
            )
    models = {model.id: model for one in measured for model in one.models}
    return Perplexities(first.data, first.rows, first.layouts, tuple(models.values()), first.reading)


def write_perplexities(path: Path, perplexities: Perplexities) -> None:
    """One JSON file with means, standard errors and the losses of every cell."""
    write_text(path, json.dumps(perplexities.to_dict()) + "\n")


def read_perplexities(path: Path) -> Perplexities:
    """What `write_perplexities` wrote."""
    try:
        data = json.loads(Path(path).read_text())
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise UserError(f"{path} was not written by `statetrack lm perplexity` of this version.")
        return Perplexities.from_dict(data)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist, expected a file of `statetrack lm perplexity`.") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read as losses by position: {error}") from error


def _short(values: np.ndarray) -> list[float]:
    """Eight digits: more than float32 sums hold, and half of the file."""
    return [float(f"{value:.8g}") for value in values]
