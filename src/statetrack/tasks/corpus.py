"""Text as a task: `--task corpus:DIR`, token shards whose labels are the next tokens."""

from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from statetrack.errors import UserError
from statetrack.tasks.task import Batch, Task
from statetrack.tasks.token_shards import TRAIN, TokenShards, open_shards, read_index

PREFIX = "corpus:"
BINS = 4  # of positions in the held-out windows, where no edges are given


@dataclass(frozen=True)
class Corpus(Task):
    """The token shards in the folder `path`, as `statetrack lm tokenize` writes them.

        stream    t0 t1 t2 t3 t4 ...
        inputs    t0 t1 t2           targets    t1 t2 t3          with context 3

    A training sequence is a window of `context` tokens and the one after them. With `reset`, every document
    starts from an empty state: at its end-of-document predecessor, so that its first token is predicted
    too. Held-out splits are evaluated in windows as long as the last of `eval_lengths`, which are edges of
    positions and may pass the context. The data are part of the task, their location is not: `sha256` is
    that of index.json, which holds the checksums of all files.
    """

    path: str = field(compare=False)  # the folder
    sha256: str = ""  # of index.json; filled in when empty, like the vocabulary when 0
    context: int = 2048  # tokens of a training sequence
    reset: bool = False  # start every document from an empty state
    vocabulary: int = 0  # of the model: that of the shards, or more, such as a multiple of 64

    labels = "next"

    def __post_init__(self):
        if self.context < 1:
            raise UserError(f"Corpus: context is {self.context}, expected at least 1.")
        if not self.sha256:  # written out, so that a spec can be read where the data are not
            object.__setattr__(self, "sha256", sha256(read_index(Path(self.path))).hexdigest())
        if not self.vocabulary:
            object.__setattr__(self, "vocabulary", self.shards.vocab_size)

    @property
    def vocab_size(self) -> int:
        return self.vocabulary

    @property
    def n_classes(self) -> int:
        return self.vocabulary

    @property
    def chance(self) -> float:
        return 1 / self.vocabulary

    @property
    def train_lengths(self) -> tuple[int, int]:  # type: ignore[override]
        return self.context, self.context

    @property
    def eval_lengths(self) -> tuple[int, ...]:  # type: ignore[override]
        """An eighth, a quarter, a half and all of the context."""
        return tuple(sorted({max(1, self.context >> i) for i in range(BINS)}))

    @property
    def shards(self) -> TokenShards:
        """The data, checked against `sha256` and the vocabulary."""
        shards = open_shards(self.path, self.sha256)
        if self.vocabulary and shards.vocab_size > self.vocabulary:
            raise UserError(
                f"Corpus: vocabulary is {self.vocabulary}, expected at least {shards.vocab_size}, the tokens "
                f"of {self.path}. A model with a smaller vocabulary needs data of its own tokenizer."
            )
        return shards

    def capturable(self, device: torch.device) -> bool:
        return False

    def fill(self, lengths: Tensor, generator: Generator, width: int | None = None) -> Batch:
        raise UserError("Corpus: its sequences are stored and cannot be drawn by length.")

    def sample(self, batch: int, lengths: tuple[int, int], generator: Generator) -> Batch:
        """`batch` windows of `lengths[1]` tokens from anywhere in the first held-out split, or in "train"."""
        shards, length = self.shards, lengths[1]
        split = next(iter(shards.heldout), TRAIN)
        starts = shards.tokens(split) - length
        if starts < 1:
            raise UserError(
                f"Corpus: windows of {length} tokens, expected at most {shards.tokens(split) - 1}: the split "
                f"{split!r} of {self.path} is shorter."
            )
        chosen = torch.randint(starts, (batch,), generator=generator, device=generator.device).tolist()
        rows = np.stack([shards.read(split, start, length + 1) for start in chosen])
        return next_tokens(torch.from_numpy(rows.astype(np.int64)).to(generator.device))


def next_tokens(rows: Tensor) -> Batch:
    """Rows of T + 1 tokens as a batch: T inputs each, and the tokens after them."""
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def corpus_task(name: str) -> Corpus:
    """The task of "corpus:DIR"."""
    if name == PREFIX:
        raise UserError("task 'corpus:' names no folder, expected corpus:DIR.")
    return Corpus(name.removeprefix(PREFIX))
