"""Words with a period: whether x u^k y is in the language depends on k modulo a number."""

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, product

from statetrack.automata.dfa import DFA
from statetrack.automata.groups import prime_factors
from statetrack.automata.monoid import ImageSets

Map = tuple[int, ...]

SHORT_WORDS = 400
BOUNDED_WORDS = 5_000  # where words are bounded in length, and all of them are wanted
TRIES = 300


@dataclass(frozen=True)
class Witness:
    """Words x u^k y: for large k, membership in the language is periodic in k with exactly this period.

    It proves that a model class whose state has no such period on u^k cannot recognise the language.
    """

    x: tuple[str, ...]
    u: tuple[str, ...]
    y: tuple[str, ...]
    period: int

    def holds(self, dfa: DFA) -> bool:
        """Check the claim on the automaton, on three periods."""
        start = 2 * dfa.n_states
        member = [dfa.accepts([*self.x, *self.u * k, *self.y]) for k in range(start, start + 3 * self.period)]
        periods = [p for p in range(1, self.period + 1) if member[p:] == member[:-p]]
        return periods[:1] == [self.period]

    def to_dict(self) -> dict:
        """Plain data, for JSON."""
        return asdict(self)

    def shape(self) -> str:
        """The family of words as text: x u^k y."""
        u = spelt(self.u)
        power = f"{u}^k" if len(self.u) == 1 else f"({u})^k"
        return " ".join(part for part in (spelt(self.x), power, spelt(self.y)) if part)

    def note(self) -> str:
        """What they show."""
        return f"period {self.period} in k"

    def example(self, repeats: int) -> list[str]:
        """The word of the family with k = `repeats`."""
        return [*self.x, *self.u * repeats, *self.y]

    def __str__(self) -> str:
        return f"{self.shape()}, {self.note()}"


def spelt(word: tuple[str, ...]) -> str:
    """The word as text, with runs of five letters or more as a power."""
    runs = [(letter, len(list(run))) for letter, run in groupby(word)]
    joint = "" if all(len(letter) == 1 for letter in word) else "."
    parts = [f"{letter}^{length}" if length > 4 else joint.join([letter] * length) for letter, length in runs]
    return (joint or (" " if any(length > 4 for _, length in runs) else "")).join(parts)


def even_witness(minimal: DFA, images: ImageSets, max_letters: int | None = None) -> Witness | None:
    """A word u with any period above 1; `max_letters` bounds its length."""
    return _search(minimal, images, lambda p: True, max_letters)


def odd_witness(minimal: DFA, images: ImageSets) -> Witness | None:
    """A word u with a period that is an odd prime."""
    return _search(minimal, images, lambda p: p > 2, None)


def letter_witness(minimal: DFA) -> Witness | None:
    """A letter with a period of at least 3."""
    for letter in minimal.alphabet:
        table = minimal.transitions[letter]
        for cycle in sorted(_cycles(table), key=len):
            if len(cycle) >= 3:
                # A state that differs from its second successor rules out the periods 1 and 2.
                return _cycle_witness(minimal, (letter,), cycle, 2)
    return None


def long_witness(minimal: DFA, images: ImageSets) -> Witness | None:
    """A word u with a period of at least 3: an odd prime, or 4."""
    found = odd_witness(minimal, images)
    if found is not None:
        return found
    for word in _chain(_short_words(minimal, 3, SHORT_WORDS), _class_words(images)):
        for cycle in _cycles(_move(minimal, word)):
            if len(cycle) % 4 == 0:
                times = len(cycle) // 4
                letters = tuple(minimal.alphabet[i] for i in word) * times
                return _cycle_witness(minimal, letters, cycle[::times], 2)
    return None


def _search(
    minimal: DFA, images: ImageSets, wanted: Callable[[int], bool], max_letters: int | None
) -> Witness | None:
    words = _short_words(minimal, max_letters or 3, BOUNDED_WORDS if max_letters else SHORT_WORDS)
    if max_letters is None:
        words = _chain(words, _class_words(images))
    for word in words:
        move = _move(minimal, word)
        for cycle in sorted(_cycles(move), key=len):
            primes = [p for p in prime_factors(len(cycle)) if wanted(p)]
            if not primes:
                continue
            # A power of the word has a cycle of prime length; a sequence that varies on it has that period.
            times = len(cycle) // primes[0]
            if max_letters is not None and len(word) * times > max_letters:
                return _cycle_witness(minimal, tuple(minimal.alphabet[i] for i in word), cycle, 1)
            letters = tuple(minimal.alphabet[i] for i in word) * times
            suffix = distinguish(minimal, cycle[0], cycle[times])
            return Witness(reach(minimal, cycle[0]), letters, suffix, primes[0])
    return None


def _chain(*parts: Iterator[list[int]]) -> Iterator[list[int]]:
    for part in parts:
        yield from part


def _cycle_witness(minimal: DFA, word: tuple[str, ...], cycle: list[int], ahead: int) -> Witness:
    """The period on a cycle of the word: not 1, and not `ahead`, whose state differs from the first one."""
    suffix = distinguish(minimal, cycle[0], cycle[ahead])
    member = [minimal.accepts([*reach(minimal, q), *suffix]) for q in cycle]
    period = next(
        p for p in range(1, len(cycle) + 1) if all(member[i] == member[i - p] for i in range(len(cycle)))
    )
    return Witness(reach(minimal, cycle[0]), word, suffix, period)


def _short_words(dfa: DFA, longest: int, most: int) -> Iterator[list[int]]:
    letters, given = range(len(dfa.alphabet)), 0
    for length in range(1, longest + 1):
        for word in product(letters, repeat=length):
            yield list(word)
            given += 1
            if given >= most:
                return


def _class_words(images: ImageSets) -> Iterator[list[int]]:
    """Words that permute an image set without fixing it, then random products of those."""
    loops = []
    for image_class in images.classes:
        here = []
        for mask, letter in images.generators(image_class).values():
            back = images.word_back(image_class, images.moves[mask][letter])
            here.append([*images.word_to(image_class, mask), letter, *back])
            if len(here) >= 8:
                break
        for mask in image_class.masks[:8]:
            here.append([*images.word_to(image_class, mask), *images.word_back(image_class, mask)])
        if here[0]:
            loops.append(here)
            yield from here
    rng = random.Random(0)
    for here in loops:
        for _ in range(TRIES):
            word = [letter for _ in range(rng.randint(2, 6)) for letter in rng.choice(here)]
            yield word


def _move(dfa: DFA, word: list[int]) -> Map:
    move = tuple(range(dfa.n_states))
    for i in word:
        table = dfa.transitions[dfa.alphabet[i]]
        move = tuple([table[q] for q in move])
    return move


def _cycles(move: Map) -> list[list[int]]:
    """The cycles of a map of the states into themselves."""
    image = set(move)
    while len(smaller := {move[q] for q in image}) < len(image):
        image = smaller
    cycles, seen = [], set()
    for first in sorted(image):
        cycle = []
        point = first
        while point not in seen:
            seen.add(point)
            cycle.append(point)
            point = move[point]
        if cycle:
            cycles.append(cycle)
    return cycles


def reach(dfa: DFA, goal: int) -> tuple[str, ...]:
    """A shortest word from the start to a state."""
    words: dict[int, tuple[str, ...]] = {dfa.start: ()}
    for q in (order := [dfa.start]):
        for letter, table in dfa.transitions.items():
            if table[q] not in words:
                words[table[q]] = (*words[q], letter)
                order.append(table[q])
    return words[goal]


def distinguish(dfa: DFA, p: int, q: int) -> tuple[str, ...]:
    """A shortest word that is accepted from one of two states of a minimal automaton only."""
    words: dict[tuple[int, int], tuple[str, ...]] = {(p, q): ()}
    for a, b in (order := [(p, q)]):
        if (a in dfa.accepting) != (b in dfa.accepting):
            return words[a, b]
        for letter, table in dfa.transitions.items():
            pair = (table[a], table[b])
            if pair not in words:
                words[pair] = (*words[a, b], letter)
                order.append(pair)
    raise ValueError(f"states {p} and {q} accept the same words; the automaton is not minimal")
