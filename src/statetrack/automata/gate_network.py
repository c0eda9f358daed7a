"""Automata to stacks of diagonal layers on `gated_linear_attention`: signs, and turns of the unit circle.

Every level of the cascade (`cyclic_cascade.py`) is one number h with the gate a and the write w of its token:

    h_t = a_t h_{t-1} + w_t        a = exp(2 pi i s / p), w = 0        adds s modulo p
                                   a = eps, w = exp(2 pi i c / p)      resets to c

The number modulo p is read off the direction of h, the one before a reset off that of h - w = eps h_old.
What resets leave behind sums up to at most eps / (1 - eps), less than the distance sin(pi / p) at which a
direction is read wrongly. With p = 2 every gate is 1, -1 or eps and h is real: a layer with eigenvalues in
[-1,1]. Without groups no gate is negative.
"""

import math
from collections.abc import Iterable
from typing import Literal, cast

import torch
from torch import Tensor, nn

from statetrack.automata.compiler import CompiledLRNN, cascade_layers
from statetrack.automata.cyclic_cascade import CyclicCascade, Turn, Write
from statetrack.automata.dfa import DFA
from statetrack.automata.tables import LevelTables
from statetrack.errors import UserError, unknown_name
from statetrack.ops.gated_linear_attention import gated_linear_attention

GateRange = Literal["[0,1]", "[-1,1]", "unit-circle"]
RANGES: tuple[GateRange, ...] = ("[0,1]", "[-1,1]", "unit-circle")


class GateLevel(nn.Module):
    """One diagonal layer with one number: gates, angles and writes by token, and how to read it."""

    gate: Tensor
    angle: Tensor
    write: Tensor
    reset: Tensor
    shift: Tensor
    modulus: Tensor
    old_modulus: Tensor
    action_of: Tensor
    table: Tensor
    start: Tensor

    def __init__(self, tables: LevelTables, first: complex, turning: bool, dtype: torch.dtype):
        super().__init__()
        actions = [action for action in tables.layer.actions if isinstance(action, Turn | Write)]
        largest = max(2, *(action.modulus for action in actions))
        eps = 0.25 if largest == 2 else 2.0 ** math.floor(math.log2(math.sin(math.pi / largest) / 3))
        self.width = 2 if turning else 1  # channels of h: real and imaginary part
        gates, angles, writes = [], [], []
        for action in actions:
            turn = 2 * math.pi * action.shift / action.modulus if isinstance(action, Turn) else 0.0
            flips = not turning and isinstance(action, Turn) and action.shift == 1
            gates.append(eps if isinstance(action, Write) else -1.0 if flips else 1.0)
            angles.append([turn])
            writes.append(_root(action.target, action.modulus) if isinstance(action, Write) else 0j)
        numbers = {"gate": torch.tensor(gates, dtype=dtype), "angle": torch.tensor(angles, dtype=dtype)}
        numbers |= {"write": self._parts(writes, dtype), "start": self._parts([first], dtype)}
        shifts = [action.shift if isinstance(action, Turn) else 0 for action in actions]
        old = [a.modulus if isinstance(a, Turn) else a.old_modulus for a in actions]
        numbers |= {
            "reset": torch.tensor([isinstance(action, Write) for action in actions]),
            "shift": torch.tensor(shifts),
            "modulus": torch.tensor([action.modulus for action in actions]),
            "old_modulus": torch.tensor(old),
            "action_of": torch.tensor(tables.action_of),
            "table": torch.tensor(tables.table),
        }
        for name, value in numbers.items():
            self.register_buffer(name, value)

    def _parts(self, values: list[complex], dtype: torch.dtype) -> Tensor:
        return torch.tensor([[z.real, z.imag][: self.width] for z in values], dtype=dtype)

    def forward(self, symbols: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        """Symbols (B, T) -> the numbers after and before each of them, (B, T)."""
        (B, T), K = symbols.shape, self.width
        action = self.action_of[symbols]
        # One head per channel reads it: heads have equal states and different queries.
        keys = self.write[action][:, :, None].expand(B, T, K, K)
        q = torch.eye(K, dtype=keys.dtype, device=keys.device).expand(B, T, K, K)
        o, _ = gated_linear_attention(
            q,
            keys,
            keys.new_ones(B, T, K, 1),
            a=self.gate[action][:, :, None].expand(B, T, K),
            angle=self.angle[action][:, :, None].expand(B, T, K, 1) if K == 2 else None,
            scale=1.0,
            initial_state=self.start[:, None, :, None].expand(B, K, K, 1),
            backend=backend,
        )
        h = o[..., 0]
        after = _nearest(h, self.modulus[action])
        before = _nearest(h - self.write[action], self.old_modulus[action])
        return after, torch.where(
            self.reset[action], before, (after - self.shift[action]) % self.modulus[action]
        )


class GateNetwork(nn.Module):
    """Diagonal layers that track every state of `dfa` at any length; made by `compile_gates`.

    Tokens (B, T), indices into the alphabet -> the states after every token, (B, T). `gates` is the set of
    gates in use: "[0,1]", "[-1,1]" or "unit-circle". Signs are exact at any length. Turns are exact up to the
    rounding of the angles, which adds up between resets.
    """

    original: Tensor

    def __init__(self, dfa: DFA, cascade: CyclicCascade | None, dtype: torch.dtype, backend: str):
        super().__init__()
        self.dfa, self.backend, self.levels = dfa, backend, nn.ModuleList()
        self.register_buffer("original", torch.tensor(dfa.reachable()))
        self.gates: GateRange = "[0,1]"
        if cascade is None:
            return
        layers = cascade_layers(cascade, len(dfa.alphabet))
        compiled = CompiledLRNN(dfa, "cyclic", "float64", layers)
        everything = compiled.tables()
        used = [a for t in everything for a in t.layer.actions if isinstance(a, Turn) and a.shift]
        if used:
            self.gates = "[-1,1]" if max(a.modulus for a in used) == 2 else "unit-circle"
        context = cascade.top
        for i, tables in enumerate(everything):
            first, moduli = cascade.start[i], [a.modulus for a in tables.layer.actions]  # type: ignore[union-attr]
            number = _root(first, cascade.modulus(i, context))
            self.levels.append(GateLevel(tables, number, max(moduli) > 2, dtype))
            context = cascade.refine(i, context, first)

    def forward(self, tokens: Tensor) -> Tensor:
        if not len(self.levels):
            return torch.full_like(tokens, self.dfa.start)
        symbols, states = tokens, tokens
        for i, level in enumerate(cast(list[GateLevel], list(self.levels))):
            after, before = level(symbols, self.backend)
            last = i == len(self.levels) - 1
            read = level.table[symbols, after if last else before]
            symbols, states = read, read
        return states

    @torch.no_grad()
    def states(self, word: Iterable[str]) -> list[int]:
        """The automaton's states along the word, decoded from the layers; `dfa.run` gives the true ones."""
        place = {letter: i for i, letter in enumerate(self.dfa.alphabet)}
        tokens = torch.tensor([[place[letter] for letter in word]], dtype=torch.int64)
        return [self.dfa.start, *self(tokens)[0].tolist()]

    @property
    def layers(self) -> int:
        """The number of diagonal layers."""
        return len(self.levels)


def compile_gates(
    dfa: DFA,
    eigenvalues: GateRange = "unit-circle",
    *,
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
) -> GateNetwork:
    """The weights of diagonal layers, on `gated_linear_attention`, that track `dfa`.

        compile_gates(DFA.from_regex("(b*ab*a)*b*", "ab"), "[-1,1]").states("abba")

    They exist in [0,1] if there are no groups inside (of a minimal automaton: the language is star-free), in
    [-1,1] if all groups inside are 2-groups, and on the unit circle if they are solvable; otherwise this is
    an error (docs/theory.md). States that the language does not tell apart count: `dfa.minimal()` has none.
    """
    if eigenvalues not in RANGES:
        raise unknown_name("compile_gates: eigenvalues", eigenvalues, RANGES)
    machine = dfa.trimmed()
    cascade = None if machine.n_states == 1 or not machine.alphabet else CyclicCascade(machine)
    network = GateNetwork(dfa, cascade, dtype, backend)
    if RANGES.index(network.gates) > RANGES.index(eigenvalues):
        raise UserError(
            f"compile_gates: gates in {eigenvalues} are not enough, the groups inside need {network.gates}. "
            + _why(dfa)
        )
    return network


def _why(dfa: DFA) -> str:
    """What to do about groups that the gates cannot track."""
    if dfa.minimal().n_states < dfa.trimmed().n_states:
        return "The automaton is not minimal: dfa.minimal() may need less."
    return "`statetrack explain` says why."


def _root(c: int, modulus: int) -> complex:
    """exp(2 pi i c / modulus), exact for signs."""
    if 2 * c % modulus == 0:
        return complex(1 if c == 0 else -1)
    return complex(math.cos(2 * math.pi * c / modulus), math.sin(2 * math.pi * c / modulus))


def _nearest(h: Tensor, modulus: Tensor) -> Tensor:
    """The c whose root of unity exp(2 pi i c / modulus) has the direction nearest to that of h."""
    imaginary = h[..., 1] if h.shape[-1] == 2 else torch.zeros_like(h[..., 0])
    turns = torch.atan2(imaginary.double(), h[..., 0].double()) / (2 * math.pi)
    return (turns * modulus).round().long() % modulus
