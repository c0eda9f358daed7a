"""What one diagonal layer can track: a test that excludes languages, and weights for those it finds.

Let e be a word whose map of the states is idempotent, and A its letters. A channel of the layer is either
contracted by some letter of A, and e^k makes it forget; or all letters of A have gates of modulus 1 there.
Then, since states are bounded, they turn it about one common centre, and turns commute. So with words l and
r over A that turn every such channel alike, and any z, the states after x l z e^k and x r z e^k come
arbitrarily close: if the automaton tells them apart, no diagonal layer does. l and r may be

    two letters in both orders;
    n times a letter, and nothing: n = 1 for gates in [0,1], 2 in [-1,1], and a power that is idempotent in
    the automaton on the unit circle, where some power of the turn is as near to the identity as one likes.

Conversely a layer can hold, for every set A of letters, the last d letters outside A, and how often every
letter of A has come since each of these, modulo n (`features`). If the state is a function of that, one
layer is enough.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, combinations

from statetrack.automata.dfa import DFA
from statetrack.automata.groups import cycle_lengths
from statetrack.automata.witness import distinguish, reach, spelt

MAPS = 300  # maps of words, with their letters, that the search for a witness goes through
LETTERS = 3  # whose sets are gone through
DEPTHS = (1, 2, 3)
CONFIGURATIONS = 5_000

Map = tuple[int, ...]
Entry = tuple[int, tuple[int, ...]]  # a letter (-1: the beginning), and the counts of A's letters since
Features = tuple[tuple[Entry, ...], ...]


@dataclass(frozen=True)
class MergeWitness:
    """Words x left z e^k y and x right z e^k y, one in the language: a diagonal layer merges them as k grows.

    All letters of `left` and `right` are in e, and e maps the states idempotently.
    """

    x: tuple[str, ...]
    left: tuple[str, ...]
    right: tuple[str, ...]
    z: tuple[str, ...]
    e: tuple[str, ...]
    y: tuple[str, ...]

    def holds(self, dfa: DFA) -> bool:
        """Check on the automaton: e is idempotent, and one of the two words is in the language."""
        minimal = dfa.minimal()
        once, twice = _map(minimal, self.e), _map(minimal, self.e * 2)
        inside = set(self.left) | set(self.right) <= set(self.e)
        pairs = [[*self.x, *part, *self.z, *self.e * 3, *self.y] for part in (self.left, self.right)]
        return inside and once == twice and dfa.accepts(pairs[0]) != dfa.accepts(pairs[1])

    def to_dict(self) -> dict:
        """Plain data, for JSON."""
        return asdict(self)

    def shape(self) -> str:
        """The two families of words."""
        e = f"{spelt(self.e)}^k" if len(self.e) == 1 else f"({spelt(self.e)})^k"
        parts = [
            " ".join(p for p in (spelt(self.x), spelt(part), spelt(self.z), e, spelt(self.y)) if p)
            for part in (self.left, self.right)
        ]
        return " and ".join(parts)

    def note(self) -> str:
        """What they show."""
        return "one is in the language, their states in the layer merge as k grows"

    def example(self, repeats: int) -> list[str]:
        """The first word with k = `repeats`."""
        return [*self.x, *self.left, *self.z, *self.e * repeats, *self.y]

    def __str__(self) -> str:
        return f"{self.shape()}: {self.note()}"


def merge_witness(minimal: DFA, order: int | None) -> MergeWitness | None:
    """Two families of words that one diagonal layer merges; `order` is the n above, None for the circle."""
    letters = range(len(minimal.alphabet))
    tables = [minimal.transitions[letter] for letter in minimal.alphabet]
    words = _words(minimal)
    maps = {m: word for (m, _), word in reversed(words.items())}
    for (e, inside), e_word in words.items():
        if not e_word or _then(e, e) != e:
            continue
        pairs = [((a,) * (order or _idempotent_power(tables[a])), ()) for a in letters if a in inside]
        pairs += [((a, b), (b, a)) for a, b in combinations(sorted(inside), 2)]
        rests: dict[Map, tuple[int, ...]] = {}
        for z, z_word in maps.items():
            rests.setdefault(_then(z, e), z_word)
        for left, right in pairs:
            first, second = _all(minimal, left), _all(minimal, right)
            for rest, z_word in rests.items():
                one, other = _then(first, rest), _then(second, rest)
                if one != other:
                    q = next(q for q in range(minimal.n_states) if one[q] != other[q])
                    y = distinguish(minimal, one[q], other[q])
                    l, r, z, w = (
                        tuple(minimal.alphabet[i] for i in part) for part in (left, right, z_word, e_word)
                    )
                    return MergeWitness(reach(minimal, q), l, r, z, w, y)
    return None


def _words(minimal: DFA) -> dict[tuple[Map, frozenset[int]], tuple[int, ...]]:
    """Maps of words with the letters in them -> a shortest such word; the first `MAPS` of them."""
    identity = tuple(range(minimal.n_states))
    tables = [minimal.transitions[letter] for letter in minimal.alphabet]
    found: dict[tuple[Map, frozenset[int]], tuple[int, ...]] = {(identity, frozenset()): ()}
    for here in (order := list(found)):
        for a, table in enumerate(tables):
            new = (_then(here[0], table), here[1] | {a})
            if new not in found and len(found) < MAPS:
                found[new] = (*found[here], a)
                order.append(new)
    return found


def _then(first: Map, second: Map) -> Map:
    return tuple([second[q] for q in first])


def _all(dfa: DFA, word: tuple[int, ...]) -> Map:
    return _map(dfa, tuple(dfa.alphabet[i] for i in word))


def _map(dfa: DFA, word: tuple[str, ...]) -> Map:
    result = tuple(range(dfa.n_states))
    for letter in word:
        result = _then(result, dfa.transitions[letter])
    return result


def _idempotent_power(table: Map) -> int:
    """An exponent n with a^n = a^(2n)."""
    power, n = table, 1
    while _then(power, power) != power:
        power, n = _then(power, table), n + 1
    return n


@dataclass(frozen=True)
class Holding:
    """What a layer holds: for each set the last `depth` letters outside it, and counts modulo `order`.

    Letters that move the states alike have one number here, and those that move none have none (-1):
    `number[i]` is that of the i-th letter of the alphabet.
    """

    number: tuple[int, ...]
    sets: tuple[frozenset[int], ...]
    depth: int
    order: int

    def start(self) -> Features:
        return tuple(((-1, (0,) * len(inside)),) for inside in self.sets)

    def step(self, features: Features, letter: int) -> Features:
        """The features after one more letter, given by its number."""
        new = []
        for inside, entries in zip(self.sets, features, strict=True):
            if letter in inside:
                place = sorted(inside).index(letter)
                new.append(tuple((y, self._add(counts, place)) for y, counts in entries))
            else:
                new.append(((letter, (0,) * len(inside)), *entries)[: self.depth])
        return tuple(new)

    def _add(self, counts: tuple[int, ...], place: int) -> tuple[int, ...]:
        return (*counts[:place], (counts[place] + 1) % self.order, *counts[place + 1 :])


def holding(minimal: DFA, order: int | None) -> tuple[Holding, dict[Features, int]] | None:
    """What one layer can hold that determines the state, and the state by features; None if not found."""
    identity = tuple(range(minimal.n_states))
    letters = [minimal.transitions[letter] for letter in minimal.alphabet]
    tables = [t for t in dict.fromkeys(letters) if t != identity]
    number = tuple(tables.index(t) if t != identity else -1 for t in letters)
    n = order or math.lcm(1, *(length for t in tables for length in _turning(t)))
    everything = frozenset(range(len(tables)))
    tried: Iterator[Holding] = iter([Holding(number, (everything,), 1, n)])
    if len(tables) <= LETTERS:
        sizes = range(len(tables) + 1)
        sets = tuple(frozenset(s) for s in chain(*(combinations(everything, k) for k in sizes)))
        tried = chain(tried, (Holding(number, sets, depth, n) for depth in DEPTHS))
    for held in tried:
        states = _determined(minimal, tables, held)
        if states:
            return held, states
        if states is None:
            return None
    return None


def _determined(minimal: DFA, tables: list[Map], held: Holding) -> dict[Features, int] | None:
    """The state by features; empty if they do not determine it, None past the limit."""
    states = {held.start(): minimal.start}
    for features in (order := list(states)):
        for letter, table in enumerate(tables):
            new, q = held.step(features, letter), table[states[features]]
            if states.setdefault(new, q) != q:
                return {}
            if len(states) > len(order):
                if len(states) > CONFIGURATIONS:
                    return None
                order.append(new)
    return states


def _turning(table: Map) -> list[int]:
    """The lengths of the cycles of a map."""
    image = set(range(len(table)))
    while len(smaller := {table[q] for q in image}) < len(image):
        image = smaller
    place = {q: i for i, q in enumerate(sorted(image))}
    return cycle_lengths(tuple(place[table[q]] for q in sorted(image)))
