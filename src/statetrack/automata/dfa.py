"""Deterministic finite automata: tables of next states, validated on construction."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from statetrack.automata.numbers import is_permutation, whole_number
from statetrack.errors import UserError


class DFA:
    """A complete deterministic automaton over letters (strings) with states 0, 1, ..., n_states - 1.

    `transitions` maps every letter to the list of next states: state q goes to transitions[letter][q].
    None stands for a missing move; a rejecting sink is then added as the last state. A word is a sequence
    of letters, so a plain string is a word of one-character letters.

        even = DFA("ab", {"a": [1, 0], "b": [0, 1]}, start=0, accepting=[0])    # an even number of a's
        even.run("aba")      ->  [0, 1, 1, 0]
    """

    def __init__(
        self,
        alphabet: Iterable[str],
        transitions: Mapping[str, Sequence[int | None]],
        start: int = 0,
        accepting: Iterable[int] = (),
    ):
        self.alphabet = checked_alphabet(alphabet)
        if not isinstance(accepting, Iterable):
            raise UserError(f"DFA: accepting is {accepting!r}, expected a list of states.")
        accepting = list(accepting)
        n = _count_states(self.alphabet, transitions, start, accepting)
        tables = {letter: _checked_table(letter, transitions[letter], n) for letter in self.alphabet}
        if any(q is None for table in tables.values() for q in table):
            tables = {
                letter: [n if q is None else q for q in table] + [n] for letter, table in tables.items()
            }
        self.start = _checked_state(start, n, "the start state")
        self.accepting = frozenset(_checked_state(q, n, "an accepting state") for q in accepting)
        self.transitions: dict[str, tuple[int, ...]] = {a: tuple(t) for a, t in tables.items()}  # type: ignore[misc]
        self.n_states = len(next(iter(self.transitions.values()), range(n)))

    @classmethod
    def from_regex(cls, regex: str, alphabet: Iterable[str]) -> "DFA":
        """The minimal automaton of the words that `re.fullmatch(regex, word)` accepts; see `regex.py`."""
        from statetrack.automata.regex import compile_regex

        letters = checked_alphabet(alphabet)
        tables, accepting = compile_regex(regex, letters)
        return cls(letters, tables, 0, accepting).minimal()

    @classmethod
    def from_group(cls, name: str) -> "DFA":
        """The automaton of a named group acting on points: S5, A5, Z7, D4, Q8, M11; see `named.py`."""
        from statetrack.automata.named import named_group

        return cls.from_permutations(named_group(name))

    @classmethod
    def from_permutations(
        cls, permutations: Mapping[str, Sequence[int]], start: int = 0, accepting: Iterable[int] = (0,)
    ) -> "DFA":
        """The automaton whose letters permute the states: state q goes to permutations[letter][q]."""
        if not isinstance(permutations, Mapping):
            raise UserError(
                f"DFA.from_permutations: permutations is a {type(permutations).__name__}, expected "
                f"letter -> list of next states."
            )
        for letter, permutation in permutations.items():
            if not is_permutation(permutation):
                points = f" of 0 to {len(permutation) - 1}" if isinstance(permutation, Sequence) else ""
                raise UserError(
                    f"DFA.from_permutations: letter {letter!r} maps the states to {permutation}, "
                    f"which is no permutation{points}. Every state must be reached exactly once."
                )
        return cls(list(permutations), permutations, start, accepting)

    def run(self, word: Iterable[str]) -> list[int]:
        """The states passed through: the start state, then one state after every letter."""
        states = [self.start]
        for position, letter in enumerate(word):
            table = self.transitions.get(letter)
            if table is None:
                raise UserError(
                    f"DFA.run: letter {letter!r} at position {position} of the word is not in the "
                    f"alphabet {list(self.alphabet)}."
                )
            states.append(table[states[-1]])
        return states

    def accepts(self, word: Iterable[str]) -> bool:
        """Whether the word ends in an accepting state."""
        return self.run(word)[-1] in self.accepting

    def run_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """The states after every token, (B, T), for words given as indices into the alphabet, (B, T)."""
        tokens = np.asarray(tokens)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < len(self.alphabet):
            raise UserError(
                f"DFA.run_tokens: a token is outside 0 to {len(self.alphabet) - 1}, the alphabet's places."
            )
        table = np.array([self.transitions[letter] for letter in self.alphabet]).reshape(-1, self.n_states)
        states = np.empty(tokens.shape, dtype=np.int64)
        here = np.full(tokens.shape[0], self.start)
        for t in range(tokens.shape[1]):
            here = states[:, t] = table[tokens[:, t], here]
        return states

    def reachable(self) -> list[int]:
        """The states that some word reaches, in breadth-first order from the start."""
        order, seen = [self.start], {self.start}
        for q in order:
            for table in self.transitions.values():
                if table[q] not in seen:
                    seen.add(table[q])
                    order.append(table[q])
        return order

    def trimmed(self) -> "DFA":
        """The reachable part, its states numbered in breadth-first order (so the start is 0)."""
        return self.quotient({q: i for i, q in enumerate(self.reachable())})

    def minimal(self) -> "DFA":
        """The minimal automaton of the same language; languages are equal iff their minimal automata are."""
        trimmed = self.trimmed()
        return trimmed.quotient(_hopcroft(trimmed)).trimmed()

    def quotient(self, block_of: Mapping[int, int]) -> "DFA":
        """Merge the states with equal `block_of`; states without an entry are dropped."""
        tables = {letter: [0] * (max(block_of.values()) + 1) for letter in self.alphabet}
        for q, block in block_of.items():
            for letter in self.alphabet:
                tables[letter][block] = block_of[self.transitions[letter][q]]
        accepting = {block_of[q] for q in self.accepting if q in block_of}
        return DFA(self.alphabet, tables, block_of[self.start], sorted(accepting))

    def is_permutation(self, letter: str) -> bool:
        """Whether the letter moves no two states to the same one."""
        return len(set(self.transitions[letter])) == self.n_states

    def to_json(self) -> str:
        """The automaton as JSON text, the form `from_json` and `load` read."""
        record = {
            "alphabet": list(self.alphabet),
            "transitions": {letter: list(table) for letter, table in self.transitions.items()},
            "start": self.start,
            "accepting": sorted(self.accepting),
        }
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> "DFA":
        """Read the text of `to_json`; null in a table stands for a missing move."""
        try:
            record = json.loads(text)
        except (json.JSONDecodeError, TypeError, RecursionError) as error:
            raise UserError(f"DFA.from_json: the text is not JSON: {error}.") from error
        fields = ("alphabet", "transitions", "start", "accepting")
        if not isinstance(record, dict) or sorted(record) != sorted(fields):
            names = ", ".join(sorted(map(str, record))) if isinstance(record, dict) else type(record).__name__
            found = names or "none of them"
            raise UserError(f"DFA.from_json: expected an object with {', '.join(fields)}; found {found}.")
        if not isinstance(record["transitions"], dict) or not isinstance(record["accepting"], list):
            raise UserError("DFA.from_json: expected transitions as an object and accepting as a list.")
        return cls(**record)

    def save(self, path: str | Path) -> None:
        """Write the automaton to a JSON file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "DFA":
        """Read an automaton from a JSON file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"DFA.load: {path} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise UserError(f"DFA.load: {path} is not a text file in UTF-8.") from error

    def to_dot(self) -> str:
        """Graphviz source of the automaton."""
        from statetrack.automata.drawing import dfa_to_dot

        return dfa_to_dot(self)

    def to_svg(self) -> str:
        """A self-contained SVG drawing, made without Graphviz."""
        from statetrack.automata.drawing import dfa_to_svg

        return dfa_to_svg(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DFA) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        ends = f"start {self.start}, accepting {sorted(self.accepting)}"
        return f"DFA({self.n_states} states over {list(self.alphabet)}, {ends})"


def checked_alphabet(alphabet: Iterable[str]) -> tuple[str, ...]:
    """The letters as a tuple; they must be non-empty strings, each given once."""
    if not isinstance(alphabet, Iterable):
        raise UserError(
            f"DFA: the alphabet is {alphabet!r}, expected the letters as a string or a list of strings."
        )
    letters = tuple(alphabet)
    for letter in letters:
        if not isinstance(letter, str) or not letter:
            raise UserError(f"DFA: letter {letter!r} is not a non-empty string.")
    for letter, times in Counter(letters).items():
        if times > 1:
            raise UserError(f"DFA: letter {letter!r} is in the alphabet {times} times.")
    return letters


def _count_states(alphabet, transitions, start, accepting) -> int:
    if not isinstance(transitions, Mapping):
        raise UserError(
            f"DFA: transitions is a {type(transitions).__name__}, expected letter -> list of next states."
        )
    for letter in alphabet:
        if letter not in transitions:
            raise UserError(f"DFA: letter {letter!r} has no row in transitions; use None for missing moves.")
    letters = set(alphabet)
    for letter, row in transitions.items():
        if letter not in letters:
            raise UserError(
                f"DFA: transitions has a row for {letter!r}, which is not in the alphabet {list(alphabet)}."
            )
        if isinstance(row, Mapping) or not all(hasattr(row, a) for a in ("__len__", "__getitem__")):
            raise UserError(f"DFA: the row of letter {letter!r} is {row!r}, expected a list of states.")
    lengths = {letter: len(transitions[letter]) for letter in alphabet}
    if len(set(lengths.values())) > 1:
        raise UserError(
            f"DFA: the rows of transitions differ in length: {lengths}. Each needs one entry per state."
        )
    if lengths:
        n = next(iter(lengths.values()))
        if n == 0:
            raise UserError("DFA: the rows of transitions are empty; an automaton has at least one state.")
        return n
    # Without letters, the number of states follows from the states that are named.
    return 1 + max([0, *(whole_number(q) or 0 for q in [start, *accepting])])


def _checked_table(letter: str, table: Sequence[int | None], n: int) -> list[int | None]:
    return [
        None if q is None else _checked_state(q, n, f"the move of state {i} on letter {letter!r}")
        for i, q in enumerate(table)
    ]


def _checked_state(q: object, n: int, what: str) -> int:
    number = whole_number(q)
    if number is None or not 0 <= number < n:
        raise UserError(f"DFA: {what} is {q!r}, expected a state from 0 to {n - 1}.")
    return number


def _hopcroft(dfa: DFA) -> dict[int, int]:
    """State -> block of the coarsest partition that acceptance and the letters respect (Hopcroft 1971)."""
    preimages = []
    for table in dfa.transitions.values():
        sources: list[list[int]] = [[] for _ in range(dfa.n_states)]
        for q, target in enumerate(table):
            sources[target].append(q)
        preimages.append(sources)
    blocks = [b for b in (set(dfa.accepting), set(range(dfa.n_states)) - dfa.accepting) if b]
    block_of = {q: i for i, block in enumerate(blocks) for q in block}
    waiting = {(i, a) for i in range(len(blocks)) for a in range(len(preimages))}
    while waiting:
        splitter, a = waiting.pop()
        touched: dict[int, set[int]] = {}
        for target in tuple(blocks[splitter]):
            for q in preimages[a][target]:
                touched.setdefault(block_of[q], set()).add(q)
        for i, inside in touched.items():
            if len(inside) == len(blocks[i]):
                continue
            # The smaller half gets the new number, so every state is renumbered at most log n times.
            small = inside if 2 * len(inside) <= len(blocks[i]) else blocks[i] - inside
            blocks[i] -= small
            blocks.append(small)
            new = len(blocks) - 1
            for q in small:
                block_of[q] = new
            for letter in range(len(preimages)):
                # Whether or not block i is still waiting, its new half must be processed for this letter.
                waiting.add((new, letter))
    return block_of
