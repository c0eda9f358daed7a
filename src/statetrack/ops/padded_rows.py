"""Packed sequences as the rows of a padded batch, for recurrences without a packed form of their own."""

import torch
from torch import Tensor

from statetrack.ops.checks import check_offsets, check_packing

# Gates of xLSTM cells before their maps: with f OPEN and i SHUT, log sigmoid(f) = 0 and exp(i) = 0, and a
# step leaves the cell as it is. Finite, since differences of infinities are NaN.
OPEN, SHUT = 1e30, -1e30


class PaddedRows:
    """Sequences packed in one row (1, N, ...) as rows of a batch (S, L, ...), padded behind them, and back.

    L is `max_seqlen`, or the longest sequence when None, which has to be looked up on the host.
    """

    def __init__(self, op: str, cu_seqlens: Tensor, max_seqlen: int | None, like: Tensor):
        sequences = check_packing(op, cu_seqlens, like.shape[0], like.device)
        check_offsets(op, cu_seqlens, max_seqlen, like.shape[1])
        self.lengths = cu_seqlens.diff()
        longest = int(self.lengths.max()) if max_seqlen is None else max_seqlen
        self.shape = sequences, longest
        steps = torch.arange(like.shape[1], device=like.device)
        row = torch.bucketize(steps, cu_seqlens[1:], right=True)
        self.places = row, steps - cu_seqlens[row]

    def padded(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """x (1, N, ...) as (S, L, ...), with `fill` at padding."""
        return x.new_full((*self.shape, *x.shape[2:]), fill).index_put(self.places, x[0])

    def packed(self, x: Tensor) -> Tensor:
        """x (S, L, ...) as (1, N, ...), without padding."""
        return x[self.places][None]

    def kept_where_empty(self, after: Tensor, before: Tensor) -> Tensor:
        """The states `after` (S, ...), and those `before` for sequences without steps."""
        empty = (self.lengths == 0).view(-1, *[1] * (after.ndim - 1))
        return torch.where(empty, before.to(after.dtype), after)
