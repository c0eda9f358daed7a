"""Groups inside automata: against brute force over the monoid, sympy, and known groups."""

import math
import random
import time

import machines
import pytest
from sympy.combinatorics import Permutation, PermutationGroup
from sympy.combinatorics.named_groups import AbelianGroup, AlternatingGroup, DihedralGroup, SymmetricGroup

from statetrack.automata import DFA, analyse
from statetrack.automata.faithful import faithful_degree
from statetrack.automata.groups import group_facts, multiply
from statetrack.automata.monoid import ImageSets
from statetrack.errors import UserError


def monoid(dfa: DFA) -> set[tuple[int, ...]]:
    identity = tuple(range(dfa.n_states))
    seen, order = {identity}, [identity]
    for f in order:
        for table in dfa.transitions.values():
            g = tuple(table[q] for q in f)
            if g not in seen:
                seen.add(g)
                order.append(g)
    return seen


def maximal_subgroups(elements: set[tuple[int, ...]]) -> list[PermutationGroup]:
    """For every idempotent e, what e fixes on both sides and what permutes its image, as permutations."""
    groups = []
    for e in elements:
        if multiply(e, e) != e:
            continue
        image = sorted(set(e))
        place = {q: i for i, q in enumerate(image)}
        units = {
            tuple(place[f[q]] for q in image)
            for f in elements
            if multiply(multiply(e, f), e) == f and len({f[q] for q in image}) == len(image)
        }
        groups.append(PermutationGroup([Permutation(list(u)) for u in units]))
    return groups


def test_analysis_agrees_with_brute_force_over_the_monoid():
    rng, looked_at = random.Random(5), 0
    while looked_at < 60:
        dfa = machines.random_dfa(rng, most_states=5).minimal()
        elements = monoid(dfa)
        if len(elements) > 250:
            continue
        looked_at += 1
        found, groups = analyse(dfa), maximal_subgroups(elements)
        orders = {g.order() for g in groups} - {1}
        assert found.monoid_size == len(elements)
        assert found.is_group == (len(orders) <= 1 and all(len(set(f)) == dfa.n_states for f in elements))
        assert found.is_aperiodic == (not orders)
        assert found.is_solvable == all(g.is_solvable for g in groups)
        assert found.is_2group == all(n & (n - 1) == 0 for n in orders)
        # Permutator groups of sets that no idempotent has as image are quotients of these.
        assert orders <= set(found.group_orders)
        assert all(any(n % m == 0 for n in orders) for m in found.group_orders)


@pytest.mark.parametrize(
    ("letters", "order", "solvable"),
    [
        (machines.symmetric(4), 24, True),
        (machines.symmetric(5), 120, False),
        (machines.symmetric(9), math.factorial(9), False),
        (machines.A5, 60, False),
        (machines.M11, 7920, False),
        (machines.Q8, 8, True),
    ],
)
def test_known_groups(letters, order, solvable):
    found = analyse(DFA.from_permutations(letters))
    assert (found.is_group, found.monoid_size, found.group_orders) == (True, order, [order])
    assert found.is_solvable is solvable
    assert not found.left_out


def test_group_facts_agree_with_sympy():
    rng = random.Random(2)
    for _ in range(40):
        n = rng.randint(3, 11)
        generators = [tuple(rng.sample(range(n), n)) for _ in range(rng.randint(2, 3))]
        if rng.random() < 0.5:  # imprimitive: two copies side by side
            generators = [g + tuple(n + q for q in g) for g in generators]
        group = PermutationGroup([Permutation(list(g)) for g in generators])
        facts = group_facts(generators)
        assert (facts.order, facts.solvable) == (group.order(), group.is_solvable)


def regular(group: PermutationGroup) -> list[tuple[int, ...]]:
    """The generators as permutations of the group's own elements, which hides the small action."""
    names = [str(i) for i in range(len(group.generators))]
    dfa = machines.word_problem(
        dict(zip(names, (tuple(g.array_form) for g in group.generators), strict=True))
    )
    return [dfa.transitions[a] for a in names]


@pytest.mark.parametrize(
    ("group", "degree"),
    [
        (SymmetricGroup(3), 3),
        (SymmetricGroup(4), 4),
        (SymmetricGroup(5), 5),
        (SymmetricGroup(6), 6),
        (AlternatingGroup(5), 5),
        (DihedralGroup(4), 4),
        (DihedralGroup(6), 5),  # D6 = D3 x Z2
        (DihedralGroup(15), 8),
        (AbelianGroup(12), 7),  # 4 + 3
        (AbelianGroup(6, 4), 9),  # 2 + 3 + 4
        (AbelianGroup(2, 2, 2, 2), 8),
        (AbelianGroup(8, 9, 5), 22),
        (PermutationGroup([Permutation(list(g)) for g in machines.Q8.values()]), 8),
    ],
)
def test_smallest_faithful_degree(group, degree):
    generators = regular(group)
    found = faithful_degree(generators, int(group.order()))
    assert (found.degree, found.exact) == (degree, True)
    assert group_facts(found.actions).order == group.order()


def test_householders_are_the_rank_of_the_matrix_minus_identity():
    letters = {"i": [0, 1, 2, 3, 4], "s": [1, 0, 2, 3, 4], "p": [1, 2, 0, 4, 3], "c": [1, 2, 3, 4, 0]}
    assert analyse(DFA.from_permutations(letters)).householders == {"i": 0, "s": 1, "p": 3, "c": 4}
    assert analyse(machines.SECOND_TO_LAST_B).householders == {"a": 4, "b": 4}


def test_the_language_counts_and_not_the_automaton():
    both = DFA("a", {"a": [1, 0]}, 0, [0, 1])
    found = analyse(both)
    assert (found.states, found.states_min, found.is_aperiodic, found.min_faithful_degree) == (2, 1, True, 1)


def hard_automata(n: int) -> list[DFA]:
    rng = random.Random(n)
    random_maps = {a: [rng.randrange(n) for _ in range(n)] for a in "ab"}
    accepting = [q for q in range(n) if rng.random() < 0.5]
    cerny = {"a": [(q + 1) % n for q in range(n)], "b": [1, *range(1, n)]}
    pairs = {"a": [(q + 2) % n for q in range(n)], "b": [1, 0, *range(2, n)], "c": [2, 3, 0, 1, *range(4, n)]}
    return [DFA("ab", random_maps, 0, accepting), DFA("ab", cerny, 0, [0]), DFA("abc", pairs, 0, [0])]


@pytest.mark.parametrize("n", [30, 200])
def test_large_automata_answer_soon_and_say_what_was_left_out(n):
    for dfa in hard_automata(n):
        start = time.perf_counter()
        found = analyse(dfa)
        assert time.perf_counter() - start < 4  # about 0.5 s on a free core
        settled = None not in (found.is_aperiodic, found.is_solvable, found.is_2group, found.monoid_size)
        assert settled or found.left_out
        assert found.is_2group is not True


def test_image_sets_stop_at_their_cap():
    images = ImageSets(hard_automata(30)[1], cap=1000)
    assert not images.complete
    assert len(images.moves) == 1000


@pytest.mark.parametrize(
    ("name", "order"),
    [("S2", 2), ("S5", 120), ("A6", 360), ("Z_12", 12), ("D7", 14), ("Q8", 8), ("M11", 7920)],
)
def test_groups_by_name(name, order):
    assert analyse(DFA.from_group(name)).monoid_size == order


@pytest.mark.parametrize("name", ["E8", "S", "S1", "Z0", "D2", "S99999"])
def test_unknown_groups_are_named(name):
    with pytest.raises(UserError, match=name):
        DFA.from_group(name)
