"""Abelian groups as products of cyclic groups of prime-power order."""

from collections.abc import Sequence

from statetrack.automata.groups import Perm, multiply, prime_factors

ELEMENT_CAP = 50_000


def abelian_actions(generators: Sequence[Perm]) -> list[Perm] | None:
    """The generators on one cycle per prime-power factor: the fewest points, their number being the sum of
    the prime powers. None if two generators do not commute or the group is too large to list."""
    generators = [tuple(g) for g in generators]
    if any(multiply(g, h) != multiply(h, g) for g in generators for h in generators):
        return None
    relations = _relations(generators)
    if relations is None:
        return None
    diagonal, coordinates = _smith(relations)
    factors = [(i, power) for i, d in enumerate(diagonal) for power in _prime_powers(d)]
    actions = []
    for row in coordinates:
        action: list[int] = []
        for i, power in factors:
            offset = len(action)
            action.extend([offset + (point + row[i]) % power for point in range(power)])
        actions.append(tuple(action))
    return actions


def _relations(generators: list[Perm]) -> list[list[int]] | None:
    """A square matrix whose rows span the exponents x with g_1^x_1 ... g_k^x_k = 1."""
    k = len(generators)
    known: dict[Perm, list[int]] = {tuple(range(len(generators[0]))): [0] * k}
    rows = []
    for i, g in enumerate(generators):
        power, count = g, 1
        while power not in known:
            power, count = multiply(power, g), count + 1
        row = [-x for x in known[power]]
        row[i] += count
        rows.append(row)
        if len(known) * count > min(ELEMENT_CAP, 4_000_000 // len(g)):
            return None
        larger = dict(known)
        step = g
        for e in range(1, count):
            for element, exponents in known.items():
                larger[multiply(element, step)] = [x + e * (j == i) for j, x in enumerate(exponents)]
            step = multiply(step, g)
        known = larger
    return rows


def _smith(rows: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Diagonalise an integer matrix R: (d, C) with L R C diagonal of entries d, L and C invertible.

    Generator i then is the vector C[i], read modulo d coordinate by coordinate.
    """
    k = len(rows)
    rows = [row[:] for row in rows]
    C = [[int(i == j) for j in range(k)] for i in range(k)]
    for t in range(k):
        while True:
            # The smallest entry left becomes the pivot, and clears its row and column up to remainders.
            _, i, j = min((abs(rows[i][j]), i, j) for i in range(t, k) for j in range(t, k) if rows[i][j])
            rows[t], rows[i] = rows[i], rows[t]
            for row in [*rows, *C]:
                row[t], row[j] = row[j], row[t]
            pivot = rows[t][t]
            for i in range(t + 1, k):
                q = rows[i][t] // pivot
                rows[i] = [a - q * b for a, b in zip(rows[i], rows[t], strict=True)]
            for j in range(t + 1, k):
                q = rows[t][j] // pivot
                for row in [*rows, *C]:
                    row[j] -= q * row[t]
            if not any(rows[i][t] or rows[t][i] for i in range(t + 1, k)):
                break
    return [abs(rows[t][t]) for t in range(k)], C


def _prime_powers(d: int) -> list[int]:
    powers = []
    for p in prime_factors(d):
        power = p
        while d % (power * p) == 0:
            power *= p
        powers.append(power)
    return powers
