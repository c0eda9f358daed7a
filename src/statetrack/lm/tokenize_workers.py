"""The units of a corpus done by worker processes: documents in, one shard per split and a record out."""

import contextlib
import errno
import hashlib
import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import lru_cache
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np

from statetrack.errors import UserError
from statetrack.files import write_json
from statetrack.lm.documents import Bad, Document, Unit
from statetrack.lm.shards import dtype_for, write_shard
from statetrack.lm.tokenizers import FILE, Tokenizer, load_tokenizer
from statetrack.tasks.token_shards import DTYPES, SPLIT_NAME, TRAIN

HELDOUT = "heldout"
UNITS = "units"  # folder of the records
LISTED = 10_000  # bad documents that are named; all are counted
AT_ONCE = 2**20  # characters that are encoded at once
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Record = dict[str, Any]  # fingerprint, splits with their shard and bytes of text, bad, bad_counts


@dataclass(frozen=True)
class Progress:
    """How far a run is, after each unit."""

    bytes: int  # of the inputs, those of an interrupted run included
    tokens: int
    bad: int


def split_of(document: Document, heldout: float) -> str:
    """The split that a document names, else the one that the hash of its group or text gives."""
    if document.split is not None:
        return document.split
    return HELDOUT if place(document.group or document.text) < heldout else TRAIN


def place(content: str) -> float:
    """A number in [0, 1) that depends on the content alone."""
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:6], "little") / 2**48


def do_units(
    units: Iterable[Unit],
    folder: Path,
    heldout: float,
    end_of_document: str | None,
    workers: int,
    progress: Callable[[Progress], None],
) -> list[Record]:
    """Do the units that have no record; the records of all, in order."""
    records: dict[int, Record] = {}
    so_far = Progress(0, 0, 0)

    def take(number: int, record: Record, size: int) -> None:
        nonlocal so_far
        records[number] = record
        tokens = sum(entry["tokens"] for entry in record["splits"].values())
        bad = sum(record["bad_counts"].values())
        so_far = Progress(so_far.bytes + size, so_far.tokens + tokens, so_far.bad + bad)
        progress(so_far)

    with _pool(workers) as submit:
        pending: dict[Future, tuple[int, int]] = {}

        def collect(at_most: int) -> None:
            while len(pending) > at_most:
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    number, size = pending.pop(future)
                    take(number, future.result(), size)

        for number, unit in enumerate(units):
            record = _finished_record(folder, number, unit)
            if record is not None:
                take(number, record, unit.size)
                continue
            pending[submit(do_unit, folder, number, unit, heldout, end_of_document)] = number, unit.size
            collect(2 * workers - 1 if workers > 1 else 0)
        collect(0)
    return [records[number] for number in sorted(records)]


def do_unit(
    folder: Path, number: int, unit: Unit, heldout: float, end_of_document: str | None = None
) -> Record:
    """Tokenise a unit into one shard per split, and write its record."""
    tokenizer = _loaded(folder / FILE, (folder / FILE).stat().st_mtime_ns, end_of_document)
    dtype = dtype_for(tokenizer.vocab_size)
    tokens: dict[str, list[np.ndarray]] = {}
    sizes: Counter[str] = Counter()
    bad: list[Bad] = []
    for documents in _batches(unit, bad):
        ids = tokenizer.encode_documents([document.text for document in documents])
        for document, encoded in zip(documents, ids, strict=True):
            split = _split_name(document, heldout)
            ended = np.empty(len(encoded) + 1, DTYPES[dtype])
            ended[:-1], ended[-1] = encoded, tokenizer.end_of_document
            tokens.setdefault(split, []).append(ended)
            sizes[split] += len(document.text.encode())
    written: dict[str, dict[str, Any]] = {}
    with full_disk(folder, [f"{split}-{number:05d}" for split in tokens]):
        for split, arrays in sorted(tokens.items()):
            shard = write_shard(folder, split, number, arrays, dtype)
            written[split] = asdict(shard) | {"bytes": sizes[split]}
        record = {
            "fingerprint": unit.fingerprint,
            "splits": written,
            "bad": bad[:LISTED],
            "bad_counts": dict(Counter(reason for _, reason in bad)),
        }
        write_json(_record_path(folder, number), record)
    return record


def _batches(unit: Unit, bad: list[Bad]) -> Iterator[list[Document]]:
    """The documents of a unit, about a megabyte at a time; what is none is added to `bad`."""
    documents, size = [], 0
    for document in unit.documents():
        if isinstance(document, Bad):
            bad.append(document)
            continue
        documents.append(document)
        size += len(document.text)
        if size >= AT_ONCE:
            yield documents
            documents, size = [], 0
    if documents:
        yield documents


def _split_name(document: Document, heldout: float) -> str:
    split = split_of(document, heldout)
    if re.fullmatch(SPLIT_NAME, split) is None:
        raise UserError(
            f"tokenize: the split {split!r} of {document.name!r}, expected letters, digits, '_', '.' and '-'."
        )
    return split


def _finished_record(folder: Path, number: int, unit: Unit) -> Record | None:
    """The record of a unit that is done, or None. Other documents than then are refused."""
    try:
        record = json.loads(_record_path(folder, number).read_text())
    except FileNotFoundError:
        return None
    if record["fingerprint"] != unit.fingerprint:
        raise UserError(
            f"{folder}: the inputs have changed since this was begun. Choose another --out, or delete that "
            "folder."
        )
    return record


def _record_path(folder: Path, number: int) -> Path:
    return folder / UNITS / f"{number:05d}.json"


class FullDisk(OSError):
    """No space left while writing. What is complete is kept."""


@contextlib.contextmanager
def full_disk(folder: Path, shards: Iterable[str] = ()) -> Iterator[None]:
    """A full disk as a `FullDisk`; the shards, by the beginning of their names, are then removed."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or isinstance(error, FullDisk):
            raise
        for name in shards:
            for file in folder.glob(f"{name}.*"):
                file.unlink(missing_ok=True)
        raise FullDisk(
            error.errno,
            f"{error.strerror} while writing {folder}. Finished parts are kept: make space, and the same "
            "command goes on from there",
        ) from None


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[Callable[..., Future]]:
    """`submit` of some worker processes, or of this one."""
    if workers == 1:
        yield _at_once
        return
    context = get_context("forkserver")  # fork alone is not safe once torch or tokenizers have threads
    context.set_forkserver_preload([__name__])
    executor = ProcessPoolExecutor(workers, context, initializer=_start_worker)
    try:
        yield executor.submit
    except BrokenProcessPool:
        raise UserError(
            "tokenize: a worker process has ended, perhaps for lack of memory. The same command goes on; try "
            "fewer --workers."
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def _at_once(work: Callable[..., Any], *arguments: Any) -> Future:
    future: Future = Future()
    future.set_result(work(*arguments))
    return future


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process each is the parallelism
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker without a traceback
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """End this worker when the process that started it is gone: a killed one tells nobody."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@lru_cache(maxsize=1)
def _loaded(path: Path, modified: int, end_of_document: str | None) -> Tokenizer:
    return load_tokenizer(path, end_of_document)
