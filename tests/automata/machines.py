"""Automata and groups that several tests share."""

import random

from statetrack.automata import DFA


def random_dfa(rng: random.Random, most_states: int = 9, letters: int | None = None) -> DFA:
    """Random maps, with identity, constant and bijective letters, unreachable states and empty languages."""
    n, k = rng.randint(1, most_states), rng.randint(1, 4) if letters is None else letters
    kinds = {
        "identity": lambda: list(range(n)),
        "constant": lambda: [rng.randrange(n)] * n,
        "permutation": lambda: rng.sample(range(n), n),
        "map": lambda: [rng.randrange(n) for _ in range(n)],
    }
    alphabet = "abcd"[:k]
    tables = {a: kinds[rng.choices(list(kinds), (1, 1, 2, 4))[0]]() for a in alphabet}
    return DFA(alphabet, tables, rng.randrange(n), [q for q in range(n) if rng.random() < 0.4])


def random_word(rng: random.Random, dfa: DFA, length: int) -> list[str]:
    return rng.choices(dfa.alphabet, k=length) if dfa.alphabet else []


def cycle(n: int, *cycles: list[int]) -> tuple[int, ...]:
    """The permutation of 0..n-1 with the given cycles of points from 1."""
    images = list(range(n))
    for points in cycles:
        for a, b in zip(points, points[1:] + points[:1], strict=True):
            images[a - 1] = b - 1
    return tuple(images)


def symmetric(n: int) -> dict[str, tuple[int, ...]]:
    return {"s": cycle(n, [1, 2]), "c": cycle(n, list(range(1, n + 1)))}


A5 = {"a": cycle(5, [1, 2, 3]), "b": cycle(5, [3, 4, 5])}
M11 = {"a": cycle(11, list(range(1, 12))), "b": cycle(11, [3, 7, 11, 8], [4, 10, 5, 6])}
Q8 = {"i": (1, 2, 3, 0, 5, 6, 7, 4), "j": (4, 7, 6, 5, 2, 1, 0, 3)}


def dihedral(m: int) -> dict[str, tuple[int, ...]]:
    return {"r": tuple((i + 1) % m for i in range(m)), "s": tuple(-i % m for i in range(m))}


def adder(m: int, *shifts: int) -> DFA:
    """Addition modulo m; the letters are the numbers that are added."""
    return DFA.from_permutations({str(s): [(q + s) % m for q in range(m)] for s in shifts})


def word_problem(generators: dict[str, tuple[int, ...]]) -> DFA:
    """The automaton whose states are the group's elements, the identity being the start and accepting."""
    from statetrack.automata.groups import closure, multiply

    elements = closure(list(generators.values()), 10**5)
    assert elements is not None
    number = {g: i for i, g in enumerate(elements)}
    return DFA.from_permutations(
        {a: [number[multiply(g, s)] for g in elements] for a, s in generators.items()}
    )


SECOND_TO_LAST_B = DFA.from_regex("[ab]*b[ab]", "ab")
