"""Read every locked release, filter its documents and choose those of the corpus."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from archives import files_in
from filters import Filter
from readers import READERS, Document, generated_problems, python_project

Sources = dict[str, Any]  # of sources.toml
Lock = dict[str, Any]  # of lock.json


def wanted(sources: Sources) -> list[dict[str, Any]]:
    """Every release of sources.toml with its reader and role, in the order of the corpus."""
    most = sources["limits"]["code_of_a_project"]
    projects = [
        {"registry": "pypi", "name": name, "licence": licence, "domain": "code, prose", "role": role}
        | {"reader": "python_project", "characters": most}
        for role in ("train", "heldout")
        for name, licence in sources["pypi"][role].items()
    ]
    heldout_too = ("speeches", "dictionary", "acl2_books", "hol_light", "metamath", "generated_problems")
    roles = dict.fromkeys(heldout_too, "train and heldout") | {"moby_dick": "heldout"}
    return projects + [{"role": roles.get(other["reader"], "train")} | other for other in sources["other"]]


def gather(sources: Sources, lock: Lock, downloads: Path) -> tuple[list[Document], Filter]:
    """The documents that pass the filters, in the order of lock and path, and the filter with its counts.

    Held-out documents go through the filter first, so that a copy of one is never trained on.
    """
    raw = [document for release in lock["releases"] for document in _read(release, downloads)]
    limits = {r["name"]: r.get("characters", 10**12) for r in wanted(sources)}
    passed, filter_ = set(), Filter()
    taken: dict[tuple[str, str], int] = defaultdict(int)  # characters, by source and domain
    for i in sorted(range(len(raw)), key=lambda i: (not raw[i][1].heldout, _key(raw[i][1]))):
        source, document = raw[i]
        if not document.heldout and taken[source, document.domain] >= limits[source]:
            continue
        if filter_.keeps(document.text, document.domain):
            taken[source, document.domain] += 0 if document.heldout else len(document.text or "")
            passed.add(i)
    return [raw[i][1] for i in sorted(passed)], filter_


def _read(release: dict[str, Any], downloads: Path) -> Iterator[tuple[str, Document]]:
    name, reader = release["name"], release["reader"]
    path = downloads / release["registry"] / release["file"]
    if reader == "python_project":
        found: Iterable[Document] = python_project(files_in(path), name, release["role"] == "heldout")
    elif reader == "generated_problems":
        found = generated_problems((downloads / "generated" / "math.jsonl").read_text().splitlines())
    else:
        found = READERS[reader](files_in(path))
    return ((name, document) for document in found)


def _key(document: Document) -> bytes:
    """An order that has nothing to do with names or contents."""
    return hashlib.sha256((document.text or "").encode()).digest()


def within_budget(
    documents: list[Document], lengths: list[int], budgets: dict[str, int], validation: float
) -> tuple[list[int], list[int]]:
    """The training documents, by domain up to its budget of tokens, in their order; and those for validation.

    Documents are taken in the order of their hashes; the first ones, `validation` of each budget, are for
    validation and stay in that order. `lengths` are their numbers of tokens.
    """
    taken: dict[str, int] = defaultdict(int)
    train, random = [], []
    for i in sorted(range(len(documents)), key=lambda i: _key(documents[i])):
        domain = documents[i].domain
        if documents[i].heldout or taken[domain] >= (1 + validation) * budgets[domain]:
            continue
        (random if taken[domain] < validation * budgets[domain] else train).append(i)
        taken[domain] += lengths[i]
    short = {d: tokens for d, tokens in budgets.items() if taken[d] < (1 + validation) * tokens}
    if short:
        found = ", ".join(f"{domain} {taken[domain]:,} of {tokens:,}" for domain, tokens in short.items())
        raise ValueError(
            f"the sources hold fewer tokens than asked for: {found}. Add sources or lower [tokens]."
        )
    return sorted(train), random
