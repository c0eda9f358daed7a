"""From the locked releases to token shards: DIR/shards, with the counts of what was left out."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from documents import choose, gather
from readers import Document
from registries import sha256_of
from sequences import cut, documents_of
from tokens import END, SAMPLE, encode, train_tokenizer

from statetrack.lm.shards import write_index, write_shard
from statetrack.tasks.token_shards import INDEX, Shard

SHARD = 2**24  # tokens
VALIDATION = 1.3  # times the tokens needed: sequences are spread evenly over them


def write(sources: dict[str, Any], lock: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write the shards; returns the SHA-256 of their index, sizes and what the filters dropped."""
    limits = sources["limits"]
    documents, filter_ = gather(sources, lock, folder / "downloads")
    target = folder / "shards"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    tokenizer = target / "tokenizer.json"
    sample = (d.text or "" for i, d in enumerate(documents) if not d.heldout and i % SAMPLE == 0)
    train_tokenizer(sample, limits["vocabulary"], tokenizer)
    validation = VALIDATION * limits["sequence"] * sources["heldout"]["mixture"]["all"]
    chosen, random, tokens = choose(
        documents,
        sources["tokens"],
        validation / sum(sources["tokens"].values()),
        lambda texts: encode(texts, tokenizer),
    )
    splits = {"train": _write_split(target, "train", [tokens[i] for i in chosen])}
    heldout = [document for document in documents if document.heldout]
    of_heldout = list(encode([document.text or "" for document in heldout], tokenizer))
    groups = {}
    for domain, limit in sources["heldout"].items():
        if domain == "mixture":
            of = [replace(documents[i], domain="mixture", heldout=True, pack="mixture") for i in random]
            found = cut(of, [tokens[i] for i in random], domain, limits["sequence"], limit)
        else:
            found = cut(heldout, of_heldout, domain, limits["sequence"], limit)
        parts = documents_of([ids for _, ids in found], end=0)
        splits[f"heldout-{domain}"] = _write_split(target, f"heldout-{domain}", parts)
        groups[f"heldout-{domain}"] = [group for group, _ in found]
    (target / "sequences.json").write_text(json.dumps(groups, indent=1))
    entry = {"name": "tokenizer.json", "sha256": sha256_of(tokenizer)}
    write_index(target, splits, limits["vocabulary"], 0, entry)
    return {
        "index_sha256": sha256_of(target / INDEX),
        "end_of_document": END,
        "sequences_sha256": sha256_of(target / "sequences.json"),
        "tokens": {name: sum(shard.tokens for shard in shards) for name, shards in splits.items()},
        "train_tokens": _train_tokens(documents, tokens, chosen),
        "groups": {name: len(set(of)) for name, of in groups.items()},
        "documents": {f"{domain}: {why}": n for (domain, why), n in sorted(filter_.counts.items())},
    }


def _train_tokens(
    documents: list[Document], tokens: dict[int, np.ndarray], chosen: list[int]
) -> dict[str, int]:
    by_domain: Counter[str] = Counter()
    for i in chosen:
        by_domain[documents[i].domain] += len(tokens[i])
    return dict(sorted(by_domain.items()))


def _write_split(folder: Path, split: str, documents: list[np.ndarray]) -> list[Shard]:
    """Shards of about `SHARD` tokens, each of whole documents; returns their entries of the index."""
    shards, pending, size = [], [], 0
    for i, ids in enumerate(documents):
        pending.append(ids)
        size += len(ids)
        if size >= SHARD or i == len(documents) - 1:
            shards.append(write_shard(folder, split, len(shards), pending, "uint16"))
            pending, size = [], 0
    return shards
