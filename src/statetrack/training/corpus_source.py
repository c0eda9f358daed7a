"""Training batches of a corpus: windows of its stream, in an order that depends on seed and epoch alone.

The order is computed, not stored: place i of an epoch is window p(i), where p is a keyed permutation (a
Feistel network), so a rank reads the rows it needs and no list of windows is kept, however many there are.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Generator, Tensor

from statetrack.errors import UserError
from statetrack.spec import RunSpec
from statetrack.tasks import Batch, Corpus
from statetrack.tasks.corpus import next_tokens
from statetrack.tasks.token_shards import TRAIN
from statetrack.training.protocols import Share

VERIFIED_UP_TO = 2**31  # bytes of data whose checksums are compared before training
ROUNDS = 6


class CorpusSource:
    """Window w holds tokens w context, ..., (w + 1) context: every token of the stream is a target once.

    Every window comes once per epoch; a batch may reach into the next. On a GPU the next step's rows are
    read by a thread while this step runs, and copied there from pinned memory without waiting.
    """

    capturable = False

    def __init__(self, spec: RunSpec):
        assert isinstance(spec.task, Corpus)
        self.spec, self.context, self.shards = spec, spec.task.context, spec.task.shards
        check_corpus(spec)
        if self.shards.bytes <= VERIFIED_UP_TO:
            self.shards.verify()
        self.windows = (self.shards.tokens(TRAIN) - 1) // self.context
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="corpus")
        self.ahead: dict[tuple[int, Share], Future[Tensor]] = {}

    def width(self, step: int) -> int:
        return self.context

    def prepare(self, step: int) -> None:
        pass

    def batch(self, step: int, share: Share, generator: Generator) -> Batch:
        if generator.device.type != "cuda":
            return next_tokens(self.rows(step, share))
        waiting = self.ahead.pop((step, share), None)
        rows = self.rows(step, share) if waiting is None else waiting.result()
        # what a change of shares or a jump to another step has left behind
        self.ahead = {key: future for key, future in self.ahead.items() if key[0] >= step}
        if step + 1 < self.spec.training.steps:
            self.ahead[step + 1, share] = self.reader.submit(self.rows, step + 1, share)
        # pinned here, not by the thread: memory must not be pinned while a CUDA graph is being captured
        return next_tokens(rows.pin_memory().to(generator.device, non_blocking=True))

    def rows(self, step: int, share: Share) -> Tensor:
        """The share's rows of a step's batch, (rows, context + 1)."""
        batch = self.spec.training.batch
        places = np.arange(step * batch, (step + 1) * batch)[share.rows(batch)]
        out = np.empty((len(places), self.context + 1), np.int64)
        for row, window in zip(out, self.window_of(places), strict=True):
            row[:] = self.shards.read(TRAIN, int(window) * self.context, self.context + 1)
        return torch.from_numpy(out)

    def window_of(self, places: np.ndarray) -> np.ndarray:
        """The windows at these places of the epochs put one after the other."""
        epochs, indices = np.divmod(places, self.windows)
        out = np.empty_like(places)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            out[inside] = permuted(indices[inside], self.windows, self.spec.seed, int(epoch))
        return out


def permuted(indices: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """p(i) for a permutation p of 0, ..., size - 1 that depends on seed and epoch alone.

    A Feistel network permutes pairs (l, r) of half-words, l, r -> r, l xor f(r), for any f; numbers that
    leave the range go through it again until they are back inside, which keeps it a permutation.
    """
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64(2**half - 1), np.uint64(half)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64)
    out = indices.astype(np.uint64)
    outside = np.ones(len(out), bool)
    while outside.any():
        left, right = out[outside] >> shift, out[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        out[outside] = (left << shift) | right
        outside = out >= size
    return out.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele et al. 2014): every bit of x moves every bit of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def check_corpus(spec: RunSpec) -> None:
    """What would fail at the first step, or at the last, is refused before it."""
    assert isinstance(spec.task, Corpus)
    corpus, training = spec.task, spec.training
    shards = corpus.shards
    if training.train_samples:
        raise UserError(
            f"training: train_samples is {training.train_samples}, but a corpus brings its own training set. "
            "Leave it at 0."
        )
    if training.train_lengths != (corpus.context, corpus.context):
        raise UserError(
            f"training: train_lengths is {training.train_lengths}, expected the corpus' context "
            f"({corpus.context}, {corpus.context}). Set the context of the task instead."
        )
    if TRAIN not in shards.splits or shards.tokens(TRAIN) <= corpus.context:
        found = shards.tokens(TRAIN) if TRAIN in shards.splits else 0
        raise UserError(
            f"{corpus.path} has {found} training tokens, expected more than the context {corpus.context}. "
            "Take more text or a shorter context."
        )
    if not shards.heldout:
        raise UserError(
            f"{corpus.path} has no held-out split to evaluate on. Tokenise with --heldout above 0, or name "
            "one with --heldout-set NAME=PATH."
        )
