"""The files inside a release, read in memory: tar, zip and Debian archives. Nothing is unpacked to disk."""

import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

LARGEST = 64 * 2**20  # bytes of one file; set.mm is the largest that is wanted


def files_in(archive: Path) -> Iterator[tuple[str, bytes]]:
    """(path, content) of every regular file, sorted by path; .gz members decompressed, without the ending."""
    yield from sorted(_members(archive), key=lambda member: member[0])


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    name = archive.name
    if name.endswith(".zip"):
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                if not info.is_dir() and info.file_size <= LARGEST:
                    yield info.filename, opened.read(info)
    elif name.endswith(".deb"):
        yield from _tar_members(io.BytesIO(_data_of_deb(archive)))
    else:
        with open(archive, "rb") as file:
            yield from _tar_members(file)


def _tar_members(file: io.BufferedIOBase | io.BytesIO) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=file, mode="r:*") as opened:
        for member in opened:
            if not member.isfile() or member.size > LARGEST:
                continue
            content = opened.extractfile(member)
            assert content is not None  # it is a regular file
            path, data = member.name.removeprefix("./"), content.read()
            if path.endswith((".gz", ".dz")):
                path, data = path[:-3], gzip.decompress(data)
            yield path, data


def _data_of_deb(path: Path) -> bytes:
    """The tar archive with the files of a Debian package: data.tar.xz or data.tar.gz in an ar archive."""
    raw = path.read_bytes()
    if not raw.startswith(b"!<arch>\n"):
        raise ValueError(f"{path.name} is not a Debian package: its first bytes are {raw[:8]!r}.")
    at = 8
    while at < len(raw):
        header = raw[at : at + 60]
        member, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
        content = raw[at + 60 : at + 60 + size]
        if member == "data.tar.xz":
            return lzma.decompress(content)
        if member == "data.tar.gz":
            return gzip.decompress(content)
        at += 60 + size + size % 2  # members start at even offsets
    raise ValueError(f"{path.name} holds no data.tar.xz or data.tar.gz.")
