"""Cascades of permutation-reset automata: what Theorem 4 stacks as layers.

A cascade has levels. A level's state is a small integer c; its meaning depends on the context, the set of
states that the levels above have narrowed the automaton's state down to. For a letter a, let X be the context
before it and Y the context after it; at the top both are the set of all states. Every level permutes c or
resets it to a constant, as a function of (a, X, Y) alone, and then refines both contexts:

    c' = action(level, a, X, Y)[c]        X <- refine(level, X, c)        Y <- refine(level, Y, c')

so that X.a stays inside Y. After the last level one state is left in each context.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from statetrack.automata.actions import Action, Permutation, Reset
from statetrack.automata.dfa import DFA


class Cascade(Protocol):
    """The interface between a cascade and the compiler."""

    sizes: list[int]
    start: list[int]
    top: Any

    def action(self, level: int, letter: int, before, after) -> Action: ...

    def refine(self, level: int, context, c: int) -> Any: ...

    def holds(self, level: int, context, c: int) -> bool:
        """Whether c can be the level's state in this context."""
        ...

    def members(self, context) -> tuple[int, ...]:
        """The states of the automaton in a context."""
        ...

    def state_of(self, context) -> int: ...


def run_cascade(cascade: Cascade, word: list[int]) -> list[int]:
    """The automaton's states along a word, computed from the cascade alone (the slow definition)."""
    config, states = list(cascade.start), []
    for letter in [None, *word]:
        before = after = cascade.top
        for level, c in enumerate(config):
            if letter is not None:
                action = cascade.action(level, letter, before, after)
                config[level] = action(c)
            before = cascade.refine(level, before, c)
            after = cascade.refine(level, after, config[level])
        states.append(cascade.state_of(after))
    return states


@dataclass
class ExcludedState:
    """|Q| - 1 levels of sizes |Q|, ..., 2: level i names one more state that is not the current one.

    A context is a sorted tuple of n - i states. A letter that is injective on X relabels it; any other letter
    leaves a state y of Y outside X.a, which is excluded whatever was excluded before: a reset.
    """

    dfa: DFA

    def __post_init__(self):
        n = self.dfa.n_states
        self.tables = [self.dfa.transitions[letter] for letter in self.dfa.alphabet]
        self.sizes = list(range(n, 1, -1))
        self.top: tuple[int, ...] = tuple(range(n))
        # Exclude the last state that is not the start, level by level: the start is what remains.
        self.start, context = [], self.top
        for level in range(n - 1):
            c = len(context) - 1 - (context[-1] == self.dfa.start)
            self.start.append(c)
            context = self.refine(level, context, c)

    def action(self, level: int, letter: int, before: tuple[int, ...], after: tuple[int, ...]) -> Action:
        images = [self.tables[letter][q] for q in before]
        hit = set(images)
        if len(hit) == len(images):
            place = {q: i for i, q in enumerate(after)}
            return Permutation(tuple(place[q] for q in images))
        free = next(i for i, q in enumerate(after) if q not in hit)
        return Reset(len(before), free)

    def refine(self, level: int, context: tuple[int, ...], c: int) -> tuple[int, ...]:
        return context[:c] + context[c + 1 :]

    def holds(self, level: int, context: tuple[int, ...], c: int) -> bool:
        return c < len(context)

    def members(self, context: tuple[int, ...]) -> tuple[int, ...]:
        return context

    def state_of(self, context: tuple[int, ...]) -> int:
        return context[0]
