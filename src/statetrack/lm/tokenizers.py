"""Tokenizers: bytes, or any file of the `tokenizers` library. Both are stored as tokenizer.json.

Bytes need no library, but are written as a file that it reads too, so that data, runs and exported models
carry their tokenizer in one form.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from statetrack.errors import UserError, require
from statetrack.tasks.token_shards import INDEX

__all__ = [
    "BytesTokenizer",
    "FileTokenizer",
    "Tokenizer",
    "bytes_json",
    "check_same_tokenizer",
    "load_tokenizer",
    "tokenizer_sha256",
    "train_bpe",
]

FILE = "tokenizer.json"
END = "<|endoftext|>"  # the end-of-document token where we choose it
# names of the end-of-document token in published tokenizers, in the order they are looked for
KNOWN_ENDS = (END, "</s>", "<eos>", "<|end_of_text|>", "<|endofdocument|>", "<end_of_text>", "[SEP]")
PIECE = 2**18  # characters of a text that are encoded at once
SMALLEST_BPE = 257  # 256 bytes and the end-of-document token


class Tokenizer(Protocol):
    """Text to token ids and back. No text gives the token `end_of_document`."""

    name: str
    vocab_size: int
    end_of_document: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, without the end-of-document token."""
        ...

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        ...


class BytesTokenizer:
    """UTF-8 bytes: token b is byte b, and 256 ends a document."""

    name, vocab_size, end_of_document = "bytes", 257, 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; end-of-document tokens are left out, and bytes that are not UTF-8 replaced."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def to_json(self) -> str:
        return bytes_json()


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, from the content of its file.

    Special tokens in a text are encoded as the text they are, so that no document can end another. A
    tokenizer without an end-of-document token gets one, `<|endoftext|>`, after its last id.
    """

    def __init__(self, content: str, name: str, end_of_document: str | None = None):
        library = require("tokenizers", extra="lm", for_="a tokenizer file")
        try:
            self.tokenizer: Any = library.Tokenizer.from_str(content)
        except Exception as error:  # the library raises plain exceptions
            raise UserError(f"{name} is not a file of the `tokenizers` library: {error}.") from None
        self.name = name
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.end_of_document = self._end(end_of_document)
        self.vocab_size: int = max(self.tokenizer.get_vocab().values()) + 1

    def encode(self, text: str) -> list[int]:
        return self.encode_documents([text])[0].tolist()

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; special tokens are left out."""
        return self.tokenizer.decode([int(token) for token in tokens])

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        pieces = [list(_pieces(text)) for text in texts]
        flat = [piece for parts in pieces for piece in parts]
        self.tokenizer.encode_special_tokens = True
        encoded = iter(self.tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        ids = [
            np.concatenate([np.array(next(encoded).ids, np.uint32) for _ in parts]) if parts else _NOTHING
            for parts in pieces
        ]
        # only an end-of-document token that is not marked as special can come from a text
        return [document[document != self.end_of_document] for document in ids]

    def to_json(self) -> str:
        return self.tokenizer.to_str(pretty=False)

    def _end(self, asked: str | None) -> int:
        """The id of the end-of-document token, which is added if there is none."""
        if asked is not None and self.tokenizer.token_to_id(asked) is None:
            raise UserError(
                f"{self.name} has no token {asked!r}. Name one of its tokens as --end-of-document, or leave "
                "it out."
            )
        for known in (asked,) if asked else KNOWN_ENDS:
            found = self.tokenizer.token_to_id(known)
            if found is not None:
                return found
        self.tokenizer.add_special_tokens([END])
        return self.tokenizer.token_to_id(END)


_NOTHING = np.empty(0, np.uint32)


def _pieces(text: str) -> Iterator[str]:
    """A long text in pieces that end with a line where they can: the library needs much memory for one."""
    start = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            line = text.rfind("\n", start, end) + 1
            end = line if line > start else end
        yield text[start:end]
        start = end


def load_tokenizer(path: str | Path, end_of_document: str | None = None) -> Tokenizer:
    """The tokenizer of a file, of a folder of token shards, or of a run's or exported model's folder."""
    path = Path(path)
    file = path / FILE if path.is_dir() else path
    try:
        content = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{file} cannot be read: {reason}. Expected a tokenizer.json.") from None
    try:
        if json.loads(content) == json.loads(bytes_json()):
            return BytesTokenizer()
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}. Expected a tokenizer.json.") from None
    return FileTokenizer(content, file.name, end_of_document or _recorded_end(path, content))


def _recorded_end(folder: Path, content: str) -> str | None:
    """The end-of-document token that the index beside a tokenizer names; None where there is no index."""
    try:
        wanted = json.loads((folder / INDEX).read_text())["end_of_document"]
        parsed = json.loads(content)
        named = {token["id"]: token["content"] for token in parsed["added_tokens"]}
        named |= {number: token for token, number in dict(parsed["model"]["vocab"]).items()}
        return named.get(wanted)
    except (OSError, ValueError, LookupError, TypeError):
        return None


def tokenizer_sha256(tokenizer: Tokenizer) -> str:
    """What identifies a tokenizer: the SHA-256 of its file's content, whatever its line breaks and order."""
    content = json.dumps(json.loads(tokenizer.to_json()), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def check_same_tokenizer(data: str | Path, model: str | Path) -> None:
    """A `UserError` if the data in the folder `data` have another tokenizer than the model in `model`."""
    ours, theirs = load_tokenizer(data), load_tokenizer(model)
    if tokenizer_sha256(ours) != tokenizer_sha256(theirs):
        raise UserError(
            f"{data} was tokenised by {_described(ours)}, and {model} was trained with {_described(theirs)}. "
            f"Tokenise the text again with --tokenizer {Path(model) / FILE}."
        )


def _described(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.name} ({tokenizer.vocab_size} tokens, {tokenizer_sha256(tokenizer)[:12]})"


def train_bpe(texts: Iterable[str], vocab_size: int) -> FileTokenizer:
    """A byte-level BPE of `vocab_size` tokens from these texts; digits stay single. The same texts in the
    same order give the same file."""
    if vocab_size < SMALLEST_BPE:
        raise UserError(f"--train-tokenizer is {vocab_size}, expected at least {SMALLEST_BPE}.")
    library = require("tokenizers", extra="lm", for_="training a tokenizer")
    tokenizer = library.Tokenizer(library.models.BPE())
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = library.pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in _pieces(text)), trainer)
    return FileTokenizer(tokenizer.to_str(pretty=False), FILE)


@lru_cache(maxsize=1)
def bytes_json() -> str:
    """The tokenizer of bytes as a file of the `tokenizers` library: a byte-level BPE without merges."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": 256, "content": END, "single_word": False, "lstrip": False, "rstrip": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end | {"normalized": False, "special": True}],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": [],
            },
        }
    )


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte (Radford et al. 2019)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]
