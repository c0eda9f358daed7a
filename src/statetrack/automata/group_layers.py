"""Groups in one layer (Theorem 3), and modular addition by reflections alone in two (Appendix D)."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from statetrack.automata.actions import Factor, Permutation, Reflections
from statetrack.automata.dfa import DFA
from statetrack.automata.layer import Layer
from statetrack.automata.numbers import is_permutation
from statetrack.errors import UserError, unknown_name

ELEMENT_CAP = 50_000


def choose_representation(
    machine: DFA, representation: str | Mapping[str, Sequence[int]]
) -> str | dict[str, tuple[int, ...]]:
    """ "states", or letter -> permutation: the smallest one, or the one given, checked."""
    check_group(machine, "group")
    if isinstance(representation, str):
        if representation == "states":
            return representation
        if representation != "smallest":
            raise unknown_name("compile_dfa: representation", representation, ("states", "smallest"))
        from statetrack.automata.faithful import smallest_representation

        return smallest_representation(machine)
    if not isinstance(representation, Mapping):
        raise UserError(
            f"compile_dfa: the representation is a {type(representation).__name__}, expected 'states', "
            f"'smallest' or letter -> permutation."
        )
    chosen, first = {}, representation.get(machine.alphabet[0])
    for letter in machine.alphabet:
        permutation = representation.get(letter)
        if not is_permutation(permutation) or len(permutation) != len(first):  # type: ignore[arg-type]
            raise UserError(
                f"compile_dfa: the representation maps letter {letter!r} to {permutation}; expected for "
                f"every letter a permutation of the same points 0, 1, ..., n - 1."
            )
        chosen[letter] = tuple(int(q) for q in permutation)  # type: ignore[union-attr]
    return chosen


def group_layers(machine: DFA, representation: str | Mapping[str, tuple[int, ...]] = "states") -> list[Layer]:
    """One layer of permutation matrices: on the states (H0 = e_start), or on n points (H0 = (1..n)).

    `representation` is the result of `choose_representation`.
    """
    if isinstance(representation, str):
        actions = [Permutation(machine.transitions[letter]) for letter in machine.alphabet]
        H0 = np.eye(machine.n_states)[machine.start]
        return [Layer(H0, actions.__getitem__, lambda x, q: q, name="permutations of the states")]
    permutations = [representation[letter] for letter in machine.alphabet]
    elements = _elements(machine, permutations)
    n = len(permutations[0])
    H0 = np.arange(1.0, n + 1)
    codebook = np.zeros((len(elements), n))
    for row, element in enumerate(elements):
        codebook[row, list(element)] = H0
    actions = [Permutation(p) for p in permutations]
    labels = list(elements.values())
    return [
        Layer(
            H0,
            actions.__getitem__,
            lambda x, q: q,
            codebook=codebook,
            labels=labels,
            name=f"permutations of {n} points",
        )
    ]


def _elements(machine: DFA, permutations: list[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Every product of the permutations -> the state it stands for."""
    identity = tuple(range(len(permutations[0])))
    tables = [machine.transitions[letter] for letter in machine.alphabet]
    state_of, order = {identity: machine.start}, [identity]
    for element in order:
        for permutation, table in zip(permutations, tables, strict=True):
            product, q = tuple(permutation[i] for i in element), table[state_of[element]]
            if product not in state_of:
                if len(order) >= ELEMENT_CAP:
                    raise UserError(
                        f"compile_dfa: the group has more than {ELEMENT_CAP} elements, too many to list; "
                        f"use representation='states'."
                    )
                state_of[product] = q
                order.append(product)
            elif state_of[product] != q:
                raise UserError(
                    f"compile_dfa: the representation is not faithful: two words act alike on its "
                    f"{len(identity)} points and lead to the states {state_of[product]} and {q}."
                )
    return state_of


def check_group(machine: DFA, strategy: str) -> None:
    """Every letter must permute the states."""
    for letter in machine.alphabet:
        if not machine.is_permutation(letter):
            table = machine.transitions[letter]
            clash = next(q for q in table if table.count(q) > 1)
            raise UserError(
                f"compile_dfa: strategy {strategy!r} needs letters that permute the states, and {letter!r} "
                f"takes {table.count(clash)} states to the same one. Use 'excluded' or 'holonomy'."
            )


def cyclic_layers(machine: DFA) -> list[Layer]:
    """Z_m as rotations of the plane by multiples of 2 pi / m, two reflections each; Z_2 as a sign."""
    exponents = cyclic_exponents(machine, "cyclic")
    m = machine.n_states
    labels = sorted(range(m), key=exponents.__getitem__)
    shifts = [exponents[machine.transitions[a][machine.start]] for a in machine.alphabet]
    if m == 2:
        one = np.ones(1)
        actions = [Reflections(*([Factor(2.0, one)] if shift else []), size=1) for shift in shifts]
        codebook, H0 = np.array([[1.0], [-1.0]]), one
    else:
        actions = [_rotation(shift, m) for shift in shifts]
        codebook, H0 = _directions(2 * math.pi * np.arange(m) / m), np.array([1.0, 0.0])
    return [
        Layer(
            H0,
            actions.__getitem__,
            lambda x, q: q,
            codebook=codebook,
            labels=labels,
            name=f"rotations of Z_{m}",
        )
    ]


def _rotation(shift: int, m: int) -> Reflections:
    """R(theta) = (I - 2 v v^T)(I - 2 w w^T), the angle from w to v being theta / 2."""
    if shift == 0:
        return Reflections(size=2)
    v = _directions(np.array([math.pi * shift / m]))[0]
    return Reflections(Factor(2.0, v), Factor(2.0, np.array([1.0, 0.0])), size=2)


def _directions(angles: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def reflection_layers(machine: DFA) -> list[Layer]:
    """Appendix D: layer one tells even from odd steps, layer two adds modulo m by a reflection each."""
    exponents = cyclic_exponents(machine, "reflections")
    m = machine.n_states
    by_exponent = sorted(range(m), key=exponents.__getitem__)
    shifts = [exponents[machine.transitions[a][machine.start]] for a in machine.alphabet]
    # h -> 1 - h, with the step's parity read off h itself.
    flip = Reflections(Factor(2.0, np.ones(1), 0.5), size=1)
    parity = Layer(
        np.zeros(1),
        lambda x: flip,
        lambda x, odd: 2 * x + odd,
        codebook=np.array([[-1.0], [1.0]]),
        bias=np.array([0.5, -0.5]),
        name="parity of the step",
    )
    # theta(i, 1) = (1 - 2i) pi / m, theta(i, 0) = (1 + 2i) pi / m; the normal is at theta / 2 + pi / 2.
    actions = []
    for shift in shifts:
        for odd in (0, 1):
            theta = (1 + (2 - 4 * odd) * shift) * math.pi / m
            normal = _directions(np.array([(theta + math.pi) / 2]))[0]
            actions.append(Reflections(Factor(2.0, normal), size=2))
    turns = 2 * math.pi * np.arange(m) / m
    codebook = np.concatenate([_directions(turns), _directions(math.pi / m - turns)])
    adder = Layer(
        np.array([1.0, 0.0]),
        actions.__getitem__,
        lambda x, q: q,
        codebook=codebook,
        labels=by_exponent * 2,
        name=f"reflections for Z_{m}",
    )
    return [parity, adder]


def cyclic_exponents(machine: DFA, strategy: str) -> list[int]:
    """State q -> e with q = start.g^e, for a g that generates the group; an error if there is none."""
    check_group(machine, strategy)
    found = find_exponents(machine)
    if found is None:
        raise UserError(
            f"compile_dfa: strategy {strategy!r} needs a cyclic group, and the letters generate another one. "
            f"Use 'group'."
        )
    return found


def find_exponents(machine: DFA) -> list[int] | None:
    """The exponents of `cyclic_exponents`, or None. A cyclic group on all states has |Q| elements."""
    m, tables = machine.n_states, list(machine.transitions.values())
    # The element that takes the start to q, for every q; unique if the group is cyclic.
    element = {machine.start: tuple(range(m))}
    for q in (order := [machine.start]):
        for table in tables:
            if table[q] not in element:
                element[table[q]] = tuple(table[i] for i in element[q])
                order.append(table[q])
    for g in element.values():
        exponents, q = [-1] * m, machine.start
        for e in range(m):
            if exponents[q] >= 0:
                break
            exponents[q] = e
            q = g[q]
        if min(exponents) < 0:
            continue
        adds = all(
            exponents[table[q]] == (exponents[q] + exponents[table[machine.start]]) % m
            for table in tables
            for q in range(m)
        )
        return exponents if adds else None
    return None
