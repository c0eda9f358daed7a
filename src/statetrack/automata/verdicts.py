"""The rows of the table that `explain` prints, one function each.

Every function returns (answer, reason, source, derived, witness), where `derived` marks what follows from a
theorem's argument rather than from its statement. Every "no" has a witness.
"""

from dataclasses import dataclass
from functools import cached_property

from statetrack.automata.analysis import Analysis
from statetrack.automata.dfa import DFA
from statetrack.automata.group_layers import find_exponents
from statetrack.automata.group_witness import GroupWitness, commutative, group_witness, has_exponent_two
from statetrack.automata.groups import cycle_lengths, dihedral_rotation, is_power, multiply
from statetrack.automata.monoid import ImageSets
from statetrack.automata.one_layer import MergeWitness, holding, merge_witness
from statetrack.automata.witness import (
    BOUNDED_WORDS,
    Witness,
    even_witness,
    letter_witness,
    long_witness,
    odd_witness,
)

AnyWitness = Witness | GroupWitness | MergeWitness
Answer = tuple[str, str, str, bool, AnyWitness | None]

CYCLIC_STATES = 1_000
ONE_LAYER_STATES, ONE_LAYER_LETTERS = 24, 6
_THEORY = "docs/theory.md"


@dataclass
class Facts:
    """The input of the rows: the minimal automaton, its analysis, and words with periods."""

    minimal: DFA
    analysis: Analysis
    images: ImageSets

    @cached_property
    def periodic(self) -> Witness | None:
        """Some word with a period above 1."""
        return None if self.analysis.is_aperiodic else even_witness(self.minimal, self.images)

    @cached_property
    def odd(self) -> Witness | None:
        """Some word whose period is an odd prime."""
        return None if self.analysis.is_2group else odd_witness(self.minimal, self.images)

    @cached_property
    def permutations(self) -> list[tuple[int, ...]]:
        """The letters that are not the identity, if all letters are permutations."""
        identity = tuple(range(self.minimal.n_states))
        return [table for table in self.minimal.transitions.values() if table != identity]

    @cached_property
    def cyclic(self) -> bool:
        """Whether the letters generate a cyclic group."""
        small = self.minimal.n_states <= CYCLIC_STATES
        return self.analysis.is_group and small and find_exponents(self.minimal) is not None

    @cached_property
    def rotation(self) -> tuple[int, ...] | None:
        """A generator of the rotations, if the group is dihedral with at least six elements; else None."""
        return dihedral_rotation(self.permutations) if self.analysis.is_group else None

    @cached_property
    def not_swaps(self) -> list[tuple[int, ...]]:
        """The letters that are neither the identity nor a swap of two states, if all are permutations."""
        return [g for g in self.permutations if len(g) - len(cycle_lengths(g)) > 1]

    @cached_property
    def signed_one(self) -> Answer:
        """The answer for one diagonal layer in [-1,1]."""
        return diagonal_negative_one(self)

    @property
    def resets_only(self) -> bool:
        """Whether every letter is the identity or sends all states to one."""
        identity = tuple(range(self.minimal.n_states))
        return all(t == identity or len(set(t)) == 1 for t in self.minimal.transitions.values())


def diagonal_positive(f: Facts) -> Answer:
    """Diagonal matrices with eigenvalues in [0,1]: exactly the star-free languages."""
    if f.analysis.is_aperiodic:
        return "yes", "the language is star-free", "Sarrof et al. 2024; the holonomy cascade", False, None
    if f.periodic is not None:
        return "no", "the state settles on x u^k y, the language does not", "Theorem 1", False, f.periodic
    return _open("whether the language is star-free was not settled within the limits")


def positive_factors(f: Facts, factors: int) -> Answer:
    """One or two factors per token with eigenvalues in [0,1]: no as soon as a short word has a period."""
    if f.analysis.is_aperiodic:
        reason = "the language is star-free, and heads of width 1 make a diagonal layer"
        return "yes", reason, "follows from diagonal [0,1]", True, None
    letters = 2 // factors  # a word of that many letters has at most two factors
    all_tried = len(f.minimal.alphabet) ** letters <= BOUNDED_WORDS // 2
    witness = even_witness(f.minimal, f.images, max_letters=letters)
    if witness is not None:
        reason = "two factors have real eigenvalues in [0,1] only"
        return "no", reason, "Theorem 1 with Proposition 1.3", len(witness.u) > 1, witness
    if f.analysis.is_aperiodic is None:
        return _open("whether the language is star-free was not settled within the limits")
    if not all_tried:
        return _open(f"no word of one or two factors with a period is among the {BOUNDED_WORDS} tried")
    return _open("every period needs a word of three factors or more, which can have complex eigenvalues")


def positive_many(f: Facts) -> Answer:
    """More factors with eigenvalues in [0,1]."""
    if f.analysis.is_aperiodic:
        return "yes", "the language is star-free: every A is I or I/4", "the holonomy cascade", True, None
    if f.analysis.is_aperiodic is None:
        return _open("whether the language is star-free was not settled within the limits")
    return _open("products of three factors can have complex eigenvalues of modulus below 1")


def diagonal_negative(f: Facts) -> Answer:
    """Diagonal matrices with eigenvalues in [-1,1]: exactly the languages whose groups are 2-groups."""
    if f.analysis.is_2group:
        reason = (
            "star-free" if f.analysis.is_aperiodic else "all groups inside are 2-groups: a cascade of signs"
        )
        return "yes", reason, "Krohn-Rhodes with scalar layers", True, None
    if f.odd is not None:
        return "no", "real diagonal layers have periods 1, 2, 4, ... on u^k", "Theorem 2", True, f.odd
    return _open("whether all groups are 2-groups was not settled within the limits")


def diagonal_negative_one(f: Facts) -> Answer:
    """One diagonal layer with eigenvalues in [-1,1]."""
    if f.analysis.is_group and f.minimal.n_states > 1:
        if has_exponent_two(f.permutations):
            return "yes", "letters that commute and are their own inverses: signs", "Theorem 3", False, None
        witness = long_witness(f.minimal, f.images)
        if witness is not None:
            reason = "in one real diagonal layer u^k has period 1 or 2"
            return "no", reason, "Theorem 2 with one layer", True, witness
    return _one_layer(f, 2)


def unit_circle_one(f: Facts) -> Answer:
    """One diagonal layer with eigenvalues of modulus up to 1."""
    if f.analysis.is_group and f.minimal.n_states > 1:
        if commutative(f.permutations):
            return "yes", "the letters commute: rotations of the circle", "Theorem 3", False, None
        witness = group_witness(f.minimal, f.images, "not commutative")
        if witness is not None:
            return "no", "diagonal matrices commute", _THEORY, True, witness
    return _one_layer(f, None)


def _one_layer(f: Facts, order: int | None) -> Answer:
    """A language that need not be a group's: by what a layer merges, and by what it can hold."""
    if f.minimal.n_states == 1:
        return "yes", "one state", "nothing to track", False, None
    if f.minimal.n_states > ONE_LAYER_STATES or len(f.minimal.alphabet) > ONE_LAYER_LETTERS:
        return _open("one layer is tested on small automata only")
    witness = merge_witness(f.minimal, order)
    if witness is not None:
        return "no", "one diagonal layer merges words that the language does not", _THEORY, True, witness
    found = holding(f.minimal, order)
    if found is not None:
        counts = "" if found[0].order == 1 else f" and counts modulo {found[0].order}"
        return "yes", f"the last few letters of each kind{counts} tell the state", _THEORY, True, None
    return _open("no words that a layer merges and no weights were found within the limits")


def unit_circle(f: Facts) -> Answer:
    """Diagonal layers with eigenvalues of modulus up to 1: the languages whose groups are solvable."""
    if f.analysis.is_solvable:
        cascade = "all groups inside are solvable: a cascade of rotations"
        kind = "star-free" if f.analysis.is_aperiodic else cascade
        return "yes", kind, f"Krohn-Rhodes with rotations; {_THEORY}", True, None
    if f.analysis.is_solvable is False:
        witness = group_witness(f.minimal, f.images, "not solvable")
        if witness is not None:
            return "no", "groups in a stack of diagonal layers are solvable", _THEORY, True, witness
        return _open("a group inside is not solvable, but no words that show it were found within the limits")
    return _open("whether all groups are solvable was not settled within the limits")


def rotating_one(f: Facts) -> Answer:
    """One layer whose transition is rotations of fixed planes, then one factor: (I - beta k k^T) R."""
    one = deltanet_one(f)
    if one[0] == "yes":
        return "yes", "no rotations are needed", one[2], one[3], None
    if f.analysis.is_group:
        if commutative(f.permutations):
            return "yes", "the letters commute: rotations of separate planes", "Theorem 3", True, None
        if f.rotation is not None:
            return "yes", "a dihedral group: rotations and reflections of a polygon", "Theorem 3", True, None
        if commutative(f.not_swaps):
            reason = "every letter swaps two states, or commutes with all letters that do not"
            return "yes", reason, f"Theorem 3; {_THEORY}", True, None
    return _open("known only where every letter is one reflection, or commutes with all that are not")


def deltanet_one(f: Facts) -> Answer:
    """One layer with one factor per token."""
    n = f.minimal.n_states
    if n == 1:
        return "yes", "one state", "nothing to track", False, None
    if f.resets_only:
        return "yes", "a scalar: beta = 0 keeps it, beta = 1 overwrites it", "Eq. 1", True, None
    if n == 2:
        return "yes", "a scalar: beta = 0, 1 and 2 keep, overwrite and flip it", "Eq. 1", True, None
    witness = letter_witness(f.minimal) if f.signed_one[0] != "yes" else None
    if witness is not None:
        return (
            "no",
            "one factor has real eigenvalues, so a letter has period 1 or 2",
            "Theorem 2",
            False,
            witness,
        )
    if f.analysis.is_group:
        if all(n - len(cycle_lengths(g)) <= 1 for g in f.permutations):
            return "yes", "every letter swaps two states or none", "Theorem 3", False, None
        if f.rotation is not None and all(not is_power(g, f.rotation) for g in f.permutations):
            return "yes", "every letter is a reflection of a polygon", "Theorem 3 in the plane", True, None
        commute = all(multiply(g, h) == multiply(h, g) for g in f.permutations for h in f.permutations)
        if commute and f.analysis.monoid_size == 2 ** len(set(f.permutations)):
            return "yes", "independent signs: every letter flips its own coordinate", "Theorem 3", True, None
    if f.signed_one[0] == "yes":
        reason = "one diagonal layer is enough, and heads of width 1 make one"
        return "yes", reason, "follows from diagonal [-1,1], 1 layer", True, None
    return _open("no letter has a period above 2, and no single reflections were found for them")


def deltanet_two(f: Facts) -> Answer:
    """Two layers with one factor per token."""
    one = deltanet_one(f)
    if one[0] == "yes":
        return "yes", "one layer is enough", one[2], one[3], None
    if f.cyclic:
        return "yes", f"addition modulo {f.minimal.n_states} by reflections", "Appendix D", False, None
    if f.rotation is not None:
        return "yes", "a dihedral group", "Appendix D; Siems et al. 2025 (DeltaProduct)", False, None
    return _open("known for cyclic and dihedral groups only")


def deltaproduct_one(f: Facts) -> tuple[int | None, Answer]:
    """One layer with as many factors as the letters need; the number comes first."""
    n, needed = f.minimal.n_states, max(f.analysis.householders.values(), default=0)
    if f.analysis.is_group:
        if f.cyclic and needed > 2:
            return 2, ("yes", f"rotations by multiples of 2 pi / {n}", "Theorem 3", False, None)
        needed = max(1, needed)
        swaps = "one swap" if needed == 1 else f"{needed} swaps"
        return needed, ("yes", f"a group: at most {swaps} per letter", "Theorem 3", False, None)
    if all(len(set(t)) in (1, n) for t in f.minimal.transitions.values()):
        return n, (
            "yes",
            "every letter permutes the states or resets them",
            "Theorem 4 with one level",
            True,
            None,
        )
    return None, _open("some letter neither permutes the states nor resets them")


def deltaproduct_many(f: Facts) -> Answer:
    """|Q| - 1 layers of |Q| factors."""
    reason = "every regular language, by the excluded-state cascade"
    return "yes", reason, "Theorem 4, corrected in docs/theory.md", True, None


def _open(reason: str) -> Answer:
    return "unknown", reason, "open", False, None
