"""Checkpoints in which every process writes its own part: a folder of safetensors files and a manifest.

    checkpoint-000001000/shard-00001-model-00001-of-00001.safetensors    the part of rank 0
                         shard-00002-model-00001-of-00001.safetensors    the part of rank 1
                         manifest.json                                   step, run, SHA-256 of every file

The files are those of torch's distributed checkpoints in safetensors format, which know the place of every
part in its tensor: another number of processes reads what it needs of them. The metadata that torch writes by
default are pickled and are not used. A folder is written under another name and renamed when it is complete.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import file_digest, sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from statetrack.errors import UserError, require
from statetrack.files import PARTIAL, DamagedFile, write_json
from statetrack.training.ranks import Ranks

MANIFEST = "manifest.json"


def is_available() -> bool:
    """Whether the package that reads and writes the parts is installed."""
    return find_spec("safetensors") is not None


def write_sharded(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], ranks: Ranks) -> None:
    """Write the folder `path`: of sharded tensors each rank its part, of others one rank the whole."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    aside = path.parent / f".{path.name}{PARTIAL}"
    ranks.on_first(lambda: _make_anew(aside))
    try:
        with _as_plain_errors(ranks):
            writer = HuggingFaceStorageWriter(str(aside), save_distributed=True)
            save(_without_scalars(tensors), storage_writer=writer, no_dist=not ranks.distributed)
        with ranks.together():
            own = _described(aside.glob(f"shard-{ranks.rank + 1:05d}-*.safetensors"))
        files = {name: entry for part in ranks.gather(own) for name, entry in part.items()}
        ranks.on_first(lambda: _seal(aside, path, {**metadata, "files": files}))
    except BaseException:
        if ranks.is_first:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, unaltered, or DamagedFile."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest.pop("sha256") != _digest(manifest):
            raise ValueError("its checksum does not match")
        return manifest
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{path / MANIFEST} is damaged: {error}") from error


def verify(path: Path, manifest: dict[str, Any], ranks: Ranks) -> None:
    """Raise DamagedFile unless the files are those of the manifest. Each rank reads some of them."""
    with ranks.together():
        found = {file.name for file in path.glob("*.safetensors")}
        if found != {*manifest["files"]}:
            different = ", ".join(sorted(found ^ {*manifest["files"]}))
            raise DamagedFile(f"{path} is damaged: files missing or added: {different}")
        for name in sorted(found)[ranks.rank :: ranks.size]:
            if _described([path / name])[name] != manifest["files"][name]:
                raise DamagedFile(f"{path / name} is damaged: its checksum does not match")


def shapes_in(path: Path) -> dict[str, torch.Size]:
    """The whole shapes of the tensors in a checkpoint. Those without dimensions have one, of size 1."""
    return {name: entry.size for name, entry in _reader(path).read_metadata().state_dict_metadata.items()}


def read_into(path: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Fill the tensors, which may be sharded, from a checkpoint. Every rank reads its part."""
    from torch.distributed.checkpoint.state_dict_loader import load

    with _as_plain_errors(ranks):
        places = _without_scalars(tensors)
        load(places, storage_reader=_reader(path), no_dist=not ranks.distributed)


def read_sharded(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The whole tensors whose names begin with `prefix`, in one process, checked."""
    verify(path, read_manifest(path), Ranks())
    entries = _reader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith(prefix)
    }
    read_into(path, tensors, Ranks())
    return tensors


def _reader(path: Path) -> Any:
    require("safetensors", extra="lm", for_="a checkpoint in parts")
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(str(path))


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _without_scalars(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without dimensions as views of one element: the reader takes slices."""
    return {name: x.view(1) if x.ndim == 0 else x for name, x in tensors.items()}


def _described(files: Any) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of files, by name."""
    described = {}
    for file in files:
        with open(file, "rb") as stream:
            digest = file_digest(stream, "sha256").hexdigest()
        described[file.name] = {"bytes": file.stat().st_size, "sha256": digest}
    return described


def _digest(manifest: dict[str, Any]) -> str:
    return sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _seal(aside: Path, path: Path, manifest: dict[str, Any]) -> None:
    """Add the manifest and give the folder its name."""
    unseen = [name for name in manifest["files"] if not (aside / name).exists()]
    if unseen:
        raise UserError(
            f"{path.parent}: process 0 does not see {unseen[0]}, which another process wrote there. "
            "Choose an --out on a file system that all processes share."
        )
    write_json(aside / MANIFEST, {**manifest, "sha256": _digest(manifest)})
    shutil.rmtree(path, ignore_errors=True)  # one that could not be used, or this run would be behind it
    os.rename(aside, path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _as_plain_errors(ranks: Ranks) -> Iterator[None]:
    """torch's CheckpointException, which is no Exception, as the error of the first rank that failed."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # a process alone is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as failed:
        rank = min(failed.failures)
        error = failed.failures[rank][0]
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror or str(error)) from failed
        raise ValueError(f"{type(error).__name__} on rank {rank}: {error}") from failed
