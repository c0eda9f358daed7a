"""Read every locked release, filter its documents and choose those of the corpus."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
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


def choose(
    documents: list[Document],
    budgets: dict[str, int],
    validation: float,
    encode: Callable[[list[str]], Iterator[np.ndarray]],
) -> tuple[list[int], list[int], dict[int, np.ndarray]]:
    """The training documents, in their order; those for validation, in the order of hashes; tokens of both.

    Every domain's documents are taken in the order of their hashes up to its budget of tokens; the first
    ones, `validation` of the budget, are for validation. No more documents are encoded than that takes.
    """
    train, random, tokens = [], [], {}
    for domain, budget in budgets.items():
        own = [i for i, d in enumerate(documents) if d.domain == domain and not d.heldout]
        own.sort(key=lambda i: _key(documents[i]))
        taken = 0
        for i, ids in zip(own, encode([documents[i].text or "" for i in own]), strict=False):
            if taken >= (1 + validation) * budget:
                break
            (random if taken < validation * budget else train).append(i)
            tokens[i] = ids
            taken += len(ids)
        else:
            raise ValueError(
                f"{domain}: the sources hold {taken:,} tokens, expected {(1 + validation) * budget:,.0f}. "
                "Add sources, or lower the budget in [tokens]."
            )
    return sorted(train), sorted(random, key=lambda i: _key(documents[i])), tokens
