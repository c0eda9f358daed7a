"""Atomic file writes, JSON, and tensors in the safetensors format.

The format is implemented here so that a run needs torch and numpy only; tests compare it with the safetensors
package. Nothing is unpickled, so files from untrusted sources cannot run code.
"""

import contextlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from statetrack.errors import UserError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


PARTIAL = ".partial"  # suffix of a file that is being written
CHECKSUM = "statetrack.crc32"  # key in the metadata of a file


class DamagedFile(Exception):
    """A file that is truncated or altered."""


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Write to a temporary file, flush, rename: readers see the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL)
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when it is complete; of one that fails nothing stays."""
    folder = Path(path).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{path} is not an empty folder. Choose another, or delete it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=PARTIAL))
    try:
        yield partial
        os.chmod(partial, 0o755)
        if folder.exists():
            folder.rmdir()
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_text(path: Path, text: str) -> None:
    write_atomically(path, [text.encode()])


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write named tensors as a safetensors file, with a checksum of the contents in its metadata."""
    header: dict[str, Any] = {}
    data, offset = [], 0
    for name, tensor in tensors.items():
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        offset += len(raw)
        data.append(raw)
    header["__metadata__"] = dict(metadata or {})
    header["__metadata__"] |= {CHECKSUM: _checksum(header, data)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    write_atomically(path, [len(encoded).to_bytes(8, "little"), encoded, *data])


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file; raise DamagedFile if it is truncated or its checksum does not match."""
    raw = Path(path).read_bytes()
    try:
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        data = memoryview(raw)[8 + size :]
        expected = header.get("__metadata__", {}).pop(CHECKSUM, None)
        if expected is not None and _checksum(header, [data]) != expected:
            raise ValueError("its checksum does not match")
        metadata = header.pop("__metadata__", {})
        if len(data) != max((entry["data_offsets"][1] for entry in header.values()), default=0):
            raise ValueError(f"{len(raw)} bytes is not the length its header asks for")
        return {name: _tensor(data, entry) for name, entry in header.items()}, metadata
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise DamagedFile(f"{path} is damaged: {error}") from error


def _checksum(header: dict[str, Any], data: Iterable[bytes | memoryview]) -> str:
    """The CRC-32 of a header without checksum and of the data, in hexadecimal."""
    total = zlib.crc32(json.dumps(header).encode())
    for part in data:
        total = zlib.crc32(part, total)
    return f"{total:08x}"


def _tensor(data: memoryview, entry: dict) -> Tensor:
    start, stop = entry["data_offsets"]
    dtype = _DTYPES[entry["dtype"]]
    if start == stop:
        return torch.empty(entry["shape"], dtype=dtype)
    # a copy, because the bytes read from disk are read-only and not aligned
    return torch.frombuffer(bytearray(data[start:stop]), dtype=dtype).reshape(entry["shape"])
