"""Where a token sits once time is cut into chunks, for equal-length batches and packed sequences alike.

Chunks are laid out step-major: first the first chunk of every sequence, then the second chunk of every
sequence that has one, and so on, longest sequence first. The recurrence over chunks then works on
contiguous slices, and a packed batch costs what its tokens cost, not what its longest sequence would.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class DenseLayout:
    """B sequences of equal length T, each cut into `steps` chunks of `chunk` tokens, zero-padded."""

    B: int
    T: int
    chunk: int
    steps: int

    @property
    def sequences(self) -> int:
        return self.B

    def slices(self) -> list[tuple[int, int]]:
        """Per step, the range of chunks that run side by side."""
        return [(s * self.B, (s + 1) * self.B) for s in range(self.steps)]

    def to_chunks(self, x: Tensor, per_token: int = 1) -> Tensor:
        """(B, T n, H, ...) -> (chunks, H, chunk n, ...), where n = per_token."""
        missing = self.steps * self.chunk - self.T
        if missing:
            x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing * per_token))
        x = x.unflatten(1, (self.steps, self.chunk * per_token))
        return x.transpose(0, 1).transpose(2, 3).flatten(0, 1).contiguous()

    def from_chunks(self, x: Tensor, per_token: int = 1) -> Tensor:
        """The inverse of `to_chunks`; padding is dropped."""
        x = x.unflatten(0, (self.steps, self.B)).transpose(2, 3).transpose(0, 1)
        return x.flatten(1, 2)[:, : self.T * per_token]

    def sort_states(self, states: Tensor) -> Tensor:
        return states

    def unsort_states(self, states: Tensor) -> Tensor:
        return states


class PackedLayout:
    """N sequences in one row, bounded by `cu_seqlens`; each has as many chunks as its length needs."""

    def __init__(self, cu_seqlens: Tensor, chunk: int):
        bounds = cu_seqlens.cpu().long()
        lengths = bounds.diff()
        chunks = -(-lengths // chunk)
        self.order = torch.argsort(chunks, descending=True, stable=True)
        self.rank = torch.argsort(self.order)
        self.T, self.chunk, self.sequences = int(bounds[-1]), chunk, lengths.numel()
        self.steps = int(chunks.max())
        active = (chunks[None, :] > torch.arange(self.steps)[:, None]).sum(1)
        ends = active.cumsum(0)
        self._slices = list(zip((ends - active).tolist(), ends.tolist(), strict=True))
        # Row (s, i) holds tokens of the i-th longest sequence from s * chunk on; T marks padding.
        row = torch.full((int(ends[-1]) if self.steps else 0, chunk), self.T)
        offsets = torch.arange(chunk)
        for s, (start, stop) in enumerate(self._slices):
            sequence = self.order[: stop - start, None]
            inside = s * chunk + offsets
            row[start:stop] = torch.where(inside < lengths[sequence], bounds[sequence] + inside, self.T)
        self.token_of_row = row.flatten().to(cu_seqlens.device)
        self.row_of_token = torch.argsort(row.flatten(), stable=True)[: self.T].to(cu_seqlens.device)

    def slices(self) -> list[tuple[int, int]]:
        """Per step, the range of chunks that run side by side."""
        return self._slices

    def to_chunks(self, x: Tensor, per_token: int = 1) -> Tensor:
        """(1, T n, H, ...) -> (chunks, H, chunk n, ...), where n = per_token."""
        tokens = x[0].unflatten(0, (self.T, per_token))
        tokens = torch.cat([tokens, torch.zeros_like(tokens[:1])])
        rows = tokens[self.token_of_row].flatten(0, 1)
        return rows.unflatten(0, (-1, self.chunk * per_token)).transpose(1, 2).contiguous()

    def from_chunks(self, x: Tensor, per_token: int = 1) -> Tensor:
        """The inverse of `to_chunks`; padding is dropped."""
        rows = x.transpose(1, 2).flatten(0, 1).unflatten(0, (-1, per_token))
        return rows[self.row_of_token].flatten(0, 1)[None]

    def sort_states(self, states: Tensor) -> Tensor:
        return states[self.order.to(states.device)]

    def unsort_states(self, states: Tensor) -> Tensor:
        return states[self.rank.to(states.device)]


def chunk_length(T: int, K: int, householders: int) -> int:
    """Tokens per chunk: near the size that measured fastest on a CPU, and dividing T with little padding.

    A chunk costs C^2 per token inside and K V / C per token for its state, so wide heads want longer chunks.
    """
    target = max(1, (32 if K <= 64 else 64) // householders)
    steps = max(1, round(T / target))
    return -(-T // steps)


def make_layout(q: Tensor, cu_seqlens: Tensor | None, householders: int) -> DenseLayout | PackedLayout:
    """The layout for q (B, T, H, K): dense, or packed when `cu_seqlens` is given."""
    B, T, _, K = q.shape
    if cu_seqlens is None:
        chunk = chunk_length(T, K, householders)
        return DenseLayout(B, T, chunk, -(-T // chunk))
    longest = int(cu_seqlens.diff().max())
    return PackedLayout(cu_seqlens, chunk_length(longest, K, householders))
