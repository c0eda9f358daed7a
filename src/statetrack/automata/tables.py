"""A compiled network as arrays that cover all words."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from statetrack.automata.layer import Layer
from statetrack.errors import UserError

if TYPE_CHECKING:
    from statetrack.automata.compiler import CompiledLRNN

SYMBOL_CAP = 200_000


@dataclass(frozen=True)
class LevelTables:
    """One layer. The symbols of the first layer are the indices of the letters in the alphabet.

    `action_of[x]` is the index in `layer.actions` of the action of symbol x. Below the last layer,
    `table[x, reading]` is the next layer's symbol, where the reading is the level's current or previous state
    (`layer.reads`). In the last layer `table[x, c]` is the automaton's state when row c of the codebook wins,
    n_states where it cannot; it has a single row when the symbol does not matter.
    """

    layer: Layer
    action_of: np.ndarray
    table: np.ndarray
    last: bool


def level_tables(compiled: "CompiledLRNN", cap: int = SYMBOL_CAP) -> list[LevelTables]:
    """All layers of a compiled network; an error if a cascade has more than `cap` contexts."""
    found, n_symbols = [], len(compiled.dfa.alphabet)
    for i, layer in enumerate(compiled.layers):
        last = i == len(compiled.layers) - 1
        if last:
            table = _state_table(layer, n_symbols, compiled.original, compiled.dfa.n_states, cap)
        else:
            table = _next_table(layer, n_symbols, cap)
        actions = np.array([layer.action_id(x) for x in range(n_symbols)])
        found.append(LevelTables(layer, actions, table, last))
        n_symbols = int(table.max()) + 1
    return found


def _next_table(layer: Layer, n_symbols: int, cap: int) -> np.ndarray:
    """(symbol, reading) -> symbol of the next layer, for all symbols and readings that can occur."""
    _check_size(n_symbols * layer.reading_range, cap)
    table = np.zeros((n_symbols, layer.reading_range), dtype=np.int64)
    for x in range(n_symbols):
        for s in range(layer.reading_range):
            if layer.may_be(x, s):
                table[x, s] = layer.emit(x, s)
                _check_size(int(table[x, s]), cap)
    return table


def _state_table(layer: Layer, n_symbols: int, original: np.ndarray, n_states: int, cap: int) -> np.ndarray:
    """(symbol, codebook row) -> the automaton's state; one row if the symbol does not matter."""
    if layer.land is None:
        return original[layer.labels][None]
    _check_size(n_symbols * layer.size, cap)
    numbers = np.array([[layer.land(x, c) for c in range(layer.size)] for x in range(n_symbols)])
    return np.where(numbers < 0, n_states, original[numbers])


def _check_size(entries: int, cap: int) -> None:
    if entries > cap:
        raise UserError(
            f"tables: the cascade has more than {cap} combinations of letter and context, too "
            f"many to tabulate ahead. Try the strategy 'holonomy', or run words with `.states`, which "
            f"tabulates as it goes."
        )
