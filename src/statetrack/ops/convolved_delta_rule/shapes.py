"""The columns of the product that the rule reads, and the axes they become."""

from typing import NamedTuple

from torch import Tensor


class Shapes(NamedTuple):
    H: int
    K: int
    V: int
    householders: int

    @property
    def widths(self) -> list[int]:
        """Columns of q, k, v and beta."""
        n = self.householders
        return [self.H * self.K, n * self.H * self.K, n * self.H * self.V, n * self.H]

    def split_heads(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        """(B, T, n H D) -> (B, T n, H, D): the Householder factors of a token are consecutive in time."""
        H = self.H
        return (
            q.unflatten(-1, (H, self.K)),
            k.unflatten(-1, (-1, H, self.K)).flatten(1, 2),
            v.unflatten(-1, (-1, H, self.V)).flatten(1, 2),
            beta.unflatten(-1, (-1, H)).flatten(1, 2),
        )
