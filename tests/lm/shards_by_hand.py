"""Token shards written with numpy alone: random tokens in documents of given lengths."""

import hashlib
import json

import numpy as np

from statetrack.tasks.token_shards import FORMAT, TokenShards


def write_shards(folder, splits, vocab_size=11, seed=0):
    """`splits` gives for each name the lengths of its documents; two shards where there are two or more."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, index = np.random.default_rng(seed), {}
    for name, lengths in splits.items():
        half = len(lengths) // 2
        parts = [part for part in (lengths[:half], lengths[half:]) if len(part)]
        index[name] = [
            _shard(folder, f"{name}-{i:05d}", part, vocab_size, generator) for i, part in enumerate(parts)
        ]
    content = {
        "format": FORMAT,
        "vocab_size": vocab_size,
        "end_of_document": 0,
        "dtype": "uint16",
        "tokenizer": {"name": "random", "sha256": ""},
        "splits": index,
    }
    (folder / "index.json").write_text(json.dumps(content))
    return TokenShards.open(folder)


def _shard(folder, name, lengths, vocab_size, generator):
    tokens = generator.integers(vocab_size, size=sum(lengths)).astype("<u2")
    offsets = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    tokens.tofile(folder / f"{name}.bin")
    np.save(folder / f"{name}.offsets.npy", offsets)
    return {
        "file": f"{name}.bin",
        "tokens": len(tokens),
        "documents": len(lengths),
        "sha256": hashlib.sha256((folder / f"{name}.bin").read_bytes()).hexdigest(),
        "offsets_sha256": hashlib.sha256((folder / f"{name}.offsets.npy").read_bytes()).hexdigest(),
    }
