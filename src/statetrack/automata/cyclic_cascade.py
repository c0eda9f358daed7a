"""The holonomy cascade split into levels that add modulo a prime, for automata whose groups are solvable.

A holonomy level permutes tiles by a group G. If G is solvable, it has a chain G = N_0 > N_1 > ... > N_m = 1
in which N_j is normal in N_{j-1} with prime index p_j; let t_j generate N_{j-1} modulo N_j. Every g in G has
digits d_1, ..., d_m, with d_j counted modulo p_j, and

    g = n_1 t_1^{d_1},   n_1 = n_2 t_2^{d_2},   ...        (do the left factor first)

Multiplying g by h_0 = h on the right adds s_j to every digit, where s_j is the power of t_j that h_{j-1} has
modulo N_j, and h_j = t_j^{d_j} h_{j-1} t_j^{-(d_j + s_j)}. So s_j depends on h and on the digits above,
before the letter, and on nothing else: every digit is a level of a cascade that adds modulo p_j or is reset.
A tile is c = g(r), with r a fixed tile of its orbit; the number of the orbit is kept in bits, which are only
reset.
"""

from dataclasses import dataclass
from functools import cached_property

from statetrack.automata.actions import Permutation, Reset
from statetrack.automata.dfa import DFA
from statetrack.automata.groups import Perm, closure, multiply, perm_order, prime_factors
from statetrack.automata.holonomy import HOLONOMY_CAP, Holonomy
from statetrack.errors import UserError

GROUP_CAP = 2_000  # elements of a group that is split

Context = tuple[int, tuple[int, ...]]  # an image set, and the digits of the holonomy level read so far


@dataclass(frozen=True)
class Turn(Permutation):
    """c -> c + shift modulo `modulus`; numbers from `modulus` on are not in use and stay."""

    modulus: int
    shift: int


@dataclass(frozen=True)
class Write(Reset):
    """A reset from a number modulo `old_modulus` to one modulo `modulus`."""

    old_modulus: int
    modulus: int


@dataclass(frozen=True)
class Step:
    """One step N_{j-1} > N_j of the chain: the prime index, the powers of t, and element -> its power."""

    prime: int
    powers: list[Perm]
    power_of: dict[Perm, int]  # s for every element of N_j t^s


def prime_chain(elements: list[Perm]) -> list[Step] | None:
    """A chain of subgroups with prime indices from the group down to the identity; None if not solvable."""
    steps: list[Step] = []
    while len(elements) > 1:
        derived = _derived(elements)
        if len(derived) == len(elements):
            return None
        steps += reversed(_steps_up(derived, elements))
        elements = derived
    return steps


def _derived(elements: list[Perm]) -> list[Perm]:
    """The subgroup that the commutators generate."""
    few = _few_generators(elements)
    found: set[Perm] = {elements[0]}
    wanted = [_commutator(g, h) for g in few for h in few]
    # normal closure of the generators' commutators
    while wanted:
        new = [x for x in wanted if x not in found]
        if not new:
            break
        group = closure([*_few_generators(list(found)), *new], GROUP_CAP)
        assert group is not None  # a subgroup of a group within the cap
        found = set(group)
        wanted = [multiply(multiply(_inverse(g), x), g) for x in _few_generators(group) for g in few]
    return closure(list(found), GROUP_CAP) or []


def _few_generators(elements: list[Perm]) -> list[Perm]:
    """Elements that generate the group, at most log2 of its order."""
    chosen: list[Perm] = [elements[0]]
    reached = {elements[0]}
    for g in elements:
        if g not in reached:
            chosen.append(g)
            reached = set(closure(chosen, GROUP_CAP) or [])
    return chosen


def _steps_up(low: list[Perm], high: list[Perm]) -> list[Step]:
    """Steps of prime index from `low` to `high`, whose quotient is abelian; the lowest first."""
    steps, inside = [], set(low)
    for g in high:
        while g not in inside:
            order = next(r for r in range(1, perm_order(g) + 1) if _power(g, r) in inside)
            prime = prime_factors(order)[0]
            t = _power(g, order // prime)
            powers = [_power(t, s) for s in range(prime)]
            power_of = {multiply(n, power): s for s, power in enumerate(powers) for n in inside}
            steps.append(Step(prime, powers, power_of))
            inside = set(power_of)
    return steps


def _power(g: Perm, exponent: int) -> Perm:
    result = tuple(range(len(g)))
    for _ in range(exponent):
        result = multiply(result, g)
    return result


def _inverse(g: Perm) -> Perm:
    return tuple(sorted(range(len(g)), key=g.__getitem__))


def _commutator(g: Perm, h: Perm) -> Perm:
    return multiply(multiply(_inverse(g), _inverse(h)), multiply(g, h))


class TileNumbers:
    """The digits of the tiles of one class: the bits of the orbit, and the digits of a group element."""

    def __init__(self, generators: list[Perm], tiles: int):
        group = closure(generators or [tuple(range(tiles))], GROUP_CAP)
        if group is None:
            raise UserError(f"compile_gates: a group inside has more than {GROUP_CAP} elements.")
        self.steps = prime_chain(group)
        if self.steps is None:
            raise UserError("compile_gates: a group inside is not solvable; no diagonal layers track it.")
        self.element = {}  # tile -> (number of its orbit, element that takes the orbit's first tile to it)
        self.first: list[int] = []
        for c in range(tiles):
            if c not in self.element:
                for g in group:
                    self.element.setdefault(g[c], (len(self.first), g))
                self.first.append(c)
        self.bits = (len(self.first) - 1).bit_length()

    @property
    def primes(self) -> list[int]:
        return [step.prime for step in self.steps or []]

    def encode(self, tile: int) -> tuple[list[int], list[int]]:
        """The bits of the orbit, and the digits."""
        orbit, g = self.element[tile]
        digits = []
        for step in self.steps or []:
            s = step.power_of[g]
            digits.append(s)
            g = multiply(g, _inverse(step.powers[s]))
        return [orbit >> i & 1 for i in range(self.bits)], digits

    def decode(self, bits: tuple[int, ...], digits: tuple[int, ...]) -> int | None:
        """The tile, or None for bits of no orbit."""
        orbit = sum(bit << i for i, bit in enumerate(bits[: self.bits]))
        if orbit >= len(self.first):
            return None
        tile = self.first[orbit]
        for step, d in reversed(list(zip(self.steps or [], digits, strict=False))):
            tile = step.powers[d][tile]
        return tile

    def shift(self, h: Perm, digits: tuple[int, ...]) -> int:
        """What h adds to the digit that follows `digits`, the digits above it before the letter."""
        steps = self.steps or []
        for step, d in zip(steps, digits, strict=False):
            s = step.power_of[h]
            back = _inverse(step.powers[(d + s) % step.prime])
            h = multiply(multiply(step.powers[d], h), back)
        return steps[len(digits)].power_of[h]


class CyclicCascade:
    """A `Cascade` whose levels are numbers modulo a prime: c -> c + s, or c -> a constant.

    Raises `UserError` if a group inside is not solvable. `modulus(level, context)` is the prime of a level,
    which depends on the context since classes of image sets have different groups; 2 where it is only reset.
    """

    def __init__(self, dfa: DFA, cap: int = HOLONOMY_CAP):
        self.holonomy = Holonomy(dfa, cap)
        self.levels: list[tuple[int, int, bool]] = []  # (holonomy level, place, whether it is a bit)
        self.sizes: list[int] = []
        depth = len(self.holonomy.sizes)
        for level in range(depth):
            here = [n for i, n in self.numbers.items() if self.holonomy.heights[i] == depth - level]
            bits = max((n.bits for n in here), default=0)
            places = max((len(n.primes) for n in here), default=0)
            for place in range(bits):
                self.levels.append((level, place, True))
                self.sizes.append(2)
            for place in range(places):
                self.levels.append((level, place, False))
                self.sizes.append(max(n.primes[place] for n in here if place < len(n.primes)))
        self.last = {level: i for i, (level, _, _) in enumerate(self.levels)}
        self.bits = {level: sum(at == level and bit for at, _, bit in self.levels) for level in range(depth)}
        self.top: Context = (self.holonomy.top, ())
        self.start, context = [], self.top
        for i, (level, _, _) in enumerate(self.levels):
            c = self._digit(i, context[0], self.holonomy.start[level])
            self.start.append(c)
            context = self.refine(i, context, c)

    @cached_property
    def numbers(self) -> dict[int, TileNumbers]:
        """By class with tiles, their digits."""
        found, h = {}, self.holonomy
        for i, image_class in enumerate(h.images.classes):
            tiles = len(h.tiles[i])
            if not tiles:
                continue
            level = len(h.sizes) - h.heights[i]
            generators = set()
            for mask in image_class.masks:
                for letter, target in enumerate(h.images.moves[mask]):
                    if h.images.class_of.get(target) == i:
                        action = h.action(level, letter, mask, target)
                        assert isinstance(action, Permutation)
                        generators.add(action.permutation[:tiles])
            found[i] = TileNumbers(sorted(generators), tiles)
        return found

    def _numbers(self, level: int, mask: int) -> TileNumbers | None:
        """The digits at this holonomy level, or None where the context is passed on unrefined."""
        i = self.holonomy.images.class_of[mask]
        return self.numbers[i] if self.holonomy.heights[i] == len(self.holonomy.sizes) - level else None

    def _digit(self, i: int, mask: int, tile: int) -> int:
        level, place, is_bit = self.levels[i]
        numbers = self._numbers(level, mask)
        if numbers is None:
            return 0
        bits, digits = numbers.encode(tile)
        chosen = bits if is_bit else digits
        return chosen[place] if place < len(chosen) else 0

    def modulus(self, level: int, context: Context) -> int:
        at, place, is_bit = self.levels[level]
        numbers = self._numbers(at, context[0])
        if is_bit or numbers is None or place >= len(numbers.primes):
            return 2
        return numbers.primes[place]

    def action(self, level: int, letter: int, before: Context, after: Context) -> Turn | Write:
        at, place, is_bit = self.levels[level]
        size, base = self.sizes[level], self.holonomy.action(at, letter, before[0], after[0])
        old, new = self.modulus(level, before), self.modulus(level, after)
        if isinstance(base, Reset):
            return Write(size, self._digit(level, after[0], base.target), old, new)
        numbers, shift = self._numbers(at, before[0]), 0
        if not is_bit and numbers is not None and place < len(numbers.primes):
            h = base.permutation[: len(numbers.element)]
            shift = numbers.shift(h, before[1][self.bits[at] :])
        return Turn((*((c + shift) % new for c in range(new)), *range(new, size)), new, shift)

    def refine(self, level: int, context: Context, c: int) -> Context:
        at, _, _ = self.levels[level]
        mask, digits = context[0], (*context[1], c)
        if level != self.last[at]:
            return mask, digits
        numbers = self._numbers(at, mask)
        if numbers is None:
            return mask, ()
        tile = numbers.decode(digits[: self.bits[at]], digits[self.bits[at] :])
        assert tile is not None  # `holds` rules such digits out
        return self.holonomy.refine(at, mask, tile), ()

    def holds(self, level: int, context: Context, c: int) -> bool:
        at, place, is_bit = self.levels[level]
        numbers = self._numbers(at, context[0])
        if numbers is None or place >= (numbers.bits if is_bit else len(numbers.primes)):
            return c == 0
        if not is_bit:
            return c < numbers.primes[place]
        bits = (*context[1][:place], c)
        return sum(bit << i for i, bit in enumerate(bits)) < len(numbers.first)

    def members(self, context: Context) -> tuple[int, ...]:
        return self.holonomy.members(context[0])

    def state_of(self, context: Context) -> int:
        return self.holonomy.state_of(context[0])
