"""Writing token shards; `statetrack.tasks.token_shards` has the format and reads them."""

import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from statetrack.errors import UserError
from statetrack.files import write_atomically
from statetrack.tasks.token_shards import DTYPES, FORMAT, INDEX, Shard, TokenShards, offsets_file

__all__ = ["write_shards"]

NO_TOKENIZER = {"name": "none", "sha256": ""}  # of token ids that were never text


def dtype_for(vocab_size: int) -> str:
    """The name of the smallest dtype that holds the tokens."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_shard(folder: Path, split: str, number: int, documents: Sequence[np.ndarray], dtype: str) -> Shard:
    """Write documents, each with its end-of-document token, as one shard; returns its entry in the index."""
    file, kind = f"{split}-{number:05d}.bin", DTYPES[dtype]
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    offsets = io.BytesIO()
    np.save(offsets, np.cumsum(lengths) - lengths, allow_pickle=False)
    tokens = np.concatenate(documents)
    raw = tokens.astype(kind, copy=False).tobytes()
    write_atomically(folder / offsets_file(file), [offsets.getvalue()])
    write_atomically(folder / file, [raw])
    return Shard(
        file,
        len(tokens),
        len(documents),
        hashlib.sha256(raw).hexdigest(),
        hashlib.sha256(offsets.getvalue()).hexdigest(),
    )


def write_index(
    folder: Path,
    splits: Mapping[str, Sequence[Shard]],
    vocab_size: int,
    end_of_document: int,
    tokenizer: Mapping[str, str] = NO_TOKENIZER,
) -> None:
    """Write index.json, after all shards: from then on the folder can be opened."""
    index = {
        "format": FORMAT,
        "vocab_size": vocab_size,
        "end_of_document": end_of_document,
        "dtype": dtype_for(vocab_size),
        "tokenizer": dict(tokenizer),
        "splits": {name: [asdict(shard) for shard in shards] for name, shards in splits.items()},
    }
    write_atomically(folder / INDEX, [(json.dumps(index, indent=1) + "\n").encode()])


def write_shards(
    folder: str | Path,
    splits: Mapping[str, Iterable[Sequence[int]]],
    vocab_size: int,
    end_of_document: int,
    *,
    documents_per_shard: int = 2**30,
    tokenizer: Mapping[str, str] = NO_TOKENIZER,
) -> TokenShards:
    """Token ids that are there already, as shards: per split its documents, without end-of-document tokens.

    write_shards("data", {"train": [[1, 2], [3]], "heldout": [[2]]}, vocab_size=5, end_of_document=4)
    """
    folder, written = Path(folder), {}
    for name, documents in splits.items():
        ended = [np.array([*document, end_of_document], dtype=np.int64) for document in documents]
        largest = max((int(document.max()) for document in ended), default=-1)
        if largest >= vocab_size or min((int(document.min()) for document in ended), default=0) < 0:
            raise UserError(f"write_shards: tokens of {name!r}, expected from 0 to {vocab_size - 1}.")
        if any((document[:-1] == end_of_document).any() for document in ended):
            raise UserError(f"write_shards: a document of {name!r} holds the end-of-document token.")
        pieces = [ended[i : i + documents_per_shard] for i in range(0, len(ended), documents_per_shard)]
        written[name] = [
            write_shard(folder, name, number, piece, dtype_for(vocab_size))
            for number, piece in enumerate(pieces)
        ]
    write_index(
        folder,
        {name: shards for name, shards in written.items() if shards},
        vocab_size,
        end_of_document,
        tokenizer,
    )
    return TokenShards.open(folder)
