"""Compiled networks as plain data: JSON for a web page or another program, safetensors for our modules."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from statetrack.automata.actions import Permutation, Reset
from statetrack.automata.compiler import CompiledLRNN, compile_dfa
from statetrack.automata.dfa import DFA
from statetrack.automata.layer import AnyAction, SymbolMeaning
from statetrack.automata.module import CompiledModule
from statetrack.automata.tables import SYMBOL_CAP, LevelTables
from statetrack.errors import UserError
from statetrack.files import DamagedFile, load_tensors, save_tensors, write_json

NUMBERS_CAP = 4_000_000  # limit on the entries of matrices and tables in plain data
SUFFIXES = (".json", ".safetensors")


def network(compiled: CompiledLRNN, *, cap: int = SYMBOL_CAP, numbers: int = NUMBERS_CAP) -> dict[str, Any]:
    """Everything needed to run the network anywhere, as lists and numbers; see `docs/automata.md`.

    A level starts at H0. On symbol x (for the first level, the index of the letter) it computes h = A h + B
    with actions[action_of[x]], takes the row r with the largest codebook[r] . h + bias[r], and passes
    table[x][reading] on as the next level's symbol; the last level's table[x][r] is the automaton's state.
    """
    levels = compiled.tables(cap=cap)
    size = sum(t.table.size + len(t.layer.actions) * (t.layer.size + 2) * t.layer.size for t in levels)
    if size > numbers:
        raise UserError(
            f"network: its matrices and tables hold {size} numbers, more than {numbers}; save it as "
            f".safetensors instead, which keeps factors and not matrices."
        )
    dfa = compiled.dfa
    return {
        "strategy": compiled.strategy,
        "dtype": compiled.dtype,
        "dfa": json.loads(dfa.to_json()),
        "levels": [_level(tables, compiled) for tables in levels],
    }


def _level(tables: LevelTables, compiled: CompiledLRNN) -> dict[str, Any]:
    layer = tables.layer
    return {
        "name": layer.name,
        "size": layer.size,
        "reads": layer.reads,
        "H0": numbers_of(layer.H0),
        "codebook": numbers_of(layer.codebook),
        "bias": numbers_of(layer.bias),
        "labels": layer.labels.tolist(),
        "actions": [_action(action) for action in layer.actions],
        "action_of": tables.action_of.tolist(),
        "table": tables.table.tolist(),
        "last": tables.last,
        "contexts": [_context(layer.about(x), compiled) for x in range(len(tables.action_of))],
    }


def _context(meaning: SymbolMeaning | None, compiled: CompiledLRNN) -> list[list[int]] | None:
    """The automaton's states possible before and after a symbol, by their own numbers."""
    if meaning is None:
        return None
    return [sorted(compiled.original[list(states)].tolist()) for states in meaning[1:]]


def _action(action: AnyAction) -> dict[str, Any]:
    """A and B, the factors of A in the order they are applied, and how `dec` reads the previous state."""
    A = action.A()
    spectrum = np.linalg.eigvals(A)
    return {
        "A": numbers_of(A),
        "B": numbers_of(action.B()),
        "factors": [
            {"beta": f.beta, "key": numbers_of(f.key), "value": f.value} for f in reversed(action.factors())
        ],
        "eigenvalues": [[round(z.real, 9) + 0.0, round(z.imag, 9) + 0.0] for z in spectrum.tolist()],
        "reset": action.target if isinstance(action, Reset) else None,
        "inverse": list(action.inverse()) if isinstance(action, Permutation) else None,
        "text": describe_action(action),
    }


def numbers_of(array: np.ndarray) -> Any:
    """Nested lists with integral values as integers: half the size, and exact."""
    if array.ndim > 1:
        return [numbers_of(row) for row in array]
    return [int(x) if x == int(x) else float(x) for x in array.tolist()]


def describe_action(action: AnyAction) -> str:
    """What an action does to the level's state, in words."""
    if isinstance(action, Reset):
        return f"resets to {action.target}"
    if not isinstance(action, Permutation):
        n = len(action.factors())
        return "keeps the state" if n == 0 else "reflects once" if n == 1 else f"rotates by {n} reflections"
    parts, seen = [], set()
    for first in range(action.size):
        cycle, point = [], first
        while point not in seen:
            seen.add(point)
            cycle.append(point)
            point = action(point)
        if len(cycle) > 1:
            parts.append("(" + " ".join(map(str, cycle)) + ")")
    if not parts:
        return "keeps the state"
    return "permutes " + "".join(parts if len(parts) < 7 else [*parts[:6], "..."])


def save_network(compiled: CompiledLRNN, path: str | Path) -> None:
    """Write the network: as plain data to a .json file, as the module's weights to a .safetensors file."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise UserError(f"compile: --out is {path}, expected a file that ends in .json or .safetensors.")
    if path.suffix == ".json":
        write_json(path, network(compiled))
        return
    metadata = {
        "dfa": compiled.dfa.to_json(),
        "strategy": compiled.strategy,
        "dtype": compiled.dtype,
        "representation": json.dumps(compiled.representation),
    }
    save_tensors(path, compiled.to_module().state_dict(), metadata)


def load_network(path: str | Path) -> CompiledModule:
    """The module in a .safetensors file of `save_network`, with its weights as saved (or fine-tuned)."""
    try:
        tensors, metadata = load_tensors(Path(path))
        # Files without this entry hold networks on the states.
        representation = json.loads(metadata.get("representation", '"states"'))
        dfa = DFA.from_json(metadata["dfa"])
        compiled = compile_dfa(dfa, metadata["strategy"], metadata["dtype"], representation=representation)
        module = compiled.to_module()
        module.load_state_dict(tensors)
    except (OSError, DamagedFile, KeyError, RuntimeError, json.JSONDecodeError) as error:
        raise UserError(f"load_network: {path} holds no compiled network: {error}") from error
    return module


def read_word(text: str, alphabet: Iterable[str]) -> list[str]:
    """A word as people type it: letters one after the other, or set apart by spaces, commas or dots."""
    letters = set(alphabet)
    lengths = sorted({len(letter) for letter in letters}, reverse=True)
    word, at = [], 0
    while at < len(text):
        letter = next((text[at : at + n] for n in lengths if text[at : at + n] in letters), None)
        if letter is not None:
            word.append(letter)
        elif text[at] not in " ,.":
            raise UserError(f"word: no letter of {sorted(letters)} begins at position {at} of {text!r}.")
        at += len(letter) if letter is not None else 1
    return word
