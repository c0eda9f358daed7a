"""The losses of language models on the same text, cell by cell; means by position; their file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from statetrack.errors import UserError
from statetrack.files import write_text
from statetrack.lm.layout import Layout

__all__ = [
    "Measured",
    "Perplexities",
    "PositionLoss",
    "in_window",
    "merge",
    "read_perplexities",
    "write_perplexities",
]

FORMAT = "statetrack perplexity 1"


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
    weights: str = ""  # SHA-256 of the weights


@dataclass(frozen=True, eq=False)
class Perplexities:
    """Losses of several models on the same sequences, and what these were."""

    data: str  # sha256 of the shards' index
    rows: str
    layouts: dict[str, Layout]
    models: tuple[Measured, ...]
    precision: str = "float32"

    def by_position(self, model: Measured, split: str) -> PositionLoss:
        """Mean and standard error over sequences of the loss in each bin of positions."""
        return _over_sequences(self._by_sequence(model, split))

    def paired_by_position(self, pairs: Sequence[tuple[Measured, Measured]], split: str) -> PositionLoss:
        """The same of the loss of the second of each pair minus that of the first, averaged over pairs."""
        found = [self._by_sequence(b, split) - self._by_sequence(a, split) for a, b in pairs]
        return _over_sequences(np.mean(found, axis=0))

    def _by_sequence(self, model: Measured, split: str) -> np.ndarray:
        """The mean loss of each sequence in each bin, (sequences, bins)."""
        layout = self.layouts[split]
        sums = np.zeros((len(layout.starts), len(layout.edges) - 1))
        np.add.at(sums, (layout.sequence, layout.bin), model.losses[split])
        return sums / np.diff(layout.edges)

    def mean_loss(self, model: Measured, split: str, low: int = 0, high: int | None = None) -> float:
        """The mean loss at positions [low, high), in nats per token; they must be edges of bins."""
        layout = self.layouts[split]
        inside = in_window(layout, low, layout.length if high is None else high)
        return float(model.losses[split][inside].sum() / layout.tokens[inside].sum())

    def same_sequences(self, other: "Perplexities") -> bool:
        """Whether both are about the same cells of the same data."""
        if (self.data, self.rows, list(self.layouts)) != (other.data, other.rows, list(other.layouts)):
            return False
        pairs = zip(self.layouts.values(), other.layouts.values(), strict=True)
        return all(mine.to_dict() == theirs.to_dict() for mine, theirs in pairs)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Means by position are repeated there for readers of the file."""
        return {
            "format": FORMAT,
            "data_sha256": self.data,
            "rows": self.rows,
            "precision": self.precision,
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
                    "mean": shortened(mean),
                    "standard_error": [None if np.isnan(e) else e for e in shortened(error)],
                    "perplexity": shortened(np.exp(mean)),
                },
                "cells": shortened(losses),
            }
        names = ("id", "label", "seed", "context", "parameters", "weights")
        return {name: getattr(model, name) for name in names} | {"splits": splits}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Perplexities":
        layouts = {split: Layout.from_dict(layout) for split, layout in data["splits"].items()}
        models = []
        for model in map(dict, data["models"]):
            splits = model.pop("splits")
            losses = {split: np.asarray(of["cells"], dtype=float) for split, of in splits.items()}
            models.append(Measured(losses=losses, **model))
        return cls(data["data_sha256"], data["rows"], layouts, tuple(models), data["precision"])


def _over_sequences(losses: np.ndarray) -> PositionLoss:
    """Mean and standard error of losses (sequences, bins) over the first axis."""
    n = len(losses)
    error = losses.std(0, ddof=1) / n**0.5 if n > 1 else np.full(losses.shape[1], np.nan)
    return PositionLoss(losses.mean(0), error)


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
    if not all(first.same_sequences(other) for other in measured[1:]):
        raise UserError(
            "the losses are of different sequences (data, length, rows, bins, splits) and cannot be paired. "
            "Measure the models with the same options."
        )
    models = {model.id: model for one in measured for model in one.models}
    return Perplexities(first.data, first.rows, first.layouts, tuple(models.values()), first.precision)


def write_perplexities(path: Path, perplexities: Perplexities) -> None:
    """One JSON file with means, standard errors and the losses of every cell."""
    write_text(path, json.dumps(perplexities.to_dict()) + "\n")


def read_perplexities(path: Path) -> Perplexities:
    """What `write_perplexities` wrote; a file of anything else is a `UserError`."""
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


def shortened(values: np.ndarray) -> list[float]:
    """The values with eight digits, as files keep them: more than sums of float32 have."""
    return [float(f"{value:.8g}") for value in values]
