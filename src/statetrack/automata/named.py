"""Groups by name, as permutations of points."""

import re
from collections.abc import Callable

from statetrack.automata.groups import Perm
from statetrack.errors import UserError

LARGEST = 1000


def named_group(name: str) -> dict[str, Perm]:
    """Generators of a group, letter -> permutation.

    S<n>   all permutations of n points: s swaps the first two, c is the cycle of all points
    A<n>   the even ones: t0, t1, ... are 3-cycles of neighbouring points
    Z<m>   addition modulo m: +1
    D<m>   the symmetries of a polygon: r is a rotation, s a reflection
    Q8, M11   the quaternions on 8 points and the Mathieu group on 11

    s5 and S_5 are S5, as in `tasks/groups.py`.
    """
    name = group_name(name)
    fixed = {"Q8": _quaternions, "M11": _mathieu}
    if name in fixed:
        return fixed[name]()
    families: dict[str, tuple[int, Callable[[int], dict[str, Perm]]]] = {
        "S": (2, _symmetric),
        "A": (3, _alternating),
        "Z": (1, _cyclic),
        "D": (3, _dihedral),
    }
    match = re.fullmatch(r"([SAZD])([0-9]{1,6})", name)
    if match is None:
        raise UserError(f"group: {name!r} is not known. Known: S5, A5, Z7, D4 and the like, Q8, M11.")
    lowest, make = families[match[1]]
    n = int(match[2])
    if not lowest <= n <= LARGEST:
        raise UserError(f"group: {name!r} has number {n}, expected {lowest} to {LARGEST} for {match[1]}.")
    return make(n)


def group_name(name: str) -> str:
    """The name in its usual spelling: S5 for s5, S_5 and " s_5 "; other names are unchanged."""
    match = re.fullmatch(r"\s*([A-Za-z])_?0*([0-9]+)\s*", str(name))
    return f"{match[1].upper()}{match[2]}" if match else str(name)


def _shift(n: int) -> Perm:
    return tuple((q + 1) % n for q in range(n))


def _symmetric(n: int) -> dict[str, Perm]:
    swap = (1, 0, *range(2, n))
    return {"s": swap} if n == 2 else {"s": swap, "c": _shift(n)}


def _alternating(n: int) -> dict[str, Perm]:
    return {f"t{i}": (*range(i), i + 1, i + 2, i, *range(i + 3, n)) for i in range(n - 2)}


def _cyclic(m: int) -> dict[str, Perm]:
    return {"+1": _shift(m)}


def _dihedral(m: int) -> dict[str, Perm]:
    return {"r": _shift(m), "s": tuple(-q % m for q in range(m))}


def _quaternions() -> dict[str, Perm]:
    return {"i": (1, 2, 3, 0, 5, 6, 7, 4), "j": (4, 7, 6, 5, 2, 1, 0, 3)}


def _mathieu() -> dict[str, Perm]:
    b = list(range(11))
    for points in ((2, 6, 10, 7), (3, 9, 4, 5)):
        for i, q in enumerate(points):
            b[q] = points[(i + 1) % 4]
    return {"a": _shift(11), "b": tuple(b)}
