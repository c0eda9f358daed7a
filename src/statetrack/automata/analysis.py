"""Properties of an automaton: sizes, groups, and the Householder factors its letters need."""

from dataclasses import asdict, dataclass, field

from statetrack.automata.dfa import DFA
from statetrack.automata.faithful import faithful_degree
from statetrack.automata.groups import GroupFacts, cycle_lengths, group_facts_within, perm_order
from statetrack.automata.monoid import IMAGE_CAP, MONOID_CAP, ImageSets, monoid_elements, periods

GROUP_WORK = 1_000_000  # limit on generators times points, summed over all groups
_BEYOND = "image sets beyond the first {}, and the groups on them"
LARGE_DEGREE = 60  # on more points, only S_n, A_n and groups of small order are recognised


@dataclass(frozen=True)
class Analysis:
    """Properties of the minimal automaton of a language. None means: not determined within the limits.

    `is_aperiodic`, `is_solvable` and `is_2group` describe all groups inside the transition monoid, and
    `group_orders` lists the orders above 1 of the permutator groups they are derived from (see `monoid.py`).
    `householders` gives for each letter the number of factors of its matrix on the states: |Q| - cycles for
    a permutation, |Q| for a letter that merges states. `left_out` lists what a limit left undetermined.
    """

    states: int
    states_min: int
    monoid_size: int | None
    is_group: bool
    is_aperiodic: bool | None
    is_solvable: bool | None
    is_2group: bool | None
    group_orders: list[int]
    min_faithful_degree: int | None
    min_faithful_degree_exact: bool | None
    householders: dict[str, int]
    image_sets: int
    left_out: list[str] = field(default_factory=list)

    def to_dict(self) -> dict:
        """Plain data, for JSON."""
        return asdict(self)


def analyse(dfa: DFA, *, monoid_cap: int = MONOID_CAP, image_cap: int = IMAGE_CAP) -> Analysis:
    """Sizes, groups and Householder counts of the language of `dfa`.

        analyse(DFA.from_regex("(b*ab*a)*b*", "ab")).is_aperiodic      False: parity is not star-free

    The groups are found from image sets Q.w, without enumerating the transition monoid (docs/theory.md).
    Where there are too many image sets but few elements, the periods of the elements settle what they can.
    """
    minimal = dfa.minimal()
    images = image_sets(minimal, image_cap)
    left_out: list[str] = []
    if not images.complete:
        left_out.append(_BEYOND.format(len(images.moves)))
    facts, nontrivial, odd = _all_groups(images, left_out)
    is_group = all(minimal.is_permutation(letter) for letter in minimal.alphabet)
    known = images.complete and len(facts) == nontrivial
    aperiodic = False if nontrivial else (True if images.complete else None)
    two_group = False if odd or any(f.order & (f.order - 1) for f in facts) else (True if known else None)
    size = facts[0].order if is_group and facts else None
    if size is None:
        elements = monoid_elements(minimal, monoid_cap)
        if elements is None:
            left_out.append(f"the size of the transition monoid, above {monoid_cap}")
        else:
            size = len(elements)
            if aperiodic is None or two_group is None:
                aperiodic, two_group = periods(elements, minimal.n_states)
    if aperiodic:
        left_out = [part for part in left_out if part != _BEYOND.format(len(images.moves))]
    degree, exact = _degree(minimal, facts, left_out) if is_group else (None, None)
    return Analysis(
        states=dfa.n_states,
        states_min=minimal.n_states,
        monoid_size=size,
        is_group=is_group,
        is_aperiodic=aperiodic,
        is_solvable=False if any(not f.solvable for f in facts) else (True if known or two_group else None),
        is_2group=two_group,
        group_orders=sorted({f.order for f in facts}),
        min_faithful_degree=degree,
        min_faithful_degree_exact=exact,
        householders={letter: letter_householders(minimal, letter) for letter in minimal.alphabet},
        image_sets=len(images.moves),
        left_out=left_out,
    )


def image_sets(minimal: DFA, cap: int = IMAGE_CAP) -> ImageSets:
    """The image sets, as many as a limit allows that is lower for larger automata."""
    return ImageSets(minimal, min(cap, 2 + 600_000 // minimal.n_states))


def letter_householders(dfa: DFA, letter: str) -> int:
    """rank(A - I) for a permutation of the states, the width of a reset otherwise."""
    if not dfa.is_permutation(letter):
        return dfa.n_states
    return dfa.n_states - len(cycle_lengths(dfa.transitions[letter]))


def _all_groups(images: ImageSets, left_out: list[str]) -> tuple[list[GroupFacts], int, bool]:
    """Facts about the non-trivial permutator groups, their number, and whether an odd order was found."""
    facts: list[GroupFacts] = []
    known: dict[frozenset, GroupFacts] = {}
    nontrivial = skipped = work = 0
    odd = False
    for image_class in images.classes:
        generators = images.generators(image_class)
        if not generators:
            continue
        nontrivial += 1
        key, degree = frozenset(generators), image_class.representative.bit_count()
        if key not in known:
            work += len(generators) * degree
            if work <= GROUP_WORK:
                orders = [perm_order(g) for g in generators]
                odd = odd or any(order & (order - 1) for order in orders)
            found = group_facts_within(list(generators), LARGE_DEGREE) if work <= GROUP_WORK else None
            if found is None:
                skipped += 1
                continue
            known[key] = found
        facts.append(known[key])
    if skipped:
        left_out.append(f"the order and solvability of {skipped} of {nontrivial} groups")
    return facts, nontrivial, odd


def _degree(minimal: DFA, facts: list[GroupFacts], left_out: list[str]) -> tuple[int | None, bool | None]:
    if minimal.n_states == 1 or not minimal.alphabet:
        return 1, True
    if not facts:
        return None, None
    found = faithful_degree([minimal.transitions[letter] for letter in minimal.alphabet], facts[0].order)
    if not found.exact:
        left_out.append(f"the exact smallest faithful degree: {found.degree} is an upper bound")
    return found.degree, found.exact
