"""Small token shards for tests."""

from pathlib import Path

import numpy as np

from statetrack.lm.shards import write_shards
from statetrack.tasks import Corpus
from statetrack.tasks.token_shards import TokenShards

VOCABULARY, END = 17, 16


def cycling_documents(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    """Documents that count up modulo 16 from anywhere: the next token is easy to learn."""
    generator = np.random.default_rng(seed)
    starts, lengths = generator.integers(16, size=count), generator.integers(2, longest, size=count)
    return [[int(s + i) % 16 for i in range(n)] for s, n in zip(starts, lengths, strict=True)]


def small_shards(folder: Path, documents_per_shard: int = 7) -> TokenShards:
    splits = {
        "train": cycling_documents(60, 0),
        "heldout": cycling_documents(9, 1),
        "heldout-short": [[1, 2], [3]],
    }
    return write_shards(folder, splits, VOCABULARY, END, documents_per_shard=documents_per_shard)


def small_corpus(folder: Path, **fields) -> Corpus:
    small_shards(folder)
    return Corpus(str(folder), **({"context": 16} | fields))
