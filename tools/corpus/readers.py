"""How each source of `sources.toml` becomes documents.

A reader takes the files of a release and yields `Document`s. The unit that is held out is a *group*: a
project, a novel, a speech, a family of problems, a headword. A group is trained on or held out as a whole.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from filters import decoded

Files = Iterable[tuple[str, bytes]]

SPEECHES = 5  # one in five is held out
FAMILIES = 10  # one in ten
HEADWORDS = 16  # one in sixteen


@dataclass(frozen=True)
class Document:
    """A text with its domain. `pack` names the held-out sequences it may be put into, at first its group."""

    domain: str
    group: str
    text: str | None  # None: not UTF-8
    heldout: bool = False
    pack: str = ""


def chosen(name: str, one_in: int) -> bool:
    """Whether a group is held out: a fixed pseudo-random choice by its name."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % one_in == 0


def python_project(files: Files, project: str, heldout: bool) -> Iterator[Document]:
    """Python as `code`; reStructuredText and Markdown, and .txt below docs/, as `prose`."""
    for path, data in files:
        if path.endswith(".py"):
            yield Document("code", project, decoded(data), heldout, project)
        elif not heldout and (path.endswith((".rst", ".md")) or ("/docs/" in path and path.endswith(".txt"))):
            yield Document("prose", project, decoded(data))


def speeches(files: Files) -> Iterator[Document]:
    """State of the Union addresses, one in five held out."""
    for path, data in files:
        if path.endswith(".txt"):
            name = path.rsplit("/", 1)[-1]
            yield Document("prose", name, decoded(data), chosen(name, SPEECHES), "speeches")


def moby_dick(files: Files) -> Iterator[Document]:
    """The novel by chapters, held out as a whole."""
    chapters = {path: data for path, data in files if re.search(r"/chapter_\d+\.txt$", path)}
    for path in sorted(chapters, key=lambda path: int(re.findall(r"\d+", path)[-1])):
        yield Document("prose", "moby-dick", decoded(chapters[path]), True, "moby-dick")


def plays(files: Files) -> Iterator[Document]:
    """Shakespeare and Milton, to train on."""
    for path, data in files:
        if "/texts/" in path and path.endswith(".txt") and not path.endswith("metadata.txt"):
            yield Document("prose", "plays", data.decode("utf-8", errors="ignore").replace("\r\n", "\n"))


def dictionary(files: Files) -> Iterator[Document]:
    """Entries of the GCIDE by headword, in the order of their hashes; one headword in sixteen is held out."""
    (data,) = (data for path, data in files if path.endswith("gcide.dict"))
    text = data.decode("utf-8", errors="ignore")
    entries: dict[str, list[str]] = {}
    for entry in re.split(r"\n\s*\n(?=\S)", text):
        headword = re.split(r"\s*[\\(,\[]", entry, maxsplit=1)[0].strip()
        entries.setdefault(headword, []).append(entry.strip("\n"))
    for headword in sorted(entries, key=lambda word: hashlib.sha256(word.encode()).digest()):
        text = "\n\n".join(entries[headword]) + "\n"
        yield Document("recall", headword, text, chosen(headword, HEADWORDS), "gcide")


def kernel_documentation(files: Files) -> Iterator[Document]:
    """The Linux kernel's documentation, without its translations."""
    for path, data in files:
        if path.endswith(".rst") and "/Documentation/" in path and "/translations/" not in path:
            yield Document("prose", "linux", decoded(data))


def python_documentation(files: Files) -> Iterator[Document]:
    """The sources of Python's documentation."""
    for path, data in files:
        if path.endswith(".rst.txt"):
            yield Document("prose", "python", decoded(data))


def markdown(files: Files) -> Iterator[Document]:
    """Every Markdown file."""
    for path, data in files:
        if path.endswith(".md"):
            yield Document("prose", "markdown", decoded(data))


def acl2_books(files: Files) -> Iterator[Document]:
    """Theories proved with ACL2; a family is a folder of books, all its versions together.

    Copies of Lisp libraries are left out.
    """
    for path, data in files:
        folders = path.partition("/books/")[2].split("/")[:-1]
        if path.endswith(".lisp") and folders and folders[0] not in ("quicklisp", "build"):
            depth = 2 if folders[0] in ("centaur", "kestrel", "projects", "workshops") else 1
            # vl2014 is an older vl, arithmetic-5 a newer arithmetic
            family = re.sub(r"(?<=[a-z])[-0-9]+$", "", "/".join(folders[:depth]))
            yield _of_family(f"acl2/{family}", decoded(data))


def hol_light(files: Files) -> Iterator[Document]:
    """Theories proved with HOL Light; a family is a folder."""
    for path, data in files:
        if path.endswith((".ml", ".hl")) and "/hol-light/" in path:
            folders = path.partition("/hol-light/")[2].split("/")[:-1]
            yield _of_family("hol-light/" + "/".join(folders[:1]), decoded(data))


def metamath(files: Files) -> Iterator[Document]:
    """Statements and comments of set.mm without proofs, by section; a family is a part of the database."""
    (data,) = (data for path, data in files if path.endswith("/set.mm"))
    text = re.sub(r"\$=.*?\$\.", "$.", decoded(data) or "", flags=re.DOTALL)
    for part in re.split(r"(?=\$\(\s*\n#\*#\*)|(?=\$\(\s*\n####)", text):
        title = re.search(r"[#*]{9,}\s*\n\s*(\S.*?)\s*\n", part)
        for section in re.split(r"(?=\$\(\s*\n(?:=-=-|-\.-\.))", part):
            yield _of_family(f"set.mm/{title[1] if title else 'start'}", section)


def mathematical_software(files: Files) -> Iterator[Document]:
    """Python of computer algebra systems, to train on."""
    for path, data in files:
        if path.endswith((".py", ".pyx")) and "/examples/" not in path:
            yield Document("math", "software", decoded(data))


def generated_problems(lines: Iterable[str]) -> Iterator[Document]:
    """Problems with answers that generate_math.py wrote as JSON lines; a document is some of one family."""
    for line in lines:
        row = json.loads(line)
        yield _of_family("reasoning-gym/" + row["family"], row["text"])


def _of_family(family: str, text: str | None) -> Document:
    return Document("math", family, text, chosen(family, FAMILIES), family)


READERS: dict[str, Callable[[Files], Iterator[Document]]] = {
    reader.__name__: reader
    for reader in (
        speeches,
        moby_dick,
        plays,
        dictionary,
        kernel_documentation,
        python_documentation,
        markdown,
        acl2_books,
        hol_light,
        metamath,
        mathematical_software,
    )
}
