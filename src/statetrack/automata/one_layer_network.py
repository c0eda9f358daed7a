"""One diagonal layer on `gated_linear_attention` that holds what `holding` found, and reads it back.

For a set A of letters, a letter y outside it (or the beginning) and a letter a of A there is one number h,

    h -> exp(2 pi i / n) h    on a              h -> h               on other letters of A
    h -> eps h + 1            on y              h -> eps h           on other letters outside A

so that the digit of eps^j in h is 0 if the j-th last letter outside A is not y, and else the root of unity
whose exponent is the number of a's since then, modulo n.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from statetrack.automata.dfa import DFA
from statetrack.automata.gate_network import RANGES, GateRange
from statetrack.automata.one_layer import Entry, Features, Holding, holding
from statetrack.errors import UserError, unknown_name
from statetrack.ops.gated_linear_attention import gated_linear_attention

Channel = tuple[int, int, int]  # index of the set, the letter y (-1: the beginning), the letter a (-1: none)


class OneLayerNetwork(nn.Module):
    """One diagonal layer that tracks the minimal automaton of `dfa`; made by `compile_one_layer`.

    Tokens (B, T), indices into the alphabet -> the numbers h that the layer holds, (B, T, channels, 1 or 2).
    """

    gate: Tensor
    angle: Tensor
    write: Tensor
    start: Tensor

    def __init__(self, dfa: DFA, held: Holding, states: dict[Features, int], backend: str):
        super().__init__()
        self.dfa, self.held, self.backend, self.by_features = dfa, held, backend, states
        self.channels: list[Channel] = []
        letters = range(max(held.number, default=-1) + 1)
        for i, inside in enumerate(held.sets):
            counted = sorted(inside) if held.order > 1 and inside else [-1]
            outside = [-1, *(y for y in letters if y not in inside)]
            self.channels += [(i, y, a) for y in outside for a in counted]
        turning = held.order > 2
        apart = 0.5 if held.order <= 2 else min(0.5, math.sin(math.pi / held.order))
        self.eps = 2.0 ** math.floor(math.log2(apart / 3))
        self.width = 2 if turning else 1
        steps = [[self._step(number, channel) for channel in self.channels] for number in held.number]
        gate, turn, write = (torch.tensor([[s[i] for s in row] for row in steps]) for i in range(3))
        self.register_buffer("gate", gate if turning else gate * torch.where(turn != 0, -1.0, 1.0))
        self.register_buffer("angle", turn)
        self.register_buffer("write", write)
        self.register_buffer("start", torch.tensor([float(y < 0) for _, y, _ in self.channels]))

    def _step(self, number: int, channel: Channel) -> tuple[float, float, float]:
        """The gate, the angle and the write of a letter in a channel."""
        place, y, a = channel
        if number < 0:
            return 1.0, 0.0, 0.0
        if number in self.held.sets[place]:
            return 1.0, 2 * math.pi / self.held.order if number == a else 0.0, 0.0
        return self.eps, 0.0, float(number == y)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> h of every channel, (B, T, channels, 1 or 2), the second its imaginary part."""
        (B, T), K, C = tokens.shape, self.width, len(self.channels)
        first = torch.eye(K)[0]
        # One head per channel and part: heads of a channel have equal states and different queries.
        gate, angle, write = (x[tokens].repeat_interleave(K, 2) for x in (self.gate, self.angle, self.write))
        o, _ = gated_linear_attention(
            torch.eye(K).repeat(C, 1).expand(B, T, -1, -1),
            write[..., None] * first,
            torch.ones(B, T, C * K, 1),
            a=gate,
            angle=angle[..., None] if K == 2 else None,
            scale=1.0,
            initial_state=(self.start.repeat_interleave(K)[:, None] * first)[None, :, :, None].expand(
                B, -1, -1, -1
            ),
            backend=self.backend,
        )
        return o[..., 0].unflatten(2, (C, K))

    @torch.no_grad()
    def states(self, word: Iterable[str]) -> list[int]:
        """The states of the minimal automaton along the word, read off the layer."""
        place = {letter: i for i, letter in enumerate(self.dfa.alphabet)}
        tokens = torch.tensor([[place[letter] for letter in word]], dtype=torch.int64)
        digits = self._digits(self(tokens)[0]).tolist()
        return [self.dfa.start, *(self.by_features[self._features(row)] for row in digits)]

    def _digits(self, h: Tensor) -> Tensor:
        """h (T, channels, 1 or 2) -> (T, channels, depth): the root's exponent at every depth, -1 for 0."""
        z = torch.complex(
            h[..., 0].double(), h[..., 1].double() if self.width == 2 else h[..., 0].double() * 0
        )
        n, digits = self.held.order, []
        for _ in range(self.held.depth):
            exponent = (z.angle() * n / (2 * math.pi)).round().long() % n
            digit = torch.where(z.abs() < 0.5, -1, exponent)
            root = torch.polar(torch.ones_like(z.real), 2 * math.pi * exponent.double() / n)
            z = (z - torch.where(digit < 0, torch.zeros_like(z), root)) / self.eps
            digits.append(digit)
        return torch.stack(digits, -1)

    def _features(self, digits: list[list[int]]) -> Features:
        found: list[list[Entry]] = [[] for _ in self.held.sets]
        for place, inside in enumerate(self.held.sets):
            for depth in range(self.held.depth):
                read = {
                    (y, a): digits[c][depth]
                    for c, (i, y, a) in enumerate(self.channels)
                    if i == place and digits[c][depth] >= 0
                }
                for y in dict.fromkeys(y for y, _ in read):
                    found[place].append((y, tuple(read.get((y, a), 0) for a in sorted(inside))))
        return tuple(tuple(entries) for entries in found)


def compile_one_layer(
    dfa: DFA, eigenvalues: GateRange = "unit-circle", *, backend: str = "auto"
) -> OneLayerNetwork:
    """The weights of one diagonal layer that tracks the minimal automaton of `dfa`, if they are found.

    compile_one_layer(DFA.from_regex("[ab]*b[ab]", "ab"), "[0,1]").states("abba")
    """
    if eigenvalues not in RANGES:
        raise unknown_name("compile_one_layer: eigenvalues", eigenvalues, RANGES)
    minimal = dfa.minimal()
    found = holding(minimal, {"[0,1]": 1, "[-1,1]": 2, "unit-circle": None}[eigenvalues])
    if found is None:
        raise UserError(
            f"compile_one_layer: no single diagonal layer with gates in {eigenvalues} was found for this "
            "language. `compile_gates` stacks several; `statetrack explain` says what is possible."
        )
    return OneLayerNetwork(minimal, *found, backend)
