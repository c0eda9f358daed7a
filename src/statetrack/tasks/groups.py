"""Finite groups as tables: elements are numbered, and a product is a look-up.

S_n and A_n number their permutations in lexicographic order, Z_m its residues; 0 is always the identity.
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import run_automaton

LARGEST = 5040  # S_7: its table of 25 million products takes 50 MB


@dataclass(frozen=True, eq=False)
class Group:
    """`then[a, b]` is the element "first a, then b"; as maps, b o a. `moved[a]` counts the points a moves."""

    name: str
    then: np.ndarray  # (order, order), int16
    moved: np.ndarray | None  # (order,), None where elements are not given as permutations
    generators: tuple[int, ...] | None  # the elements the group was generated from, if it was

    @property
    def order(self) -> int:
        return len(self.then)

    @lru_cache(maxsize=8)  # noqa: B019  groups are cached themselves, see `group`
    def table(self, device: torch.device) -> Tensor:
        """`then` as one flat vector on the device: entry a * order + b."""
        return torch.from_numpy(self.then.astype(np.int64).ravel()).to(device)

    @lru_cache(maxsize=8)  # noqa: B019
    def moves(self, device: torch.device) -> Tensor:
        """Row b, entry a: the product of a, then b."""
        return self.table(device).view(self.order, self.order).T.contiguous()

    def prefix_products(self, x: Tensor) -> Tensor:
        """y_t = x_1 then x_2 ... then x_t along axis 1; on a CPU by doubling: log2(T) look-ups."""
        if x.is_cuda:
            return run_automaton(self.moves(x.device), x, 0)
        table, y, shift = self.table(x.device), x, 1
        while shift < x.shape[1]:
            y = torch.cat([y[:, :shift], table[y[:, :-shift] * self.order + y[:, shift:]]], dim=1)
            shift *= 2
        return y


@lru_cache(maxsize=16)
def group(name: str) -> Group:
    """S5, A5, Z60, or generators given by their images: "1 0 2 3 4; 1 2 3 4 0"."""
    if match := re.fullmatch(r"\s*([SAZ])_?(\d+)\s*", name, re.IGNORECASE):
        family, n = match[1].upper(), int(match[2])
        if n < 1:
            raise UserError(f"group {name!r}: the number must be at least 1.")
        if family == "Z":
            _check_order(name, n)
            residues = np.arange(n)
            return Group(f"Z{n}", ((residues[:, None] + residues) % n).astype(np.int16), None, None)
        _check_order(name, math.factorial(min(n, 20)) // (2 if family == "A" and n > 1 else 1))
        elements = np.array(list(permutations(range(n))), dtype=np.int16).reshape(-1, n)
        if family == "A":
            elements = elements[[_is_even(p) for p in elements]]
        return _from_permutations(f"{family}{n}", elements, None)
    if re.fullmatch(r"[\d\s,;]+", name):
        generators = _parse_generators(name)
        return _generate("; ".join(" ".join(map(str, g)) for g in generators), generators)
    raise UserError(
        f"group {name!r} is not known. Give S5, A5, Z60 (any number), or images of permutation generators "
        'separated by semicolons, such as "1 0 2; 1 2 0".'
    )


def _parse_generators(text: str) -> list[tuple[int, ...]]:
    parts = [part.replace(",", " ").split() for part in text.split(";")]
    generators = [tuple(int(i) for i in part) for part in parts if part]
    if not generators:
        raise UserError(f"group {text!r} has no generators; list the images of at least one permutation.")
    points = len(generators[0])
    for generator in generators:
        if sorted(generator) != list(range(points)):
            raise UserError(
                f"group {text!r}: {' '.join(map(str, generator))!r} is not a permutation of the points "
                f"0 to {points - 1}; list the image of every point once."
            )
    return generators


def _generate(name: str, generators: list[tuple[int, ...]]) -> Group:
    """All products of the generators, breadth first."""
    identity = tuple(range(len(generators[0])))
    seen, frontier = {identity}, [identity]
    while frontier:
        frontier = [tuple(g[i] for i in p) for p in frontier for g in generators]
        frontier = [p for p in dict.fromkeys(frontier) if p not in seen]
        seen.update(frontier)
        _check_order(name, len(seen))
    elements = sorted(seen)
    index = {p: i for i, p in enumerate(elements)}
    return _from_permutations(
        name, np.array(elements, dtype=np.int16), tuple(dict.fromkeys(index[g] for g in generators))
    )


def _from_permutations(name: str, elements: np.ndarray, generators: tuple[int, ...] | None) -> Group:
    """The table of lexicographically sorted permutations: (b o a)(i) = b(a(i))."""

    def words(p: np.ndarray) -> np.ndarray:
        """One byte string per permutation, in the same order; from 1, because NUL bytes end strings."""
        return np.ascontiguousarray(p + 1, dtype=">u2").view(f"S{2 * p.shape[1]}").ravel()

    sorted_words = words(elements)
    then = np.stack([np.searchsorted(sorted_words, words(elements[:, a])) for a in elements])
    moved = (elements != np.arange(elements.shape[1])).sum(1)
    return Group(name, then.astype(np.int16), moved, generators)


def _check_order(name: str, order: int) -> None:
    if order > LARGEST:
        raise UserError(
            f"group {name!r} has more than {LARGEST} elements; as many classes cannot be learned."
        )


def _is_even(permutation: np.ndarray) -> bool:
    p, swaps = list(permutation), 0
    for i in range(len(p)):
        while p[i] != i:
            j = p[i]
            p[i], p[j] = p[j], p[i]
            swaps += 1
    return swaps % 2 == 0
