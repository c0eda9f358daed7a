"""statetrack lm tokenize: text to token shards."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from statetrack.commands.flags import parse, take_all
from statetrack.commands.progress import bytes_bar
from statetrack.errors import UserError
from statetrack.lm import embedded
from statetrack.lm.inputs import HUB, TEXT_SUFFIXES, Reading, open_inputs
from statetrack.lm.tokenize import BAD, Report, TokenizeOptions, tokenize_units
from statetrack.lm.tokenize_workers import Progress
from statetrack.tasks.token_shards import SPLIT_NAME, TRAIN, TokenShards

HELDOUT = 0.005  # part of the documents


@dataclass(frozen=True)
class TokenizeFlags:
    """Turn text into token shards: `statetrack lm tokenize INPUT... --out DIR`.

    An INPUT is a text file, .jsonl (or .jsonl.gz), .parquet, a folder of such files and of source code, or
    hf:NAME[:config][:split], a dataset of the Hugging Face hub. Without INPUT the corpus is the standard
    library of the running Python. The same command goes on where an interrupted one stopped.
    `--heldout-set NAME=PATH` (repeatable) makes the documents of PATH a held-out split of that name.
    """

    inputs: tuple[str, ...]  # INPUT...; the standard library when there is none
    out: Path = Path("corpus")  # folder of the shards
    tokenizer: Path | None = None  # tokenizer.json of the `tokenizers` library; bytes when None
    train_tokenizer: int = 0  # train a byte-level BPE of this many tokens on the training documents
    tokenizer_sample: float = 1.0  # part of the training documents that it is trained on
    end_of_document: str | None = None  # the token that ends a document, if its name is not a usual one
    heldout: float | None = None  # part of the documents held out; 0.005, or 0.05 of the standard library
    heldout_by: Literal["document", "folder"] = "document"  # folder: hold out whole folders below an INPUT
    field: str = "text"  # of .jsonl and .parquet: the field with the text
    separator: str | None = None  # the line between documents of a text file ("" for a blank line)
    suffixes: tuple[str, ...] = ()  # of the files read in folders; common text and source files when empty
    max_file_mb: float = 10.0  # larger files in folders are skipped
    shard_mb: float = 32.0  # text per shard
    workers: int = 1  # processes
    check: Path | None = None  # compare the checksums of the shards in this folder, and stop


def main(arguments: Sequence[str]) -> None:
    given_sets, rest = take_all(arguments, "--heldout-set")
    flags = parse(TokenizeFlags, rest, "statetrack lm tokenize", positional=True)
    inputs = list(flags.inputs)
    if flags.check is not None:
        print(_checked(flags.check))
        return
    if flags.heldout_by == "folder" and any(name.startswith(HUB) for name in inputs):
        raise UserError("tokenize: --heldout-by folder needs folders, and a dataset of the hub has none.")
    for name, size in (("max_file_mb", flags.max_file_mb), ("shard_mb", flags.shard_mb)):
        if not 0 < size < math.inf:
            raise UserError(f"tokenize: {name} is {size}, expected a number above 0.")
    sets = _sets(given_sets)
    reading = Reading(
        field=flags.field,
        separator=flags.separator,
        suffixes=tuple(_suffix(name) for name in flags.suffixes) or TEXT_SUFFIXES,
        max_file_bytes=round(flags.max_file_mb * 1e6),
        by_folder=flags.heldout_by == "folder",
    )
    heldout = flags.heldout
    if heldout is None:
        heldout = HELDOUT if inputs else embedded.HELDOUT
    options = TokenizeOptions(
        tokenizer=flags.tokenizer,
        train_tokenizer=flags.train_tokenizer,
        tokenizer_sample=flags.tokenizer_sample,
        end_of_document=flags.end_of_document,
        heldout=heldout,
        shard_bytes=round(flags.shard_mb * 1e6),
    )
    opened = open_inputs(inputs, reading, options.shard_bytes, sets)
    described = {"inputs": inputs or ["the standard library"], "heldout_sets": given_sets} | asdict(reading)
    described["skipped_folders"] = sorted(described["skipped_folders"])
    with bytes_bar("tokenizing", opened.bytes) as bar:

        def show(progress: Progress) -> None:
            bad = f", {progress.bad} bad documents" if progress.bad else ""
            bar(progress.bytes, f"{progress.tokens:,} tokens{bad}")

        report = tokenize_units(
            opened.units,
            flags.out,
            options,
            skipped=opened.skipped,
            described=described,
            workers=flags.workers,
            progress=show,
        )
    print(summary(report, flags.out))


def summary(report: Report, folder: Path) -> str:
    """What was written, as lines of text."""
    width = max(map(len, report.splits))
    lines = [
        f"{name:<{width}}  {sums['documents']:>9,} documents  {sums['tokens']:>14,} tokens  "
        f"{sums['bytes'] / 1e6:>10,.2f} MB"
        for name, sums in report.splits.items()
    ]
    if report.bad:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in report.bad.items())
        lines.append(f"{sum(report.bad.values()):,} not read: {reasons}; see {folder / BAD}")
    if report.splits.keys() == {TRAIN}:
        lines.append(
            "No held-out document: training will refuse this. Raise --heldout, name a --heldout-set, or cut "
            'text files into documents: --separator "" cuts at blank lines.'
        )
    return "\n".join([*lines, f"{folder}: a vocabulary of {report.vocab_size:,} tokens"])


def _checked(folder: Path) -> str:
    shards = TokenShards.open(folder)
    shards.verify()
    files = sum(len(split) for split in shards.splits.values())
    return f"{folder}: {files} shards, {shards.bytes / 1e6:,.1f} MB, all checksums match."


def _sets(given: list[str]) -> dict[str, list[Path]]:
    """Held-out sets by name; a name may have several paths."""
    sets: dict[str, list[Path]] = {}
    for one in given:
        name, equals, path = one.partition("=")
        if not equals or not path or not re.fullmatch(SPLIT_NAME, name) or name == TRAIN:
            raise UserError(f"--heldout-set is {one!r}, expected NAME=PATH, the name not {TRAIN!r}.")
        sets.setdefault(name, []).append(Path(path))
    return sets


def _suffix(name: str) -> str:
    return name if name.startswith(".") else f".{name}"
