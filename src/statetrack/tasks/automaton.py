"""Any automaton as a task: in which state is it after each letter?"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from statetrack.automata.dfa import DFA
from statetrack.errors import UserError, unknown_name
from statetrack.ops.automaton_run import run_automaton
from statetrack.tasks.task import Batch, Task, labelled_up_to

WORDS = ("uniform", "live")
PREFIXES = ("regex:", "dfa:", "group:")


@dataclass(frozen=True)
class Automaton(Task):
    """After each letter, which state is the automaton in? Tokens: letters in alphabet order, then BOS.

        even number of a's: a swaps the states 0 and 1, b keeps them; a = 0, b = 1, BOS = 2
        inputs   2  0  1  0  0
        targets  0  1  1  0  1

    `automaton` is the JSON text of `DFA.to_json`, so a spec is self-contained. `words` selects how letters
    are drawn. "uniform": independently and uniformly. In a language such as (ab|ba)* nearly every long
    uniform word ends in the sink, and always answering "sink" is almost always right. "live": letters after
    which acceptance is still open (some continuation is accepted, another is not); half of the words to the
    end, the others up to a random position, after which they are uniform.
    """

    automaton: str  # as JSON, which `DFA.to_json` writes
    # how letters are drawn: uniformly, or such that acceptance stays open
    words: Literal["uniform", "live"] = "uniform"

    labels = "dense"
    train_lengths = (32, 32)
    eval_lengths = (32, 64, 128, 256)

    def __post_init__(self):
        if self.words not in WORDS:
            raise unknown_name("Automaton: words", self.words, WORDS)
        if not self.dfa.alphabet:
            raise UserError("Automaton: the alphabet is empty, so there are no words to train on.")

    @classmethod
    def of(cls, dfa: DFA, words: Literal["uniform", "live"] = "uniform") -> "Automaton":
        """The task of tracking `dfa`."""
        return cls(dfa.to_json(), words)

    @property
    def dfa(self) -> DFA:
        return _read(self.automaton)

    @property
    def bos(self) -> int:
        """The token every sequence begins with; its label is the start state."""
        return len(self.dfa.alphabet)

    @property
    def vocab_size(self) -> int:
        return self.bos + 1

    @property
    def n_classes(self) -> int:
        return self.dfa.n_states

    @property
    def chance(self) -> float:
        return 1 / len(self.dfa.reachable())

    def fill(self, lengths: Tensor, generator: Generator, width: int | None = None) -> Batch:
        """Sequences (B, 1 + T): BOS, then T letters. All lengths are equal, as every position is labelled."""
        B, device = lengths.numel(), generator.device
        T = int(lengths[0]) if width is None else width
        letters = torch.randint(self.bos, (B, T), generator=generator, device=device)
        if self.words == "uniform":
            return labelled_up_to(lengths, self.label(letters))
        # Below T: the position from which the word is uniform; the other half stays live to the end.
        free_from = torch.randint(2 * T, (B,), generator=generator, device=device)
        chosen = torch.rand((B, T), generator=generator, device=device)
        tables, state = _tables(self.automaton, device), self._start(B, device)
        for t in range(T):
            count = tables.live_count[state]
            live = tables.live[state, (chosen[:, t] * count).long().clamp(max=count - 1)]
            letters[:, t] = torch.where(t < free_from, live, letters[:, t])
            state = tables.move[letters[:, t], state]
        return labelled_up_to(lengths, self.label(letters))

    def label(self, letters: Tensor) -> Batch:
        """The batch of given words, (B, T) indices into the alphabet."""
        states = run_automaton(_tables(self.automaton, letters.device).move, letters, self.dfa.start)
        bos, start = (torch.full_like(letters[:, :1], value) for value in (self.bos, self.dfa.start))
        return Batch(torch.cat([bos, letters], 1), torch.cat([start, states], 1))

    def _start(self, B: int, device: torch.device) -> Tensor:
        return torch.full((B,), self.dfa.start, device=device)


class _Tables(NamedTuple):
    move: Tensor  # (letters, states): the next state
    live: Tensor  # (states, letters): the letters that keep acceptance open, first
    live_count: Tensor  # (states,): their number; all letters where there is none


@lru_cache(maxsize=64)
def _read(text: str) -> DFA:
    return DFA.from_json(text)


@lru_cache(maxsize=16)
def _tables(text: str, device: torch.device) -> _Tables:
    dfa = _read(text)
    move = torch.tensor([dfa.transitions[letter] for letter in dfa.alphabet])
    opened = torch.zeros(dfa.n_states, dtype=torch.bool)
    opened[list(open_states(dfa))] = True
    keeps = opened[move].T
    keeps[~keeps.any(1)] = True
    live = keeps.int().argsort(dim=1, descending=True, stable=True)
    return _Tables(move.to(device), live.to(device), keeps.sum(1).to(device))


def open_states(dfa: DFA) -> set[int]:
    """The states from which one word leads to acceptance and another to rejection."""
    before: list[set[int]] = [set() for _ in range(dfa.n_states)]
    for table in dfa.transitions.values():
        for q, target in enumerate(table):
            before[target].add(q)

    def lead_to(goals: set[int]) -> set[int]:
        found, waiting = set(goals), list(goals)
        while waiting:
            new = before[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    accepting = set(dfa.accepting)
    return lead_to(accepting) & lead_to(set(range(dfa.n_states)) - accepting)


def automaton_task(name: str, alphabet: str | None = None) -> Automaton:
    """The task of "regex:(ab|ba)*" over an alphabet, of "dfa:FILE.json", or of "group:S5".

    "group:S5" has the five points as states and two generators as letters; the word problem, whose classes
    are the 120 permutations, is the task "s5".
    """
    kind, _, value = name.partition(":")
    if kind == "regex" and alphabet is None:
        raise UserError(f"task {name!r} needs its alphabet: --alphabet ab, or task(name, alphabet).")
    if kind != "regex" and alphabet is not None:
        raise UserError(f"task {name!r} brings its own alphabet; --alphabet belongs to regex: tasks only.")
    if kind == "regex":
        return Automaton.of(DFA.from_regex(value, alphabet or ""))
    return Automaton.of(DFA.load(value) if kind == "dfa" else DFA.from_group(value))
