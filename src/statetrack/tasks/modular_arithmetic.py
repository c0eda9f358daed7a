"""Modular arithmetic (Sec. 5.1): the value of a random expression modulo 5."""

import re
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from statetrack.errors import UserError, unknown_name
from statetrack.ops.automaton_run import run_automaton
from statetrack.ops.backends import prefers_triton
from statetrack.ops.bracket_expressions import bracket_expressions
from statetrack.tasks.task import IGNORE, Batch, Task

OPERATORS = ("+", "-", "*")
PAD = "_"


@dataclass(frozen=True)
class Arithmetic(Task):
    """Base class of both forms: one label per sequence, at `=`, which is the token of the answer's digit.

    `symbols` lists the vocabulary in the order of the token ids. The classes are the whole vocabulary, so a
    model can also give answers that are not digits.
    """

    modulus: int = 5  # digits are 0 to modulus - 1

    labels = "last"
    train_lengths = (3, 40)
    eval_lengths = (40, 64, 96, 128, 192, 256)
    shortest = 3  # a digit, = and the answer

    def __post_init__(self):
        if not 2 <= self.modulus <= 64:
            raise UserError(f"{type(self).__name__}: modulus is {self.modulus}, expected 2 to 64.")

    @property
    @abstractmethod
    def symbols(self) -> tuple[str, ...]:
        """The tokens by id."""

    @property
    def digits(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.modulus)))

    @property
    def vocab_size(self) -> int:
        return len(self.symbols)

    @property
    def n_classes(self) -> int:
        return len(self.symbols)

    @property
    def chance(self) -> float:
        return 1 / self.modulus

    def encode(self, text: str) -> Tensor:
        """The tokens (T,) of an expression such as "2-3-3*2="; spaces are skipped."""
        ids = {symbol: i for i, symbol in enumerate(self.symbols)}
        parts = re.findall(r"\d+|\S", text)
        for part in parts:
            if part not in ids:
                raise unknown_name(f"{type(self).__name__}: symbol", part, ids)
        return torch.tensor([ids[part] for part in parts])

    def decode(self, tokens: Tensor) -> str:
        """The expression that `tokens` (T,) spell, without its padding."""
        symbols = self.symbols
        return "".join(symbols[i] for i in tokens.tolist()).rstrip(PAD)

    def label(self, inputs: Tensor, values: Tensor | None = None) -> Batch:
        """The batch of given expressions (B, T), each ended by `=`: its value (B,) is the target there."""
        if values is None:
            values = calculate(inputs, self.symbols, self.modulus)
        answers = values + self.symbols.index("0")
        asked = inputs == self.symbols.index("=")
        return Batch(inputs, torch.where(asked, answers[:, None], IGNORE))


@dataclass(frozen=True)
class ModularArithmetic(Arithmetic):
    """Digits with operators between, `*` before `+` and `-`. Tokens: PAD 0, + - * = 1 to 4, digits from 5.

        text        2  -  3  -  3  *  2  =         2 - 3 - 6 = -7 = 3 mod 5
        inputs      7  2  8  2  8  3  7  4
        targets     .  .  .  .  .  .  .  8         8 is the token of the digit 3

    A length counts the answer, so it is odd: n digits make 2 n + 1. Digits and operators are uniform. The
    language is regular: its state is the sum so far and the signed product in progress, both mod 5.
    """

    @property
    def symbols(self) -> tuple[str, ...]:
        return (PAD, *OPERATORS, "=", *self.digits)

    def draw_lengths(self, batch: int, lengths: tuple[int, int], generator: Generator) -> Tensor:
        """2 k - 1 with k uniform: an even bound stands for the odd length below it."""
        low, high = lengths
        drawn = super().draw_lengths(batch, (low - 1 + low % 2, high + high % 2), generator)
        return drawn - 1 + drawn % 2

    def fill(self, lengths: Tensor, generator: Generator, width: int | None = None) -> Batch:
        ids = {symbol: i for i, symbol in enumerate(self.symbols)}
        n = (lengths - 1) // 2  # digits of each expression
        B, device = lengths.numel(), generator.device
        longest = int(n.max()) if width is None else (width - 1) // 2
        inputs = torch.empty((B, longest, 2), dtype=torch.long, device=device)
        inputs[..., 0] = ids["0"] + torch.randint(
            self.modulus, (B, longest), generator=generator, device=device
        )
        inputs[..., 1] = ids["+"] + torch.randint(3, (B, longest), generator=generator, device=device)
        end, position = 2 * n[:, None] - 1, torch.arange(2 * longest, device=device)
        inputs = inputs.flatten(1).masked_fill(position == end, ids["="])
        return self.label(inputs.masked_fill(position > end, ids[PAD]))


@dataclass(frozen=True)
class BracketArithmetic(Arithmetic):
    """A random tree of bracketed operations. Tokens: digits 0 to 4, + - * ( ) = 5 to 10, PAD 11.

        text        (  (  3  )  +  -  1  )  =      3 + -1 = 2
        inputs      8  8  3  9  5  6  1  9 10
        targets     .  .  .  .  .  .  .  .  2      the token of a digit is the digit

    An expression of length 1 to 4 is d, -d, (d) or (-d); a longer one of length L is "(", left, operator,
    right, ")" with |left| uniform in 1 .. L - 4. A length counts the expression, `=`, the answer and one PAD,
    and is at least 5. Without `multiplication` the operators are + and - only. With it every factor 0 makes
    its whole product 0, so always answering 0 scores 0.13 where guessing scores 0.
    """

    multiplication: bool = True  # whether * is one of the operators

    @property
    def symbols(self) -> tuple[str, ...]:
        return (*self.digits, *OPERATORS, "(", ")", "=", PAD)

    def draw_lengths(self, batch: int, lengths: tuple[int, int], generator: Generator) -> Tensor:
        """Uniform, but at least 5."""
        return super().draw_lengths(batch, lengths, generator).clamp(min=5)

    def capturable(self, device: torch.device) -> bool:
        """Where one kernel draws the trees. Elsewhere the number of subexpressions per level is random."""
        return device.type == "cuda" and prefers_triton(torch.empty(0, device=device))

    def fill(self, lengths: Tensor, generator: Generator, width: int | None = None) -> Batch:
        ids = {symbol: i for i, symbol in enumerate(self.symbols)}
        size = lengths.clamp(min=5) - 3  # of the expression
        B, device = lengths.numel(), generator.device
        longest = int(size.max()) if width is None else max(width, 5) - 3
        inputs = torch.randint(self.modulus, (B, longest + 1), generator=generator, device=device)
        values = None
        if self.capturable(device):
            inputs, values = self._draw_trees(inputs, size, generator)
        else:
            self._grow(inputs, size, generator)
        position = torch.arange(longest + 1, device=device)
        inputs = inputs.masked_fill(position == size[:, None], ids["="])
        return self.label(inputs.masked_fill(position > size[:, None], ids[PAD]), values)

    def _draw_trees(self, digits: Tensor, size: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """Tokens (B, T) and values (B,) of random trees with these digits, in one kernel."""
        like = {"generator": generator, "device": digits.device}
        operators = torch.randint(len(OPERATORS) if self.multiplication else 2, digits.shape, **like)
        splits = torch.rand(digits.shape, dtype=torch.float64, **like)
        return bracket_expressions(size, digits, operators, splits, self.modulus)

    def _grow(self, inputs: Tensor, size: Tensor, generator: Generator) -> None:
        """Write the symbols of random trees over `inputs` (B, T), which holds random digits.

        One iteration per level of the trees handles all subexpressions of that level in the whole batch. Each
        is given by its start in the flat `inputs` and its length.
        """
        plus, minus, opening, closing = map(self.symbols.index, ("+", "-", "(", ")"))
        operators = len(OPERATORS) if self.multiplication else 2
        flat, device = inputs.view(-1), generator.device
        start, length = torch.arange(len(inputs), device=device) * inputs.shape[1], size
        while start.numel():
            bracketed = length >= 3
            flat[start[bracketed]] = opening
            flat[(start + length - 1)[bracketed]] = closing
            flat[(start + length // 2 - 1)[(length == 2) | (length == 4)]] = minus  # -d at 0, (-d) at 1
            start, length = start[length >= 5], length[length >= 5]
            # float64: a product of float32 with the largest number below one could round up to the bound
            chosen = torch.rand(start.shape, generator=generator, device=device, dtype=torch.float64)
            left = 1 + (chosen * (length - 4)).long()
            middle = start + 1 + left
            flat[middle] = plus + torch.randint(operators, start.shape, generator=generator, device=device)
            start, length = torch.cat([start + 1, middle + 1]), torch.cat([left, length - 3 - left])


def calculate(inputs: Tensor, symbols: tuple[str, ...], modulus: int) -> Tensor:
    """The values (B,) of expressions (B, T), evaluated in one pass from left to right.

    Every open bracket keeps a sum and the signed product in progress, (s, p), from (0, 1); then

        digit d      p <- d p                    *            nothing
        + or -       s <- s + p, p <- 1 or -1    - as a sign  p <- -p
        (            a new (0, 1) on top         )            the value s + p of the one on top, as a digit

    Mod m the pair has m^2 values, so a symbol is a row of a table, and a step of the batch is a look-up.
    """
    rows, table = _table(symbols, modulus, inputs.device)
    tokens = inputs.T.contiguous()  # (T, B), as all that follows
    opening, closing = tokens == _index(symbols, "("), tokens == _index(symbols, ")")
    # a minus is a sign unless it follows a digit or a closed bracket
    operand = (rows[tokens] < modulus) | closing
    sign = (tokens == symbols.index("-")) & ~F.pad(operand[:-1], (0, 0, 1, 0))
    row = rows[torch.where(sign, len(symbols), tokens)]
    if "(" not in symbols:
        last = run_automaton(table[0].view(-1, modulus**2), row.T, 1)[:, -1]
        return (last // modulus + last % modulus) % modulus
    # memory: for each expression and bracket level the pair, then for each its value, then one 0
    level = (opening.long() - closing.long()).cumsum(0)
    B, levels = len(inputs), int(level.max()) + 1
    memory = F.pad(torch.ones(2 * B * levels, dtype=torch.long, device=inputs.device), (0, 1))
    pair = torch.arange(B, device=inputs.device) * levels + level
    value = pair + B * levels
    # offset of a symbol's row in the table; for a closing bracket the value inside selects the row
    begin = torch.where(closing, 0, row * modulus**2)
    read = torch.stack([pair, torch.where(closing, value + 1, 2 * B * levels)], dim=1)
    write = torch.stack([pair, value], dim=1)
    for reads, writes, begins in zip(read, write, begin, strict=True):
        memory.put_(writes, table.index_select(1, memory.take(reads).sum(0) + begins))
    return memory[B * levels : -1 : levels] // modulus**2


def _index(symbols: tuple[str, ...], symbol: str) -> int:
    return symbols.index(symbol) if symbol in symbols else -1


@lru_cache(maxsize=16)
def _table(symbols: tuple[str, ...], modulus: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The row of every token (and of the minus sign, last), digits first; and what each row does.

    Column row m^2 + pair, pair = s m + p: the next pair, and the offset m^2 v of its value v = s + p.
    """
    special = {"+": (1, 1, 0, 1), "-": (1, 1, 0, -1), "(": (0, 0, 0, 1), "sign": (1, 0, -1, 0)}
    rules = [(1, 0, d, 0) for d in range(modulus)] + [*special.values(), (1, 0, 1, 0)]
    names = {**{str(d): d for d in range(modulus)}, **{x: modulus + i for i, x in enumerate(special)}}
    rows = torch.tensor([names.get(x, len(rules) - 1) for x in (*symbols, "sign")])
    # every rule is s <- keep s + add p, p <- factor p + new
    keep, add, factor, new = torch.tensor(rules).T[:, :, None, None]
    s, p = torch.arange(modulus)[:, None], torch.arange(modulus)
    s, p = (keep * s + add * p) % modulus, (factor * p + new).expand(-1, modulus, -1) % modulus
    table = torch.stack([s * modulus + p, modulus**2 * ((s + p) % modulus)])
    return rows.to(device), table.flatten(1).to(device)
