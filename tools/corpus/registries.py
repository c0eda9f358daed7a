"""Download releases from the registries this machine is configured for: pip's index, npm's, apt's.

No address is written here: pip, npm and apt-get are asked where they download from, so a mirror works as the
registry does. A file counts only if its SHA-256 is the one in the lock file.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

TIMEOUT = 180  # seconds
SOURCE_ENDINGS = (".tar.gz", ".tgz", ".zip", ".tar.bz2")


class RegistryError(RuntimeError):
    """A release that cannot be found or downloaded."""


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(registry: str, name: str, version: str, folder: Path) -> Path:
    """The release as a file in `folder`: a source archive (pypi), a tarball (npm) or a .deb (debian).

    An empty version means the newest one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ways = {"pypi": _download_pypi, "npm": _download_npm, "debian": _download_debian}
    return ways[registry](name, version, folder)


def version_of(file: str, registry: str) -> str:
    """The version that a downloaded file's name carries: "5.2.1" of "Django-5.2.1.tar.gz"."""
    if registry == "debian":
        return urllib.parse.unquote(file.split("_")[1])
    stem = file
    for ending in SOURCE_ENDINGS:
        stem = stem.removesuffix(ending)
    return stem.rsplit("-", 1)[1]


# --- pip ----------------------------------------------------------------------------------------------


class _Links(HTMLParser):
    """The links of a project page of a package index (PEP 503), in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "a" and found.get("href") and "data-yanked" not in found:
            self.links.append(found["href"] or "")


def _pip_index() -> str:
    """The index that pip is configured for, or the one it was built with."""
    if os.environ.get("PIP_INDEX_URL"):
        return os.environ["PIP_INDEX_URL"]
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    found = re.search(r"^[\w:.]*\.?index-url='([^']+)'", listed, flags=re.MULTILINE)
    if found:
        return found[1]
    from pip._internal.models.index import PyPI

    return PyPI.simple_url


def _download_pypi(name: str, version: str, folder: Path) -> Path:
    page = f"{_pip_index().rstrip('/')}/{re.sub(r'[-_.]+', '-', name).lower()}/"
    with urllib.request.urlopen(page, timeout=TIMEOUT) as answer:
        parser = _Links()
        parser.feed(answer.read().decode())
    files = {_file_of(link): link for link in parser.links}
    sources = [file for file in files if file.endswith(SOURCE_ENDINGS) and "-" in file]
    if version:
        sources = [file for file in sources if version_of(file, "pypi") == version]
    else:
        sources = [f for f in sources if re.fullmatch(r"[0-9.]+(\.post[0-9]+)?", version_of(f, "pypi"))]
    if not sources:
        raise RegistryError(f"pypi: {name} {version or '(any version)'} has no source release in the index.")
    newest = max(sources, key=lambda file: _as_numbers(version_of(file, "pypi")))
    link = urllib.parse.urljoin(page, files[newest])
    target = folder / newest
    with urllib.request.urlopen(link, timeout=TIMEOUT) as answer:
        target.write_bytes(answer.read())
    return target


def _file_of(link: str) -> str:
    return urllib.parse.unquote(urllib.parse.urlparse(link).path.rsplit("/", 1)[-1])


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version))


# --- npm and apt --------------------------------------------------------------------------------------


def _download_npm(name: str, version: str, folder: Path) -> Path:
    wanted = f"{name}@{version}" if version else name
    return folder / _run(["npm", "pack", "--silent", wanted], folder).splitlines()[-1].strip()


def _download_debian(name: str, version: str, folder: Path) -> Path:
    wanted = f"{name}={version}" if version else name
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _run(["apt-get", "download", "-q", wanted], Path(scratch))
        (found,) = Path(scratch).glob("*.deb")
        return found.replace(folder / found.name)


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RegistryError(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")
    return done.stdout
