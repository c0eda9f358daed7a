"""Documents to token shards: by several processes, resumable, with the same bytes however it was done.

    tokenize([Document("a text"), Document("another", split="heldout-prose")], "data")

A unit of documents becomes one shard per split. Its record is written last, so a run that was killed goes on
with the units that have none; the index is written when all have.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from statetrack.errors import UserError
from statetrack.files import PARTIAL, write_json, write_text
from statetrack.lm.documents import Bad, Document, Unit, loaded_units
from statetrack.lm.shards import write_index
from statetrack.lm.tokenize_workers import (
    HELDOUT,
    LISTED,
    UNITS,
    Progress,
    Record,
    do_units,
    full_disk,
    place,
    split_of,
)
from statetrack.lm.tokenizers import (
    FILE,
    BytesTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_sha256,
    train_bpe,
)
from statetrack.run_folder import claim
from statetrack.tasks.token_shards import INDEX, TRAIN, Shard, TokenShards

__all__ = ["Document", "Report", "TokenizeOptions", "tokenize", "tokenize_units"]

OPTIONS, REPORT, BAD = "tokenize.json", "report.json", "bad_documents.jsonl"

Units = Callable[[], Iterable[Unit]]


@dataclass(frozen=True)
class TokenizeOptions:
    """What decides the tokens besides the documents: tokenizer, held-out part, size of shards."""

    tokenizer: str | Path | None = None  # a file of the `tokenizers` library; bytes when None
    train_tokenizer: int = 0  # instead: a BPE of this many tokens, from the training documents
    tokenizer_sample: float = 1.0  # part of them that it is trained on
    end_of_document: str | None = None  # the token that ends a document, where its name is unusual
    heldout: float = 0.005  # part of the documents, by a hash of their content
    shard_bytes: int = 32_000_000  # of text; a shard holds whole documents

    def __post_init__(self) -> None:
        if not 0 <= self.heldout < 1:
            raise UserError(f"tokenize: heldout is {self.heldout}, expected at least 0 and below 1.")
        if not 0 < self.tokenizer_sample <= 1:
            raise UserError(f"tokenize: tokenizer_sample is {self.tokenizer_sample}, expected above 0 to 1.")
        if self.shard_bytes < 1:
            raise UserError(f"tokenize: shard_bytes is {self.shard_bytes}, expected at least 1.")
        if self.tokenizer is not None and self.train_tokenizer:
            raise UserError("tokenize: give either a tokenizer or train_tokenizer, not both.")


@dataclass
class Report:
    """What was written: per split the number of documents, tokens and bytes of text; and what was not."""

    splits: dict[str, dict[str, int]] = field(default_factory=dict)
    bad: dict[str, int] = field(default_factory=dict)  # by reason
    vocab_size: int = 0

    def add(self, record: Record) -> None:
        for split, entry in record["splits"].items():
            sums = self.splits.setdefault(split, {"documents": 0, "tokens": 0, "bytes": 0})
            for name in sums:
                sums[name] += entry[name]
        self.bad = dict(sorted((Counter(self.bad) + Counter(record["bad_counts"])).items()))


def tokenize(
    documents: Iterable[Document] | Callable[[], Iterable[Document]],
    out: str | Path,
    options: TokenizeOptions | None = None,
    *,
    workers: int = 1,
    say: Callable[[str], None] = print,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Report:
    """Write documents as token shards into the folder `out`.

    A document's split is the one it names, else "heldout" or "train" by a hash. Documents are read once, or
    twice to train a tokenizer on them; then give a list, or a function that returns them. The same call goes
    on where an interrupted one stopped.
    """
    options = options or TokenizeOptions()
    if options.train_tokenizer and isinstance(documents, Iterator):
        raise UserError("tokenize: documents are read twice to train a tokenizer. Give a list or a function.")

    def units() -> Iterable[Unit]:
        given = documents() if callable(documents) else documents
        return loaded_units(given, options.shard_bytes)

    return tokenize_units(units, out, options, workers=workers, say=say, progress=progress)


def tokenize_units(
    units: Units,
    out: str | Path,
    options: TokenizeOptions,
    *,
    skipped: Iterable[Bad] = (),
    described: dict[str, Any] | None = None,
    workers: int = 1,
    say: Callable[[str], None] = print,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Report:
    """`tokenize` of units, which workers read themselves. `described` is kept with the options and must be
    the same when a run goes on; `skipped` is counted with the bad documents."""
    if workers < 1:
        raise UserError(f"tokenize: workers is {workers}, expected at least 1.")
    folder = Path(out)
    with claim(folder), full_disk(folder):
        finished = _begin(folder, options, described or {})
        if finished is not None:
            say(f"{folder} is finished already.")
            return finished
        tokenizer = _tokenizer(units, folder, options, say)
        records = do_units(units(), folder, options.heldout, options.end_of_document, workers, progress)
        return _finish(folder, records, list(skipped), tokenizer)


def _begin(folder: Path, options: TokenizeOptions, described: dict[str, Any]) -> Report | None:
    """Write the options, or compare them with those there; the report where all is done."""
    for leftover in (*folder.glob(f".*{PARTIAL}"), *folder.glob(f"{UNITS}/.*{PARTIAL}")):
        leftover.unlink(missing_ok=True)  # of a process that was killed while it wrote
    given = asdict(options) | described
    if options.tokenizer is not None:
        loaded = load_tokenizer(options.tokenizer, options.end_of_document)
        given["tokenizer"] = tokenizer_sha256(loaded)  # its content counts, not its place
    given = json.loads(json.dumps(given))
    path = folder / OPTIONS
    if not path.exists():
        if (folder / INDEX).exists():
            raise UserError(f"{folder} holds an index.json of other data. Choose another --out.")
        write_json(path, given)
        return None
    try:
        there = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}. Delete {folder}, or choose another --out.") from None
    changed = [name for name in sorted({*there, *given}) if there.get(name) != given.get(name)]
    if changed:
        listed = ", ".join(f"{name} {there.get(name)!r}, here {given.get(name)!r}" for name in changed)
        raise UserError(
            f"{folder} was begun with other options ({listed}). Choose another --out, or delete that folder."
        )
    if not (folder / INDEX).exists():
        return None
    shutil.rmtree(folder / UNITS, ignore_errors=True)
    TokenShards.open(folder)  # whole?
    return Report(**json.loads((folder / REPORT).read_text()))


def _tokenizer(units: Units, folder: Path, options: TokenizeOptions, say: Callable[[str], None]) -> Tokenizer:
    """The tokenizer, written to the folder first, where the workers read it."""
    path = folder / FILE
    if options.train_tokenizer and not path.exists():
        say(f"Training a tokenizer of {options.train_tokenizer} tokens.")
        write_text(path, train_bpe(_training_texts(units(), options), options.train_tokenizer).to_json())
    elif not path.exists():
        chosen = options.tokenizer
        tokenizer = BytesTokenizer() if chosen is None else load_tokenizer(chosen, options.end_of_document)
        write_text(path, tokenizer.to_json())
    tokenizer = load_tokenizer(path, options.end_of_document)
    if options.train_tokenizer > tokenizer.vocab_size:
        say(f"The training text gave {tokenizer.vocab_size} tokens, fewer than asked for.")
    return tokenizer


def _training_texts(units: Iterable[Unit], options: TokenizeOptions) -> Iterator[str]:
    sample = options.tokenizer_sample
    for unit in units:
        for document in unit.documents():
            if not isinstance(document, Document) or split_of(document, options.heldout) != TRAIN:
                continue
            if sample == 1 or place("tokenizer" + document.text) < sample:  # a hash of its own
                yield document.text


def _finish(folder: Path, records: list[Record], skipped: list[Bad], tokenizer: Tokenizer) -> Report:
    """Write the report, the list of bad documents and, last, the index."""
    report = Report(vocab_size=tokenizer.vocab_size)
    for record in records:
        report.add(record)
    report.add({"splits": {}, "bad_counts": Counter(reason for _, reason in skipped)})
    if not report.splits:
        listed = ", ".join(f"{count} {reason}" for reason, count in report.bad.items()) or "no files"
        shutil.rmtree(folder / UNITS, ignore_errors=True)
        (folder / OPTIONS).unlink()
        raise UserError(f"tokenize: the inputs hold no document ({listed}).")
    order = sorted(report.splits, key=lambda name: (name != TRAIN, name != HELDOUT, name))
    report.splits = {name: report.splits[name] for name in order}
    splits = {
        name: [_shard(record["splits"][name]) for record in records if name in record["splits"]]
        for name in order
    }
    listed = [*skipped, *(bad for record in records for bad in record["bad"])][:LISTED]
    lines = [json.dumps({"name": name, "reason": reason}) + "\n" for name, reason in listed]
    write_text(folder / BAD, "".join(lines))
    write_json(folder / REPORT, asdict(report))
    entry = {"name": tokenizer.name, "sha256": tokenizer_sha256(tokenizer)}
    write_index(folder, splits, tokenizer.vocab_size, tokenizer.end_of_document, entry)
    shutil.rmtree(folder / UNITS, ignore_errors=True)
    return report


def _shard(entry: dict[str, Any]) -> Shard:
    return Shard(**{name: value for name, value in entry.items() if name != "bytes"})
