"""Rebuild the corpus of the language-model experiment from packages of the public registries.

    python tools/corpus/build.py fetch DIR      download what lock.json names, compare checksums
    python tools/corpus/build.py shards DIR     filter, train the tokenizer, write DIR/shards
    python tools/corpus/build.py pack DIR       DIR/shards as pieces of at most 58 MB, for transport
    python tools/corpus/build.py lock DIR       to change the corpus: enter new sources into lock.json

The same lock gives the same shards: the SHA-256 of their index is in it, and `shards` compares.
Needs numpy and tokenizers, and pip, npm and apt-get for the downloads. See README.md.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from documents import wanted
from registries import RegistryError, download, sha256_of, version_of

HERE = Path(__file__).parent
LOCK = HERE / "lock.json"
GENERATED = "generated/math.jsonl"
DOWNLOADS_AT_A_TIME = 4
PIECE_BYTES = 58_000_000


def read_sources() -> dict[str, Any]:
    """sources.toml."""
    return tomllib.loads((HERE / "sources.toml").read_text())


def lock(folder: Path) -> None:
    """Download every release and write down what came; locked versions stay."""
    before = {(r["registry"], r["name"]): r for r in _read_lock()["releases"]} if LOCK.exists() else {}

    def locked(release: dict[str, Any]) -> dict[str, Any]:
        known = before.get((release["registry"], release["name"]), {})
        file = _downloaded(release | {"version": known.get("version", "")}, folder)
        version = version_of(file.name, release["registry"])
        facts = {
            "version": version,
            "file": file.name,
            "sha256": sha256_of(file),
            "bytes": file.stat().st_size,
        }
        named = {key: release[key] for key in ("registry", "name", "licence", "domain", "role", "reader")}
        return named | facts

    with ThreadPoolExecutor(DOWNLOADS_AT_A_TIME) as pool:
        releases = list(pool.map(locked, wanted(read_sources())))
    _generate(folder)
    _write_lock({"releases": releases, "generated": {GENERATED: sha256_of(folder / "downloads" / GENERATED)}})


def fetch(folder: Path) -> None:
    """Download what the lock names and refuse anything else."""
    locked = _read_lock()

    def checked(release: dict[str, Any]) -> None:
        file = _downloaded(release, folder)
        found = sha256_of(file)
        if found != release["sha256"]:
            file.unlink()
            raise RegistryError(
                f"{file.name} has SHA-256 {found}, expected {release['sha256']}: not the locked release."
            )

    with ThreadPoolExecutor(DOWNLOADS_AT_A_TIME) as pool:
        list(pool.map(checked, locked["releases"]))
    _generate(folder)
    found = sha256_of(folder / "downloads" / GENERATED)
    if found != locked["generated"][GENERATED]:
        raise RegistryError(f"{GENERATED} came out with SHA-256 {found}, not the locked one.")


def _downloaded(release: dict[str, Any], folder: Path) -> Path:
    """The release's file, which is downloaded unless it is there."""
    at = folder / "downloads" / release["registry"]
    if "file" in release and (at / release["file"]).exists():
        return at / release["file"]
    return download(release["registry"], release["name"], release["version"], at)


def _generate(folder: Path) -> None:
    """Write the generated problems with the pinned packages in an environment of their own."""
    target = folder / "downloads" / GENERATED
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    environment = folder / "generator"
    python = str(environment / "bin" / "python")
    if not Path(python).exists():
        venv.create(environment, with_pip=True)
        requirements = str(HERE / "generator-requirements.txt")
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", requirements], check=True)
    partial = target.with_suffix(".partial")
    subprocess.run(
        [python, str(HERE / "generate_math.py"), str(partial)],
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )
    partial.replace(target)


def shards(folder: Path) -> None:
    """Write DIR/shards and compare the SHA-256 of its index with the lock's, or enter it there."""
    from write_shards import write

    locked = _read_lock()
    result = write(read_sources(), locked, folder)
    before = locked.get("shards", {}).get("index_sha256")
    if before and before != result["index_sha256"]:
        raise SystemExit(
            f"the index of {folder / 'shards'} has SHA-256 {result['index_sha256']}, expected {before}: the "
            "sources, the tokenizers package or the recipe differ. To change the corpus on purpose, delete "
            "the entry shards from lock.json."
        )
    _write_lock(locked | {"shards": result})


def pack(folder: Path) -> None:
    """The shards as compressed tar files, each small enough to be carried: held-out first, then training."""
    source, target = folder / "shards", folder / "pieces"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    names = sorted(path.name for path in source.iterdir())
    train = [name for name in names if name.startswith("train-") and name.endswith(".bin")]
    groups = [[name for name in names if not (name.startswith("train-") and name.endswith(".bin"))]]
    groups += [[name] for name in train]
    packed = [_compressed(source, group, target / f"group-{i:02d}.tar.xz") for i, group in enumerate(groups)]
    piece, size = 0, 0
    for path in packed:  # an .xz file may be several, one after the other
        if size and size + path.stat().st_size > PIECE_BYTES:
            piece, size = piece + 1, 0
        size += path.stat().st_size
        path.rename(target / f"piece-{'ABCDEFGH'[piece]}-{path.name}")
    for path in sorted(target.iterdir()):
        print(f"{path.name} {path.stat().st_size / 1e6:.1f} MB")


def _compressed(source: Path, names: list[str], path: Path) -> Path:
    plain = path.with_suffix("")
    with tarfile.open(plain, "w") as tar:
        for name in names:
            tar.add(source / name, arcname=name)
    subprocess.run(["xz", "-T2", "-6", "--force", str(plain)], check=True)
    return path


def _read_lock() -> dict[str, Any]:
    return json.loads(LOCK.read_text())


def _write_lock(content: dict[str, Any]) -> None:
    """One release per line, so that a change of the lock reads as one."""
    releases = ",\n".join("  " + json.dumps(release) for release in content["releases"])
    rest = {name: value for name, value in content.items() if name != "releases"}
    text = f'{{"releases": [\n{releases}\n], {json.dumps(rest, indent=1)[1:]}\n'
    LOCK.write_text(text)


def main() -> None:
    """Carry out one step of the recipe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = {"lock": lock, "fetch": fetch, "shards": shards, "pack": pack}
    parser.add_argument("step", choices=steps)
    parser.add_argument("folder", type=Path, help="where downloads and data go; outside the repository")
    arguments = parser.parse_args()
    steps[arguments.step](arguments.folder)


if __name__ == "__main__":
    sys.exit(main())
