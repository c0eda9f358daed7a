"""Documents, and the units in which they are read: parts of text files, JSON lines and parquet.

A unit knows where its documents are, reads them in any process, and always gives the same ones, so units can
be done in any order and by any number of processes. `inputs.py` cuts inputs into units.
"""

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from statetrack.errors import UserError, require


@dataclass(frozen=True)
class Document:
    """One text. `split` names its split; None lets a hash decide between "train" and "heldout": of `group`
    where there is one, so that a group stays together, else of the text."""

    text: str
    split: str | None = None
    name: str = ""
    group: str = ""


class Bad(NamedTuple):
    """What is not a document, and why."""

    name: str
    reason: str


class Unit(Protocol):
    """Some documents, in an order of their own."""

    @property
    def size(self) -> int:
        """Bytes, for progress."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the documents may have changed."""
        ...

    def documents(self) -> Iterator[Document | Bad]: ...


@dataclass(frozen=True)
class TextFile:
    path: Path
    name: str
    size: int
    modified: int
    group: str = ""


@dataclass(frozen=True)
class TextFiles:
    """Text files, each a document, or several with a separator."""

    files: tuple[TextFile, ...]
    split: str | None
    separator: str | None

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def fingerprint(self) -> str:
        return _digest(repr(self))

    def documents(self) -> Iterator[Document | Bad]:
        for file in self.files:
            try:
                text = _decoded(file.path.read_bytes())
            except (OSError, ValueError) as error:
                yield Bad(file.name, reason_of(error))
                continue
            for number, part in enumerate(_cut(text, self.separator), 1):
                name = file.name if self.separator is None else f"{file.name}:{number}"
                yield _checked(part, self.split, name, file.group)


@dataclass(frozen=True)
class JsonLines:
    """The lines that begin in bytes start, ..., stop - 1 of a file, one object each; stop None is the end."""

    file: TextFile
    start: int
    stop: int | None
    split: str | None
    field: str

    @property
    def size(self) -> int:
        return (self.file.size if self.stop is None else self.stop) - self.start

    @property
    def fingerprint(self) -> str:
        return _digest(repr(self))

    def documents(self) -> Iterator[Document | Bad]:
        zipped = self.file.path.suffix == ".gz"
        try:
            with gzip.open(self.file.path) if zipped else open(self.file.path, "rb") as lines:
                if self.start:  # a line that began before is another unit's
                    lines.seek(self.start - 1)
                    lines.readline()
                while (at := lines.tell()) < (self.stop or at + 1) and (line := lines.readline()):
                    if line.strip():
                        yield self._document(line, f"{self.file.name}@{at}")
        except (OSError, EOFError) as error:
            yield Bad(self.file.name, reason_of(error))

    def _document(self, line: bytes, name: str) -> Document | Bad:
        try:
            given = json.loads(_decoded(line))
        except ValueError as error:
            return Bad(name, reason_of(error) if isinstance(error, _NotText) else "not JSON")
        return from_row(given, self.field, self.split, name, self.file.group)


@dataclass(frozen=True)
class ParquetGroups:
    """Row groups of a parquet file."""

    file: TextFile
    groups: tuple[int, ...]
    size: int
    split: str | None
    field: str

    @property
    def fingerprint(self) -> str:
        return _digest(repr(self))

    def documents(self) -> Iterator[Document | Bad]:
        table = open_parquet(self.file.path)
        for group in self.groups:
            try:
                column = table.read_row_group(group, columns=[self.field]).column(0)
            except (OSError, ValueError) as error:
                yield Bad(f"{self.file.name}:{group}", reason_of(error))
                continue
            for row, text in enumerate(column.to_pylist()):
                name = f"{self.file.name}:{group}:{row}"
                yield from_row({self.field: text}, self.field, self.split, name, self.file.group)


@dataclass(frozen=True)
class Loaded:
    """Documents that are in memory."""

    given: tuple[Document | Bad, ...]
    size: int

    @property
    def fingerprint(self) -> str:
        return _digest(
            json.dumps([[*vars(x).values()] if isinstance(x, Document) else x for x in self.given])
        )

    def documents(self) -> Iterator[Document | Bad]:
        for given in self.given:
            if isinstance(given, Document):
                yield _checked(given.text, given.split, given.name, given.group)
            else:
                yield given


def loaded_units(documents: Iterable[Document | Bad], unit_bytes: int) -> Iterator[Loaded]:
    """Documents in groups of about `unit_bytes` characters."""
    given, size = [], 0
    for document in documents:
        given.append(document)
        size += len(document.text) if isinstance(document, Document) else 0
        if size >= unit_bytes:
            yield Loaded(tuple(given), size)
            given, size = [], 0
    if given:
        yield Loaded(tuple(given), size)


def open_parquet(path: Path) -> Any:
    parquet = require("pyarrow.parquet", extra="lm", for_="reading parquet files")
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise UserError(f"{path} is not a readable parquet file: {error}.") from None


class _NotText(ValueError):
    """Bytes that are not text; the message says why."""


def _decoded(raw: bytes) -> str:
    if b"\0" in raw:
        raise _NotText("binary")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _NotText("not UTF-8") from None


def _cut(text: str, separator: str | None) -> Iterator[str]:
    """A text at the lines that are the separator, which are left out."""
    if separator is None:
        yield text
        return
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.strip() == separator:
            if lines:
                yield "".join(lines)
            lines = []
        else:
            lines.append(line)
    if lines:
        yield "".join(lines)


def from_row(row: Any, field: str, split: str | None, name: str, group: str) -> Document | Bad:
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        return Bad(name, f"no text in field {field!r}")
    return _checked(text, split, name, group)


def _checked(text: str, split: str | None, name: str, group: str) -> Document | Bad:
    if not text.strip():
        return Bad(name, "empty")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold
        return Bad(name, "not UTF-8")
    return Document(text, split, name, group)


def reason_of(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).strip().partition("\n")[0] or type(error).__name__


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
