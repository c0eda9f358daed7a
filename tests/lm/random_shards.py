"""Token shards of random documents."""

import numpy as np

from statetrack.lm.shards import write_shards

END = 10


def random_shards(folder, splits, seed=0):
    """`splits` gives for each name the lengths of its documents, with their end-of-document tokens."""
    generator = np.random.default_rng(seed)
    documents = {
        name: [generator.integers(END, size=n - 1).tolist() for n in lengths]
        for name, lengths in splits.items()
    }
    return write_shards(folder, documents, vocab_size=END + 1, end_of_document=END, documents_per_shard=2)
