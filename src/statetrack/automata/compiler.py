"""Automata to exact linear RNNs: Theorems 3 and 4 and Appendix D as constructions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from statetrack.automata.cascade import Cascade, ExcludedState
from statetrack.automata.dfa import DFA
from statetrack.automata.group_layers import (
    choose_representation,
    cyclic_layers,
    group_layers,
    reflection_layers,
)
from statetrack.automata.holonomy import HOLONOMY_CAP, Holonomy, TooManyImages
from statetrack.automata.layer import Layer, SymbolMeaning
from statetrack.automata.numbers import dtype_name
from statetrack.errors import UserError, unknown_name

if TYPE_CHECKING:
    from statetrack.automata.module import CompiledModule
    from statetrack.automata.tables import LevelTables

STRATEGIES = ("auto", "group", "cyclic", "reflections", "excluded", "holonomy")
DTYPES = ("float16", "float32", "float64")
AUTO_IMAGE_CAP = 20_000


@dataclass(frozen=True)
class LayerTrace:
    """One layer on one word: its input symbols, its states H_1..H_T (T, n), and its output symbols."""

    layer: Layer
    inputs: np.ndarray
    states: np.ndarray
    outputs: np.ndarray


class CompiledLRNN:
    """A linear RNN that tracks every state of `dfa`, exactly and at any length; made by `compile_dfa`.

        network = compile_dfa(DFA.from_regex("(ab|ba)*", "ab"))
        network.states("abba")     the states along the word, equal to dfa.run("abba")
        network.to_module()        the same network as an nn.Module, for batches and gradients

    The rotations of the strategies "cyclic" and "reflections" are exact in real arithmetic only; `horizon`
    measures how long they decode correctly in `dtype`. All other strategies use values that every dtype
    represents exactly. `representation` is "states", or for the strategy "group" the permutation of each
    letter.
    """

    def __init__(
        self,
        dfa: DFA,
        strategy: str,
        dtype: str,
        layers: list[Layer],
        representation: str | Mapping[str, Sequence[int]] = "states",
    ):
        self.dfa, self.strategy, self.dtype, self.layers = dfa, strategy, dtype, layers
        self.representation = representation
        # Layers number the reachable states in breadth-first order; users keep their own numbers.
        self.original = np.array(dfa.reachable())

    def trace(self, word: Iterable[str]) -> list[LayerTrace]:
        """Inputs, states and outputs of every layer on a word."""
        symbols = self.encode(word)
        traces = []
        for layer in self.layers:
            states = layer.run(symbols, np.dtype(self.dtype))
            traces.append(LayerTrace(layer, symbols, states, layer.outputs(states, symbols)))
            symbols = traces[-1].outputs
        return traces

    def states(self, word: Iterable[str]) -> list[int]:
        """The automaton's states along the word, decoded from the network; `dfa.run` gives the true ones."""
        word = list(word)
        traces = self.trace(word)
        numbers = traces[-1].outputs if traces else np.zeros(len(word), dtype=np.int64)
        return [self.dfa.start, *self.original[numbers].tolist()]

    def accepts(self, word: Iterable[str]) -> bool:
        """Whether the decoded last state accepts."""
        return self.states(word)[-1] in self.dfa.accepting

    def encode(self, word: Iterable[str]) -> np.ndarray:
        """The indices of the letters in the alphabet: the token ids of the module."""
        place = {letter: i for i, letter in enumerate(self.dfa.alphabet)}
        for position, letter in enumerate(word := list(word)):
            if letter not in place:
                raise UserError(
                    f"CompiledLRNN: letter {letter!r} at position {position} of the word is not in "
                    f"the alphabet {list(self.dfa.alphabet)}."
                )
        return np.array([place[letter] for letter in word], dtype=np.int64)

    def horizon(self, limit: int = 10_000) -> int | None:
        """The first step with a wrong decoded state, on words a^k and one random word; None if none is."""
        letters, rng = self.dfa.alphabet, np.random.default_rng(0)
        words = [[letter] * limit for letter in letters]
        words.append([letters[i] for i in rng.integers(len(letters), size=limit)] if letters else [])
        wrong = [np.flatnonzero(np.array(self.states(w)) != np.array(self.dfa.run(w))) for w in words]
        return min((int(found[0]) for found in wrong if len(found)), default=None)

    @property
    def householders(self) -> int:
        """The maximum number of factors of the actions so far; cascades add actions as words need them."""
        return max((len(a.factors()) for layer in self.layers for a in layer.actions), default=0)

    def tables(self, **limit: int) -> list["LevelTables"]:
        """Every layer as arrays, complete for all words: what a module or a web page needs to run it."""
        from statetrack.automata.tables import level_tables

        return level_tables(self, **limit)

    def to_module(self, *, backend: str = "auto", keys: str = "exact") -> "CompiledModule":
        """The same network as an nn.Module on `statetrack.ops.delta_rule`; see `CompiledModule`."""
        from statetrack.automata.module import CompiledModule

        return CompiledModule(self, backend=backend, keys=keys)

    def __repr__(self) -> str:
        sizes = [layer.size for layer in self.layers]
        return f"CompiledLRNN({self.strategy}, layer sizes {sizes}, {self.dtype}, {self.dfa!r})"


def compile_dfa(
    dfa: DFA,
    strategy: str = "auto",
    dtype: object = "float32",
    *,
    minimise: bool = False,
    representation: str | Mapping[str, Sequence[int]] = "states",
) -> CompiledLRNN:
    """The weights of a linear RNN that tracks `dfa`, by one of these strategies:

        group         one layer of permutation matrices (Theorem 3); `representation` is "states" (one-hot on
                      the states), "smallest" (the fewest points the group acts on faithfully, Theorem 3's
                      n), or your own letter -> permutation
        cyclic        one layer of 2 x 2 rotations, a scalar for Z_2 (Theorem 3)
        reflections   two layers, each with one reflection per token, for Z_m (Appendix D)
        excluded      |Q| - 1 layers, for every automaton (Theorem 4, corrected)
        holonomy      layers that permute only by groups inside the automaton; for star-free languages every
                      A is I or I/4
        auto          group if all letters permute the states, holonomy if the language is star-free, else
                      the cascade with fewer layers

    Every reachable state is tracked, including states that the minimal automaton would merge; with
    `minimise` the minimal automaton is compiled instead. `dtype` is a torch or numpy dtype or its name.

    >>> even = DFA("ab", {"a": [1, 0], "b": [0, 1]}, start=0, accepting=[0])     # an even number of a's
    >>> network = compile_dfa(even)
    >>> network.states("aba"), even.run("aba")
    ([0, 1, 1, 0], [0, 1, 1, 0])
    """
    if strategy not in STRATEGIES:
        raise unknown_name("compile_dfa: strategy", strategy, STRATEGIES)
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise unknown_name("compile_dfa: dtype", name, DTYPES)
    if minimise:
        dfa = dfa.minimal()
    machine = dfa.trimmed()
    if machine.n_states == 1 or not machine.alphabet:
        return CompiledLRNN(dfa, strategy, name, [])
    if strategy == "auto" and all(machine.is_permutation(letter) for letter in machine.alphabet):
        strategy = "group"
    builders = {"cyclic": cyclic_layers, "reflections": reflection_layers}
    if strategy in builders:
        return CompiledLRNN(dfa, strategy, name, builders[strategy](machine))
    if strategy == "group":
        chosen = choose_representation(machine, representation)
        return CompiledLRNN(dfa, strategy, name, group_layers(machine, chosen), chosen)
    strategy, cascade = _choose_cascade(machine, strategy)
    return CompiledLRNN(dfa, strategy, name, cascade_layers(cascade, len(machine.alphabet)))


def _choose_cascade(machine: DFA, strategy: str) -> tuple[str, Cascade]:
    if strategy == "excluded":
        return strategy, ExcludedState(machine)
    if strategy == "holonomy":
        return strategy, Holonomy(machine, HOLONOMY_CAP)
    excluded = ExcludedState(machine)
    try:
        holonomy = Holonomy(machine, AUTO_IMAGE_CAP)
    except TooManyImages:
        return "excluded", excluded
    star_free = not any(holonomy.images.generators(c) for c in holonomy.images.classes)
    sizes = [(len(c.sizes), sum(c.sizes)) for c in (holonomy, excluded)]
    return ("holonomy", holonomy) if star_free or sizes[0] <= sizes[1] else ("excluded", excluded)


class _Wiring:
    """The symbols (letter, context before, context after) of one level, numbered in order of appearance."""

    def __init__(self, cascade: Cascade, level: int, below: "_Wiring | None"):
        self.cascade, self.level, self.below = cascade, level, below
        self.symbols: list[tuple] = []
        self.index: dict[tuple, int] = {}

    def number(self, symbol: tuple) -> int:
        if symbol not in self.index:
            self.index[symbol] = len(self.symbols)
            self.symbols.append(symbol)
        return self.index[symbol]

    def act(self, x: int):
        letter, before, after = self.symbols[x]
        return self.cascade.action(self.level, letter, before, after)

    def emit(self, x: int, previous: int) -> int:
        letter, before, after = self.symbols[x]
        current = self.act(x)(previous)
        before = self.cascade.refine(self.level, before, previous)
        after = self.cascade.refine(self.level, after, current)
        if self.below is None:
            return self.cascade.state_of(after)
        return self.below.number((letter, before, after))

    def about(self, x: int) -> SymbolMeaning:
        letter, before, after = self.symbols[x]
        return letter, self.cascade.members(before), self.cascade.members(after)

    def may_be(self, x: int, previous: int) -> bool:
        return self.cascade.holds(self.level, self.symbols[x][1], previous)

    def land(self, x: int, current: int) -> int:
        after = self.symbols[x][2]
        if not self.cascade.holds(self.level, after, current):
            return -1
        return self.cascade.state_of(self.cascade.refine(self.level, after, current))


def cascade_layers(cascade: Cascade, n_letters: int) -> list[Layer]:
    """Theorem 4, with resets from which the previous state can still be read (see docs/theory.md)."""
    layers: list[Layer] = []
    below = None
    for level in range(len(cascade.sizes) - 1, -1, -1):
        below = _Wiring(cascade, level, below)
        H0 = np.eye(cascade.sizes[level])[cascade.start[level]]
        layers.append(
            Layer(
                H0,
                below.act,
                below.emit,
                may_be=below.may_be,
                land=below.land,
                about=below.about,
                reads="previous",
                name=f"level {level + 1}",
            )
        )
    for letter in range(n_letters):
        if below is not None:
            below.number((letter, cascade.top, cascade.top))
    return layers[::-1]
