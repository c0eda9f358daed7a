"""Permutation groups given by generators: order and solvability."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

Perm = tuple[int, ...]


def multiply(first: Perm, second: Perm) -> Perm:
    """Do `first`, then `second`."""
    return tuple([second[i] for i in first])


def cycle_lengths(permutation: Perm) -> list[int]:
    """The lengths of the cycles, fixed points included."""
    lengths, seen = [], [False] * len(permutation)
    for first in range(len(permutation)):
        length, point = 0, first
        while not seen[point]:
            seen[point] = True
            point, length = permutation[point], length + 1
        if length:
            lengths.append(length)
    return lengths


def perm_order(permutation: Perm) -> int:
    """The least k > 0 for which the k-th power is the identity."""
    return math.lcm(*cycle_lengths(permutation))


def prime_factors(n: int) -> list[int]:
    """The primes that divide n, in increasing order."""
    primes, p = [], 2
    while n > 1:
        if p * p > n:
            p = n
        if n % p == 0:
            primes.append(p)
        while n % p == 0:
            n //= p
        p += 1
    return primes


def closure(generators: Sequence[Perm], cap: int) -> list[Perm] | None:
    """All elements of the generated group, the identity first; None past the cap."""
    identity = tuple(range(len(generators[0])))
    order, seen = [identity], {identity}
    for element in order:
        for generator in generators:
            product = multiply(element, generator)
            if product not in seen:
                if len(order) >= cap:
                    return None
                seen.add(product)
                order.append(product)
    return order


def is_power(g: Perm, r: Perm) -> bool:
    """Whether g is one of 1, r, r^2, ..."""
    power = tuple(range(len(r)))
    for _ in range(perm_order(r)):
        if power == g:
            return True
        power = multiply(power, r)
    return False


def dihedral_rotation(generators: Sequence[Perm]) -> Perm | None:
    """A generator of the rotations, if the group is dihedral with at least six elements; else None.

    The rotations are all powers of a generator or of a product of two: a group is dihedral if every generator
    is such a power, or inverts it under conjugation and is its own inverse, and some generator does so.
    """
    moving = [g for g in generators if g != tuple(range(len(g)))]
    for r in [*moving, *(multiply(g, h) for g in moving for h in moving)]:
        if perm_order(r) < 3:
            continue
        mirrors = [g for g in moving if not is_power(g, r)]
        if mirrors and all(_is_mirror(g, r) for g in mirrors) and _closed(mirrors, r):
            return r
    return None


def _is_mirror(g: Perm, r: Perm) -> bool:
    """Whether g is its own inverse and inverts r under conjugation, as a reflection does."""
    inverse = tuple(sorted(range(len(r)), key=r.__getitem__))
    return multiply(multiply(g, r), g) == inverse and multiply(g, g) == tuple(range(len(g)))


def _closed(mirrors: list[Perm], r: Perm) -> bool:
    """Whether all mirrors are one of them followed by powers of r, so that there are no more of them."""
    return all(is_power(multiply(mirrors[0], g), r) for g in mirrors)


@dataclass(frozen=True)
class GroupFacts:
    """Order and solvability of one group."""

    order: int
    solvable: bool


def group_facts(generators: Sequence[Perm]) -> GroupFacts:
    """Order and solvability: directly for small groups, cyclic groups, S_n and A_n; by sympy for others."""
    quick = quick_group_facts(generators)
    if quick is not None:
        return quick
    from sympy.combinatorics import Permutation, PermutationGroup

    few = random_products(generators, 4) if len(generators) > 4 else generators
    group = PermutationGroup([Permutation(list(g)) for g in few])
    for generator in generators:
        if not group.contains(Permutation(list(generator))):
            group = PermutationGroup([*group.generators, Permutation(list(generator))])
    order = int(group.order())
    if len(prime_factors(order)) <= 2:
        return GroupFacts(order, True)  # Burnside: two primes make a solvable group
    return GroupFacts(order, not _has_simple_quotient(generators) and bool(group.is_solvable))


def group_facts_within(generators: Sequence[Perm], max_degree: int) -> GroupFacts | None:
    """As `group_facts`, but None where that would take sympy more than `max_degree` points (slow)."""
    if len(generators[0]) <= max_degree:
        return group_facts(generators)
    quick = quick_group_facts(generators)
    if quick is not None:
        return quick
    elements = closure(generators, min(20_000, 2_000_000 // len(generators[0])))
    if elements is None or len(prime_factors(len(elements))) > 2:
        return None
    return GroupFacts(len(elements), True)


def quick_group_facts(generators: Sequence[Perm]) -> GroupFacts | None:
    """Order and solvability of small groups, cyclic ones, and S_n and A_n of any degree; None of others."""
    if not generators or not generators[0]:
        return GroupFacts(1, True)
    if len(generators) == 1:
        return GroupFacts(perm_order(generators[0]), True)
    elements = closure(generators, 60)
    if elements is not None and len(elements) < 60:
        return GroupFacts(len(elements), True)  # A5, of order 60, is the smallest group that is not solvable
    giant = _giant_order(generators)
    return None if giant is None else GroupFacts(giant, False)


def random_products(generators: Sequence[Perm], count: int) -> list[Perm]:
    """Random products of the generators; a few of them almost always generate the same group."""
    rng, products = random.Random(0), []
    for _ in range(count):
        product = tuple(range(len(generators[0])))
        for generator in rng.sample(list(generators), len(generators)):
            if rng.random() < 0.5:
                product = multiply(product, generator)
        products.append(product)
    return products


def _giant_order(generators: Sequence[Perm]) -> int | None:
    """n! or n!/2 for a group recognised as S_n or A_n, else None.

    A transitive group on n >= 8 points with an element that has a cycle of prime length p, n/2 < p < n - 2,
    is primitive and holds a p-cycle, hence all even permutations (Jordan 1873).
    """
    n = len(generators[0])
    if n < 8 or not _is_transitive(generators):
        return None
    primes = {p for p in range(n // 2 + 1, n - 2) if all(p % d for d in range(2, math.isqrt(p) + 1))}
    rng, element = random.Random(0), tuple(range(n))
    for _ in range(60):
        element = multiply(element, generators[rng.randrange(len(generators))])
        if primes.intersection(cycle_lengths(element)):
            even = all((n - len(cycle_lengths(g))) % 2 == 0 for g in generators)
            return math.factorial(n) // (2 if even else 1)
    return None


def _has_simple_quotient(generators: Sequence[Perm]) -> bool:
    """Whether the action on some blocks is S_n or A_n; sympy's own test of solvability is slow on those."""
    for q in range(1, min(8, len(generators[0]))):
        blocks = merge_states(generators, [(0, q)])
        if 8 <= max(blocks) + 1 < len(blocks) and _giant_order(act_on_blocks(generators, blocks)) is not None:
            return True
    return False


def merge_states(generators: Sequence[Perm], pairs: list[tuple[int, int]]) -> list[int]:
    """State -> block in the finest partition that merges the pairs and that the generators respect."""
    parent = list(range(len(generators[0])))

    def find(q: int) -> int:
        while parent[q] != q:
            parent[q] = parent[parent[q]]
            q = parent[q]
        return q

    pairs = list(pairs)
    for a, b in pairs:
        a, b = find(a), find(b)
        if a != b:
            parent[max(a, b)] = min(a, b)
            pairs.extend((g[a], g[b]) for g in generators)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(find(q), len(numbers)) for q in range(len(parent))]


def act_on_blocks(generators: Sequence[Perm], blocks: list[int]) -> list[Perm]:
    """The permutations of the blocks that the generators make."""
    actions = []
    for g in generators:
        image = [0] * (max(blocks) + 1)
        for q, block in enumerate(blocks):
            image[block] = blocks[g[q]]
        actions.append(tuple(image))
    return actions


def _is_transitive(generators: Sequence[Perm]) -> bool:
    order, seen = [0], {0}
    for q in order:
        for g in generators:
            if g[q] not in seen:
                seen.add(g[q])
                order.append(g[q])
    return len(order) == len(generators[0])
