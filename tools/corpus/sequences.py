"""Held-out sequences: 16,384 tokens each, cut from documents of one group put one after the other."""

import hashlib
from typing import Any

import numpy as np
from readers import Document


def cut(
    documents: list[Document], tokens: list[np.ndarray], domain: str, length: int, limits: dict[str, Any]
) -> list[tuple[str, np.ndarray]]:
    """(group, tokens (length,)) of a domain's held-out sequences.

    The documents of a group are joined in their order and cut; a rest shorter than a sequence is left out.
    Of a group with more sequences than `of_a_group`, evenly spaced ones are taken. Groups come in the order
    of the hashes of their names, until there are `all` sequences.
    """
    packs: dict[str, list[np.ndarray]] = {}
    for document, ids in zip(documents, tokens, strict=True):
        if document.heldout and document.domain == domain:
            packs.setdefault(document.pack, []).append(ids)
    found: list[tuple[str, np.ndarray]] = []
    for pack in sorted(packs, key=lambda name: hashlib.sha256(name.encode()).digest()):
        joined = np.concatenate(packs[pack])
        pieces = joined[: len(joined) // length * length].reshape(-1, length)
        wanted = min(len(pieces), limits["of_a_group"], limits["all"] - len(found))
        found += [(pack, pieces[int((i + 0.5) * len(pieces) / wanted)]) for i in range(wanted)]
    return found


def documents_of(sequences: list[np.ndarray], end: int) -> list[np.ndarray]:
    """The sequences one after another as documents: borders are behind every `end` and between sequences.

    One `end` is added at the very end: the last token of a sequence predicts the first behind it.
    """
    parts = [part for ids in sequences for part in np.split(ids, np.flatnonzero(ids[:-1] == end) + 1)]
    parts[-1] = np.append(parts[-1], np.uint16(end))
    return parts
