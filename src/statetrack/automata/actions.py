"""What one token does to the state of a compiled layer: h -> A h + B, with A in Householder factors."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

# A reset keeps this fraction of the old state, so that dec can still read the previous state. With 1/4 all
# other coordinates stay below 1/3 after any number of resets, and the scaling is exact in binary.
EPS = 0.25


class Factor(NamedTuple):
    """One step of the delta rule, h -> (I - beta k k^T) h + beta k value.

    The swap of coordinates i and j is stored as k = e_i - e_j with beta = 1: integers, which every
    floating-point format represents exactly. Its unit-norm form has beta = 2 (see `unit`).
    """

    beta: float
    key: np.ndarray
    value: float = 0.0

    def unit(self) -> "Factor":
        """The same step with a key of norm 1, as in Eq. 3."""
        norm = float(np.linalg.norm(self.key))
        return Factor(self.beta * norm**2, self.key / norm, self.value / norm)

    def eigenvalue(self) -> float:
        """The one eigenvalue of I - beta k k^T that need not be 1."""
        return 1.0 - self.beta * float(self.key @ self.key)


@dataclass(frozen=True)
class Permutation:
    """Coordinate i moves to permutation[i]; A is the permutation matrix and B = 0."""

    permutation: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.permutation)

    def __call__(self, c: int) -> int:
        return self.permutation[c]

    def inverse(self) -> tuple[int, ...]:
        inverse = [0] * self.size
        for i, target in enumerate(self.permutation):
            inverse[target] = i
        return tuple(inverse)

    def A(self) -> np.ndarray:
        A = np.zeros((self.size, self.size))
        A[list(self.permutation), range(self.size)] = 1.0
        return A

    def B(self) -> np.ndarray:
        return np.zeros(self.size)

    @cached_property
    def _gather(self) -> np.ndarray:
        return np.array(self.inverse(), dtype=np.intp)

    def apply(self, h: np.ndarray) -> np.ndarray:
        return h[self._gather]

    def factors(self) -> list[Factor]:
        """Swaps whose product, left to right, is A: n minus the number of cycles of them."""
        return [Factor(1.0, w) for w in swaps(self.permutation)]


@dataclass(frozen=True)
class Reset:
    """The state becomes `target` whatever it was: A = eps I, B = e_target."""

    size: int
    target: int

    def __call__(self, c: int) -> int:
        return self.target

    def A(self) -> np.ndarray:
        return EPS * np.eye(self.size)

    def B(self) -> np.ndarray:
        return np.eye(self.size)[self.target]

    def apply(self, h: np.ndarray) -> np.ndarray:
        new = h * h.dtype.type(EPS)
        new[self.target] += 1
        return new

    def factors(self) -> list[Factor]:
        """One factor per coordinate: h_j -> eps h_j + [j = target]."""
        beta, unit = 1 - EPS, np.eye(self.size)
        return [Factor(beta, unit[j], (j == self.target) / beta) for j in range(self.size)]


class Reflections:
    """A product of at most two reflections of the plane (or of the line), with B if one is given."""

    def __init__(self, *factors: Factor, size: int):
        self.size, self._factors = size, list(factors)
        self._A, self._B = np.eye(size), np.zeros(size)
        for beta, key, value in reversed(factors):
            step = np.eye(size) - beta * np.outer(key, key)
            self._A, self._B = step @ self._A, step @ self._B + beta * key * value

    def A(self) -> np.ndarray:
        return self._A

    def B(self) -> np.ndarray:
        return self._B

    def apply(self, h: np.ndarray) -> np.ndarray:
        return self._A.astype(h.dtype) @ h + self._B.astype(h.dtype)

    def factors(self) -> list[Factor]:
        return self._factors


Action = Permutation | Reset


def swaps(permutation: tuple[int, ...]) -> list[np.ndarray]:
    """Vectors w = e_i - e_j with P = product of (I - w w^T), left to right; the fewest possible.

    A cycle c_0 -> c_1 -> ... -> c_0 is (c_0 c_1)(c_1 c_2)..., one swap less than its length. That makes
    n - cycles in all, which is the rank of P - I and therefore the minimum number of reflections.
    """
    vectors, seen = [], set()
    for first in range(len(permutation)):
        cycle, point = [], first
        while point not in seen:
            seen.add(point)
            cycle.append(point)
            point = permutation[point]
        for i, j in pairwise(cycle):
            w = np.zeros(len(permutation))
            w[i], w[j] = 1.0, -1.0
            vectors.append(w)
    return vectors
