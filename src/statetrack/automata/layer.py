"""One layer of a compiled network: Eq. 1 with explicit tables."""

from collections.abc import Callable
from typing import Literal

import numpy as np

from statetrack.automata.actions import Action, Factor, Permutation, Reflections, Reset

AnyAction = Action | Reflections
SymbolMeaning = tuple[int, tuple[int, ...], tuple[int, ...]]  # a letter, states before it, states after it


class Layer:
    """H_t = A(x_t) H_{t-1} + B(x_t), y_t = dec(H_t, x_t), where inputs and outputs are numbered symbols.

    `act(x)` is the action of symbol x on the state, `emit(x, s)` the output symbol when `dec` reads s.
    The reading is the label of the codebook row with the largest score, codebook @ h + bias; a layer that
    reads "previous" is one-hot and reads the state before the token, which after a reset is the largest
    coordinate of h - e_target = eps h_old, and after a permutation the preimage of the current state.

    To tabulate the layer for all words: `may_be(x, s)` is False where s is never read under x, and
    `land(x, c)` is the automaton's state when the last layer is in c after x (-1 if it never is). `about(x)`
    is the meaning of a cascade's symbol: the letter, and the states possible before and after it.
    """

    def __init__(
        self,
        H0: np.ndarray,
        act: Callable[[int], AnyAction],
        emit: Callable[[int, int], int],
        *,
        may_be: Callable[[int, int], bool] = lambda x, s: True,
        land: Callable[[int, int], int] | None = None,
        about: Callable[[int], SymbolMeaning | None] = lambda x: None,
        codebook: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        labels: list[int] | None = None,
        reads: Literal["current", "previous"] = "current",
        name: str = "",
    ):
        self.size, self.H0, self.reads, self.name = len(H0), H0, reads, name
        self.one_hot = codebook is None
        self.codebook = np.eye(self.size) if codebook is None else codebook
        self.bias = np.zeros(len(self.codebook)) if bias is None else bias
        self.labels = np.arange(len(self.codebook)) if labels is None else np.array(labels)
        self.actions: list[AnyAction] = []
        self._act, self._emit = act, emit
        self.may_be, self.land, self.about = may_be, land, about
        self._action_id: dict[AnyAction, int] = {}
        self._by_input: dict[int, int] = {}
        self._by_reading: dict[int, int] = {}

    def action_id(self, x: int) -> int:
        """The index of the action of symbol x; equal actions share an index."""
        if x not in self._by_input:
            action = self._act(x)
            if action not in self._action_id:
                self._action_id[action] = len(self.actions)
                self.actions.append(action)
            self._by_input[x] = self._action_id[action]
        return self._by_input[x]

    def describe(self, x: int) -> str:
        """A symbol in words."""
        meaning = self.about(x)
        if meaning is None:
            return str(x)
        sets = [",".join(map(str, states)) for states in meaning[1:]]
        return f"letter {meaning[0]}, {{{sets[0]}}} to {{{sets[1]}}}"

    def A(self, x: int) -> np.ndarray:
        """The transition matrix of symbol x."""
        return self.actions[self.action_id(x)].A()

    def B(self, x: int) -> np.ndarray:
        """What symbol x adds to the state."""
        return self.actions[self.action_id(x)].B()

    def factors(self, x: int) -> list[Factor]:
        """A(x) as generalised Householder factors; their product, left to right, is A(x)."""
        return self.actions[self.action_id(x)].factors()

    def run(self, inputs: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """The states H_1, ..., H_T, (T, n), every operation rounded to `dtype`."""
        h = self.H0.astype(dtype)
        states = np.empty((len(inputs), self.size), dtype=dtype)
        for t, i in enumerate(self._lookup(inputs, self.action_id).tolist()):
            h = self.actions[i].apply(h)
            states[t] = h
        return states

    def read(self, states: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        """What `dec` reads off each state: the current or the previous state of the level."""
        states = states.astype(np.float64)
        scores = states if self.one_hot else states @ self.codebook.T + self.bias
        current = self.labels[scores.argmax(axis=1)]
        if self.reads == "current":
            return current
        previous = np.empty_like(current)
        ids = self._lookup(inputs, self.action_id)
        for i in np.unique(ids):
            here, action = np.flatnonzero(ids == i), self.actions[i]
            if isinstance(action, Permutation):
                previous[here] = np.array(action.inverse())[current[here]]
            elif isinstance(action, Reset):
                left = states[here]
                left[:, action.target] -= 1
                previous[here] = left.argmax(axis=1)
        return previous

    def emit(self, x: int, reading: int) -> int:
        """The symbol for the next layer, or the automaton's state after the last one."""
        key = x * self.reading_range + reading
        if key not in self._by_reading:
            self._by_reading[key] = self._emit(x, reading)
        return self._by_reading[key]

    @property
    def reading_range(self) -> int:
        """Readings are numbers below this."""
        return int(self.labels.max()) + 1

    def outputs(self, states: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        """dec along a sequence."""
        keys = inputs * self.reading_range + self.read(states, inputs)
        return self._lookup(keys, lambda key: self.emit(*divmod(key, self.reading_range)))

    def dec(self, h: np.ndarray, x: int) -> int:
        """dec(H_t, x_t) of Eq. 1 for one token."""
        return int(self.outputs(h[None], np.array([x]))[0])

    @staticmethod
    def _lookup(keys: np.ndarray, function: Callable[[int], int]) -> np.ndarray:
        unique, inverse = np.unique(keys, return_inverse=True)
        return np.array([function(key) for key in unique.tolist()], dtype=np.int64)[inverse]
