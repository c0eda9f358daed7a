"""Words that permute a set of states as a group which some layers cannot hold."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Literal

from statetrack.automata.dfa import DFA
from statetrack.automata.groups import Perm, group_facts, multiply, quick_group_facts
from statetrack.automata.monoid import ImageClass, ImageSets, members
from statetrack.automata.witness import spelt

Claim = Literal["not commutative", "not solvable"]
PAIRS = 200  # tried for two words that make the claim
POINTS = 60  # of a set whose group sympy tests for solvability; of more points S_n and A_n are known


@dataclass(frozen=True)
class GroupWitness:
    """Words that permute `states` among themselves; the permutations generate a group that is as claimed.

    It proves that a model class whose groups are all commutative, or all solvable, cannot track the language.
    """

    states: tuple[int, ...]
    words: tuple[tuple[str, ...], ...]
    claim: Claim

    def permutations(self, dfa: DFA) -> list[Perm] | None:
        """What the words do to the places of `states`; None if one does not permute them."""
        if max(self.states) >= dfa.n_states:
            return None
        place = {q: i for i, q in enumerate(self.states)}
        found = []
        for word in self.words:
            images = [_follow(dfa, q, word) for q in self.states]
            if set(images) != set(self.states):
                return None
            found.append(tuple(place[q] for q in images))
        return found

    def holds(self, dfa: DFA) -> bool:
        """Check the claim on the minimal automaton."""
        found = self.permutations(dfa.minimal())
        return found is not None and _makes(found, self.claim)

    def to_dict(self) -> dict:
        """Plain data, for JSON."""
        return asdict(self)

    def shape(self) -> str:
        """The words."""
        return ", ".join(spelt(word) for word in self.words)

    def note(self) -> str:
        """What they show."""
        return f"permute {len(self.states)} states as a group that is {self.claim}"

    def example(self, repeats: int) -> list[str]:
        """A word to try."""
        return [letter for word in self.words for letter in word]

    def __str__(self) -> str:
        return f"{self.shape()} {self.note()}"


def group_witness(minimal: DFA, images: ImageSets, claim: Claim) -> GroupWitness | None:
    """Words that permute an image set, two if possible, whose permutations generate a group as claimed."""
    for image_class in images.classes:
        if not images.generators(image_class):
            continue
        states = members(image_class.representative)
        loops = {}
        for word in _loops(images, image_class):
            letters = tuple(minimal.alphabet[i] for i in word)
            moved = GroupWitness(states, (letters,), claim).permutations(minimal)
            assert moved is not None  # a loop of the class permutes its representative
            loops.setdefault(moved[0], letters)
        loops.pop(tuple(range(len(states))), None)
        if not _makes(list(loops), claim):
            continue
        for few in list(combinations(loops, 2))[:PAIRS]:
            if _makes(list(few), claim):
                return GroupWitness(states, tuple(loops[g] for g in few), claim)
        return GroupWitness(states, tuple(loops.values()), claim)
    return None


def commutative(permutations: list[Perm]) -> bool:
    """Whether every two of them commute."""
    return all(multiply(g, h) == multiply(h, g) for g, h in combinations(permutations, 2))


def has_exponent_two(permutations: list[Perm]) -> bool:
    """Whether the group they generate has elements of order 1 and 2 only."""
    identity = tuple(range(len(permutations[0]))) if permutations else ()
    return commutative(permutations) and all(multiply(g, g) == identity for g in permutations)


def _makes(permutations: list[Perm], claim: Claim) -> bool:
    if len(permutations) < 2:
        return False
    if claim == "not commutative":
        return not commutative(permutations)
    facts = (group_facts if len(permutations[0]) <= POINTS else quick_group_facts)(permutations)
    return facts is not None and not facts.solvable


def _loops(images: ImageSets, image_class: ImageClass) -> Iterator[list[int]]:
    """Words that map the representative to itself and generate its permutator group."""
    for mask, letter in images.generators(image_class).values():
        back = images.word_back(image_class, images.moves[mask][letter])
        yield [*images.word_to(image_class, mask), letter, *back]
    for mask in image_class.masks:
        yield [*images.word_to(image_class, mask), *images.word_back(image_class, mask)]


def _follow(dfa: DFA, q: int, word: tuple[str, ...]) -> int:
    for letter in word:
        q = dfa.transitions[letter][q]
    return q
