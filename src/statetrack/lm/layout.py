"""Sequences of equal length from the documents of a split, and the cells in which their losses are summed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from statetrack.errors import UserError, unknown_name

Rows = Literal["concatenated", "long"]
ROWS = ("concatenated", "long")


@dataclass(frozen=True, eq=False)
class Layout:
    """Sequence i predicts the tokens starts[i] + 1, ..., starts[i] + length of a split, each from all before.

    Position p in [0, length) is the prediction made after p + 1 tokens. A cell is a run of positions of one
    sequence whose predicted tokens belong to one document and whose positions to one bin. Cells are sorted by
    sequence, then by position.
    """

    starts: np.ndarray  # (sequences,), the first token of each
    edges: np.ndarray  # (bins + 1,), from 0 to length: the bins of positions
    sequence: np.ndarray  # (cells,), as are the next four
    document: np.ndarray
    bin: np.ndarray
    position: np.ndarray  # the first of the cell
    tokens: np.ndarray  # how many positions the cell has

    @property
    def length(self) -> int:
        return int(self.edges[-1])

    def cells_of(self, sequence: int) -> slice:
        """The cells of one sequence."""
        return slice(*np.searchsorted(self.sequence, (sequence, sequence + 1)))

    def add(self, sums: np.ndarray, sequence: int, position: int, losses: np.ndarray) -> None:
        """Add the losses of consecutive positions of a sequence, from `position` on, to their cells."""
        cells = self.cells_of(sequence)
        begins = self.position[cells]
        first = cells.start + np.searchsorted(begins, position, side="right") - 1
        last = cells.start + np.searchsorted(begins, position + len(losses), side="left")
        within = np.maximum(self.position[first:last] - position, 0)
        sums[first:last] += np.add.reduceat(losses.astype(np.float64), within)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it."""
        cells = {name: getattr(self, name).tolist() for name in ("sequence", "document", "bin", "tokens")}
        return {"starts": self.starts.tolist(), "edges": self.edges.tolist(), "cells": cells}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Layout":
        cells = {name: np.asarray(values, dtype=np.int64) for name, values in data["cells"].items()}
        starts, edges = (np.asarray(data[name], dtype=np.int64) for name in ("starts", "edges"))
        # every sequence covers the same positions, without gaps
        position = np.concatenate([[0], np.cumsum(cells["tokens"])[:-1]]) % edges[-1]
        return cls(starts, edges, position=position, **cells)


def layout_of(documents: np.ndarray, edges: np.ndarray, rows: Rows = "concatenated", most: int = 0) -> Layout:
    """The sequences of a split whose documents begin at `documents`, with the number of tokens appended.

    "concatenated": all documents one after another, cut every `length` tokens, so that a sequence holds many
    documents and the state runs on over their borders. "long": the beginning of each document that has more
    than `length` tokens. With `most`, at most that many sequences, spread evenly over the split.
    """
    if rows not in ROWS:
        raise unknown_name("perplexity: rows", rows, ROWS)
    if most < 0:
        raise UserError(f"perplexity: sequences is {most}, expected 0 (all of them) or more.")
    documents, length = np.asarray(documents, dtype=np.int64), int(edges[-1])
    if rows == "concatenated":
        starts = documents[0] + length * np.arange(max(0, int(documents[-1] - documents[0] - 1) // length))
    else:
        starts = documents[:-1][np.diff(documents) > length]
    if not len(starts):
        longest, advice = int(np.diff(documents).max(initial=0)), ""
        if rows == "long":
            advice = ", or --rows concatenated"
        raise UserError(
            f"perplexity: no sequence of {length} tokens: the split has {documents[-1]} tokens, its longest "
            f"document {longest}. Choose a smaller --length{advice}."
        )
    if most and len(starts) > most:
        starts = starts[np.arange(most) * len(starts) // most]
    return Layout(starts, np.asarray(edges), **_cells(documents, starts, edges))


def _cells(documents: np.ndarray, starts: np.ndarray, edges: np.ndarray) -> dict[str, np.ndarray]:
    parts = []
    for i, start in enumerate(starts):
        borders = documents - (start + 1)
        borders = borders[(borders > 0) & (borders < edges[-1])]
        position = np.union1d(edges[:-1], borders)
        parts.append(
            {
                "sequence": np.full(len(position), i),
                "document": np.searchsorted(documents, start + 1 + position, side="right") - 1,
                "bin": np.searchsorted(edges, position, side="right") - 1,
                "position": position,
                "tokens": np.diff(position, append=edges[-1]),
            }
        )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def bin_edges(length: int, bins: int, contexts: Iterable[int] = ()) -> np.ndarray:
    """Edges of about equal bins of positions, the training lengths among them."""
    if length < 1 or bins < 1:
        raise UserError(f"perplexity: length is {length} and bins {bins}, expected at least 1 each.")
    inside = [context for context in contexts if 0 < context < length]
    return np.unique(np.concatenate([np.linspace(0, length, bins + 1).round(), inside]).astype(np.int64))
