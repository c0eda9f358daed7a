"""Sequences of mixed lengths packed one after the other, so that no time is spent on padding.

A last-position task draws lengths from 3 to 40, say: padded to the longest, half of a batch is padding. What
follows an answer counts for nothing and is left out too.
"""

from typing import NamedTuple

from torch import Generator, Tensor

from statetrack.layers.mixer import Packing
from statetrack.ops.pack import pack
from statetrack.spec import RunSpec
from statetrack.tasks import IGNORE, Batch, answer_positions

DEVIATIONS = 6  # capacity of a row: the mean number of tokens plus this many standard deviations
LOOKED_AT = 4096  # sequences, to know their mean length
TILE = 128  # rows that a matrix product takes at a time


class PackedBatch(NamedTuple):
    tokens: Tensor  # (1, N)
    packing: Packing
    at: Tensor  # (1, B), where the answers are
    targets: Tensor  # (1, B)


class Packer:
    """Packs batches of a spec's task into rows of one length, without a look at what was drawn.

    Of a batch too long for the row (one in 1e9) the last sequences do not count. Rows that are left over make
    sequences of their own, as long as the longest at most; nothing is read there.
    """

    def __init__(self, spec: RunSpec):
        lengths = spec.training.train_lengths
        assert lengths is not None
        drawn = spec.task.sample(LOOKED_AT, lengths, Generator().manual_seed(0))
        taken = (answer_positions(drawn.targets) + 1).double()
        batch, self.width = spec.training.batch, drawn.targets.shape[1]
        room = batch * taken.mean().item() + DEVIATIONS * batch**0.5 * taken.std().item()
        self.rows = min(-(-int(room) // TILE) * TILE, batch * self.width)

    def __call__(self, batch: Batch) -> PackedBatch:
        tokens, bounds, at, answers = pack(batch.inputs, batch.targets, IGNORE, self.rows)
        return PackedBatch(tokens[None], Packing(bounds, self.width), at[None], answers[None])
