"""Inputs cut into units: files, folders, datasets of the hub, and the standard library."""

import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from statetrack.errors import UserError, require
from statetrack.lm.documents import (
    Bad,
    Document,
    JsonLines,
    ParquetGroups,
    TextFile,
    TextFiles,
    Unit,
    from_row,
    loaded_units,
    open_parquet,
    reason_of,
)

HUB = "hf:"
JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
PARQUET = (".parquet",)
# what is read in a folder when no suffixes are given
_KNOWN = """c cc cpp css cu cuh go h hpp html java jl js kt lean lua md ml php pl py pyi pyx r rb rs rst scala
sh sql swift tex toml ts tsx txt yaml yml zig"""
TEXT_SUFFIXES = (*(f".{name}" for name in _KNOWN.split()), *JSON_LINES, *PARQUET)
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
TEST_FOLDERS = {"test", "tests", "idle_test"}


@dataclass(frozen=True)
class Reading:
    """How files are read."""

    field: str = "text"  # of JSON lines and parquet: where the text is
    separator: str | None = None  # the line between documents of a text file; None: a file is a document
    suffixes: tuple[str, ...] = TEXT_SUFFIXES  # in folders
    max_file_bytes: int = 10_000_000  # in folders
    by_folder: bool = False  # whether the folders below an input are groups
    skipped_folders: frozenset[str] = frozenset(SKIPPED_FOLDERS)


@dataclass
class Plan:
    """The units of some inputs, and the files in their folders that are not read."""

    units: list[Unit] = field(default_factory=list)
    skipped: list[Bad] = field(default_factory=list)


class Opened(NamedTuple):
    """Inputs ready to be read, as often as wanted."""

    units: Callable[[], Iterable[Unit]]
    skipped: list[Bad]
    bytes: int | None  # None where it is not known before


def plan(
    inputs: Sequence[str | Path], reading: Reading, unit_bytes: int, sets: dict[str, list[Path]] | None = None
) -> Plan:
    """Files and folders cut into units. `sets` are held-out sets by name, whose files are in no other split.

    The order is that of the inputs, and in a folder that of the names.
    """
    found, held = Plan(), {}
    for name, paths in (sets or {}).items():
        for path in paths:
            held |= {file.path.resolve(): name for file in _files(path, reading, found)}
    named = [(None, path) for path in inputs]
    named += [(name, path) for name, paths in (sets or {}).items() for path in paths]
    seen = Plan()  # what is skipped in held-out sets has been listed above
    for split, path in named:
        files = _files(path, reading, found if split is None else seen)
        if split is None:
            files = [file for file in files if file.path.resolve() not in held]
        _add_units(found, files, reading, unit_bytes, split)
    return found


def _add_units(found: Plan, files: list[TextFile], reading: Reading, unit_bytes: int, split: str | None):
    texts: list[TextFile] = []

    def close() -> None:
        if texts:
            found.units.append(TextFiles(tuple(texts), split, reading.separator))
            texts.clear()

    for file in files:
        if file.path.name.endswith((*JSON_LINES, *PARQUET)):
            close()
            is_table = file.path.name.endswith(PARQUET)
            found.units += (_parquet_units if is_table else _line_units)(file, reading, unit_bytes, split)
            continue
        texts.append(file)
        if sum(text.size for text in texts) >= unit_bytes:
            close()
    close()


def _line_units(file: TextFile, reading: Reading, unit_bytes: int, split: str | None) -> Iterator[JsonLines]:
    if file.path.suffix == ".gz":
        yield JsonLines(file, 0, None, split, reading.field)
        return
    for start in range(0, file.size, unit_bytes):
        yield JsonLines(file, start, min(start + unit_bytes, file.size), split, reading.field)


def _parquet_units(
    file: TextFile, reading: Reading, unit_bytes: int, split: str | None
) -> Iterator[ParquetGroups]:
    table = open_parquet(file.path)
    names = table.schema_arrow.names
    if reading.field not in names:
        raise UserError(f"{file.path} has no column {reading.field!r}, only {', '.join(names)}. See --field.")
    groups, size = [], 0
    for group in range(table.metadata.num_row_groups):
        groups.append(group)
        size += table.metadata.row_group(group).total_byte_size
        if size >= unit_bytes or group == table.metadata.num_row_groups - 1:
            yield ParquetGroups(file, tuple(groups), size, split, reading.field)
            groups, size = [], 0


def _files(given: str | Path, reading: Reading, found: Plan) -> list[TextFile]:
    """The files of an input in order; those of a folder that are not read are noted in `found`."""
    path = Path(given)
    if path.is_file():
        return [_file(path, path.name, "")]
    if not path.is_dir():
        raise UserError(
            f"{given} does not exist, expected a text file, .jsonl, .parquet, a folder, or hf:NAME."
        )
    files = []
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(x for x in inner if x not in reading.skipped_folders and not x.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            relative = file.relative_to(path)
            kept = _kept(file, relative, reading)
            if isinstance(kept, Bad):
                found.skipped.append(kept)
            elif kept is not None:
                files.append(kept)
    return sorted(files, key=lambda file: file.path.relative_to(path).parts)


def _kept(file: Path, relative: Path, reading: Reading) -> TextFile | Bad | None:
    """A file of a folder, None where its suffix is not asked for, or why it is not read."""
    if not file.name.lower().endswith(reading.suffixes):
        return None
    if file.is_symlink() or not file.is_file():
        return Bad(str(relative), "not a regular file")
    kept = _file(file, str(relative), relative.parts[0] if reading.by_folder else "")
    data = file.name.endswith((*JSON_LINES, *PARQUET))
    if not data and kept.size > reading.max_file_bytes:
        return Bad(kept.name, "too large")
    return kept


def _file(path: Path, name: str, group: str) -> TextFile:
    stat = path.stat()
    return TextFile(path, name, stat.st_size, stat.st_mtime_ns, group)


def open_inputs(
    inputs: Sequence[str],
    reading: Reading,
    unit_bytes: int,
    sets: dict[str, list[Path]] | None = None,
) -> Opened:
    """Files, folders and datasets of the hub; the standard library where there are no inputs."""
    hub = [name for name in inputs if name.startswith(HUB)]
    files = [name for name in inputs if not name.startswith(HUB)]
    if not inputs:
        files, reading = [sysconfig.get_paths()["stdlib"]], standard_library(reading)
    planned = plan(files, reading, unit_bytes, sets)

    def units() -> Iterator[Unit]:
        yield from planned.units
        for name in hub:
            yield from loaded_units(hub_documents(name, reading), unit_bytes)

    total = None if hub else sum(unit.size for unit in planned.units)
    return Opened(units, planned.skipped, total)


def standard_library(reading: Reading) -> Reading:
    """How the standard library is read: its Python source, without tests."""
    skipped = frozenset(SKIPPED_FOLDERS | TEST_FOLDERS)
    return Reading(suffixes=(".py",), by_folder=reading.by_folder, skipped_folders=skipped)


def hub_documents(name: str, reading: Reading) -> Iterator[Document | Bad]:
    """The documents of "hf:NAME[:config][:split]", a dataset of the Hugging Face hub, streamed."""
    datasets = require("datasets", extra="lm", for_="datasets of the hub")
    dataset, config, split = [*name.removeprefix(HUB).split(":"), "", ""][:3]
    try:
        rows = datasets.load_dataset(dataset, config or None, split=split or "train", streaming=True)
        for number, row in enumerate(rows):
            if number == 0 and reading.field not in row:
                raise UserError(f"{name} has no field {reading.field!r}, only {', '.join(row)}. See --field.")
            yield from_row(row, reading.field, None, f"{name}:{number}", "")
    except UserError:
        raise
    except Exception as error:  # the library raises anything: of the network, of the hub, of a script
        raise UserError(
            f"{name} cannot be read: {reason_of(error)}. This needs network access to the Hugging Face hub; "
            "without it, name files that are here."
        ) from error
