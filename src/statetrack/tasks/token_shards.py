"""Token shards: documents as token ids in memory-mapped files, written by `statetrack lm tokenize`.

    DIR/index.json                what there is, with checksums; written last
        train-00000.bin           token ids, little-endian, one document after the other
        train-00000.offsets.npy   where each document of the shard starts, int64
        heldout-00000.bin ...     a split is "train" or any other name
        tokenizer.json            of the `tokenizers` library; none for bytes

Every document ends with the end-of-document token. A split is the stream of its shards in order.
"""

import hashlib
import itertools
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from statetrack.errors import UserError

__all__ = ["TokenShards"]

FORMAT = "statetrack token shards, version 1"
INDEX = "index.json"
TRAIN = "train"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SPLIT_NAME = r"[A-Za-z0-9][A-Za-z0-9_.]*(-[A-Za-z0-9_.]+)*"
PIECE = 2**24  # bytes read at a time


@dataclass(frozen=True)
class Shard:
    """One file of tokens, and beside it the starts of its documents."""

    file: str
    tokens: int
    documents: int
    sha256: str
    offsets_sha256: str

    @property
    def offsets_file(self) -> str:
        return offsets_file(self.file)


def offsets_file(file: str) -> str:
    """The file with the starts of the documents in the shard `file`."""
    return file.removesuffix(".bin") + ".offsets.npy"


class TokenShards:
    """The shards of a folder: splits that read as one stream each, whatever the shards' borders.

        shards = TokenShards.open("data")
        shards.tokens("train")                  how many
        shards.read("train", 1000, 64)          tokens 1000 to 1063 of the stream, (64,)

    Opening reads the index and compares file sizes; `verify` reads every byte and compares checksums.
    """

    def __init__(self, folder: Path, index: dict[str, Any], sha256: str):
        self.folder, self.sha256 = folder, sha256
        self.vocab_size: int = index["vocab_size"]
        self.end_of_document: int = index["end_of_document"]
        self.tokenizer: dict[str, str] = index["tokenizer"]  # "name" and "sha256"
        self.dtype = DTYPES[index["dtype"]]
        self.splits: dict[str, list[Shard]] = {
            name: [Shard(**shard) for shard in shards] for name, shards in index["splits"].items()
        }
        # (shards + 1,): where each shard starts in the stream of its split
        self._starts = {
            name: np.array([0, *itertools.accumulate(shard.tokens for shard in shards)], dtype=np.int64)
            for name, shards in self.splits.items()
        }
        self._maps: dict[str, np.ndarray] = {}
        self._documents: dict[str, np.ndarray] = {}

    @classmethod
    def open(cls, folder: str | Path) -> "TokenShards":
        """The shards in `folder`. A missing or truncated file is a `UserError`."""
        folder = Path(folder)
        raw = read_index(folder)
        shards = cls(folder, _index(folder / INDEX, raw), hashlib.sha256(raw).hexdigest())
        for shard in itertools.chain(*shards.splits.values()):
            shards._check_size(shard)
        return shards

    @property
    def heldout(self) -> list[str]:
        """The names of the splits that are not for training."""
        return [name for name in self.splits if name != TRAIN]

    @property
    def bytes(self) -> int:
        """The size of all token files."""
        return sum(int(starts[-1]) for starts in self._starts.values()) * self.dtype.itemsize

    def tokens(self, split: str) -> int:
        """How many tokens a split has."""
        return int(self._starts[self._known(split)][-1])

    def read(self, split: str, start: int, count: int) -> np.ndarray:
        """Tokens start, ..., start + count - 1 of a split's stream, (count,)."""
        starts = self._starts[self._known(split)]
        if not 0 <= start <= start + count <= starts[-1]:
            raise UserError(
                f"{self.folder}: tokens {start} to {start + count} of {split!r} were asked for, expected a "
                f"range inside 0 to {starts[-1]}."
            )
        out = np.empty(count, self.dtype)
        done, shard = 0, int(np.searchsorted(starts, start, side="right")) - 1
        while done < count:
            first = start + done - int(starts[shard])
            piece = self._map(self.splits[split][shard])[first : first + count - done]
            out[done : done + len(piece)] = piece
            done, shard = done + len(piece), shard + 1
        return out

    def documents(self, split: str) -> np.ndarray:
        """Where the documents of a split start in its stream, with the total appended, (documents + 1,)."""
        if self._known(split) not in self._documents:
            parts = [
                start + self._offsets(shard)
                for start, shard in zip(self._starts[split], self.splits[split], strict=False)
            ]
            self._documents[split] = np.concatenate([*parts, self._starts[split][-1:]])
        return self._documents[split]

    def verify(self) -> None:
        """Compare every file with its checksum; a `UserError` names the first that differs."""
        for shard in itertools.chain(*self.splits.values()):
            for file, expected in ((shard.file, shard.sha256), (shard.offsets_file, shard.offsets_sha256)):
                found = file_sha256(self.folder / file)
                if found != expected:
                    raise UserError(
                        f"{self.folder / file} is damaged: its SHA-256 is {found}, expected {expected}. "
                        f"Delete {self.folder} and tokenise again, or copy the file again."
                    )
            self._check_offsets(shard)

    def _known(self, split: str) -> str:
        if split not in self.splits:
            raise UserError(f"{self.folder} has no split {split!r}, only {', '.join(self.splits)}.")
        return split

    def _map(self, shard: Shard) -> np.ndarray:
        if shard.file not in self._maps:
            try:
                self._maps[shard.file] = np.memmap(self.folder / shard.file, self.dtype, "r")
            except (OSError, ValueError) as error:
                raise UserError(f"{self.folder / shard.file} cannot be read: {error}.") from None
        return self._maps[shard.file]

    def _offsets(self, shard: Shard) -> np.ndarray:
        path = self.folder / shard.offsets_file
        try:
            offsets = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path} cannot be read: {error}.") from None
        if offsets.shape != (shard.documents,) or offsets.dtype != np.int64:
            raise UserError(
                f"{path} holds {offsets.dtype} {offsets.shape}, expected int64 ({shard.documents},)."
            )
        return offsets

    def _check_offsets(self, shard: Shard) -> None:
        bounds = np.append(self._offsets(shard), shard.tokens)
        if bounds[0] != 0 or (np.diff(bounds) <= 0).any():
            raise UserError(f"{self.folder / shard.offsets_file}: expected starts that rise from 0.")

    def _check_size(self, shard: Shard) -> None:
        path, expected = self.folder / shard.file, shard.tokens * self.dtype.itemsize
        try:
            size = path.stat().st_size
            (self.folder / shard.offsets_file).stat()
        except OSError as error:
            raise UserError(
                f"{error.filename} cannot be read: {error.strerror}. The index of {self.folder} lists it: "
                "copy the whole folder again, or tokenise again."
            ) from None
        if size != expected:
            raise UserError(
                f"{path} has {size} bytes, expected {expected} as the index has it. Copy the file again, or "
                f"delete {self.folder} and tokenise again."
            )


def read_index(folder: Path) -> bytes:
    """The bytes of a folder's index.json, whose SHA-256 identifies the data."""
    try:
        return (Path(folder) / INDEX).read_bytes()
    except OSError as error:
        raise UserError(
            f"{Path(folder) / INDEX} cannot be read: {error.strerror}. Expected a folder that "
            "`statetrack lm tokenize --out DIR` has finished."
        ) from None


def _index(path: Path, raw: bytes) -> dict[str, Any]:
    """The index, checked as far as it is used."""
    try:
        index = json.loads(raw)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}.") from None
    found = index.get("format") if isinstance(index, dict) else None
    if found != FORMAT:
        raise UserError(f"{path} has the format {found!r}, expected {FORMAT!r}. Tokenise again.")
    kinds = {"vocab_size": int, "end_of_document": int, "dtype": str, "tokenizer": dict, "splits": dict}
    wrong = [name for name, kind in kinds.items() if type(index.get(name)) is not kind]
    if not wrong and index["dtype"] not in DTYPES:
        wrong = ["dtype"]
    if not wrong and not all(_is_split(name, shards) for name, shards in index["splits"].items()):
        wrong = ["splits"]
    if wrong:
        raise UserError(f"{path}: {wrong[0]} is missing or not as expected. Tokenise again.")
    return index


def _is_split(name: str, shards: Any) -> bool:
    kinds = {"file": str, "tokens": int, "documents": int, "sha256": str, "offsets_sha256": str}
    if re.fullmatch(SPLIT_NAME, name) is None or not isinstance(shards, list) or not shards:
        return False
    for shard in shards:
        if not isinstance(shard, dict) or shard.keys() != kinds.keys():
            return False
        if any(type(shard[key]) is not kind for key, kind in kinds.items()) or shard["tokens"] < 1:
            return False
        if re.fullmatch(r"[\w.-]+\.bin", shard["file"]) is None:  # in the folder itself, nowhere else
            return False
    return True


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    return digest.hexdigest()


@lru_cache(maxsize=4)
def open_shards(folder: str, sha256: str) -> TokenShards:
    """The shards in `folder`, whose index must have this hash. Opened once per process."""
    shards = TokenShards.open(folder)
    if shards.sha256 != sha256:
        raise UserError(
            f"{folder} has changed: the SHA-256 of its index is {shards.sha256}, expected {sha256} as the "
            "spec has it. Bring back the data, or start a new run with them."
        )
    return shards
