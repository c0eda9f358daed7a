"""Groups in one layer of the delta rule with rotations: (I - 2 k k^T) R, one reflection and turns of planes.

Let some letters of a permutation group commute, and let every other letter swap two states. The matrices of the
first are simultaneously diagonal over the complex numbers, so in a real orthonormal basis they turn fixed planes,
each by its own angle, or multiply a line by 1 or -1; with an unused second coordinate a line is a plane as well,
turned by 0 or pi. In the same basis a swap of i and j is the reflection I - 2 k k^T with k = (e_i - e_j) / sqrt 2.
So one layer of the delta rule with one factor per token and `angle` tracks the group: S5 by a swap and a 5-cycle,
for example, whose 5-cycle alone takes four reflections.
"""

from collections.abc import Iterable
from itertools import combinations

import numpy as np
import torch
from torch import Tensor, nn

from statetrack.automata.actions import Permutation
from statetrack.automata.dfa import DFA
from statetrack.automata.group_layers import check_group
from statetrack.automata.groups import cycle_lengths, multiply
from statetrack.errors import UserError
from statetrack.ops.delta_rule import delta_rule

TINY = 1e-6


def common_planes(matrices: list[np.ndarray], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Planes that commuting orthogonal matrices turn: a basis (2 p, size) and the angles (matrices, p).

    Rows i and i + p span plane i; the second row is 0 where the plane is a line.
    """
    rng = np.random.default_rng(0)
    real, imaginary = np.zeros((size, size)), np.zeros((size, size))
    for M in matrices:
        c, d = rng.uniform(1, 2, 2)
        real, imaginary = real + c * (M + M.T), imaginary + d * (M - M.T)
    # Hermitian, with the common eigenvectors; M - M^T is i times real on them, 0 on lines.
    _, vectors = np.linalg.eigh(real + 1j * imaginary)
    turning = ((vectors.conj() * (imaginary @ vectors)).sum(0) / 1j).real
    planes = [np.sqrt(2) * v for v in vectors.T[turning > TINY]]
    rows = [*(v.real for v in planes)]
    others = [*(v.imag for v in planes)]
    used = np.array([*rows, *others]).reshape(-1, size)
    left = np.eye(size) - used.T @ used  # the projection to the lines
    values, basis = np.linalg.eigh(left)
    lines = basis[:, values > 0.5]
    if lines.shape[1]:
        lines = lines @ np.linalg.eigh(lines.T @ real @ lines)[1]
    rows += [*lines.T]
    others += [np.zeros(size)] * lines.shape[1]
    first, second = np.array(rows), np.array(others)
    angles = np.array(
        [[np.arctan2(y @ M @ x, x @ M @ x) for x, y in zip(first, second, strict=True)] for M in matrices]
    )
    return np.concatenate([first, second]), angles.reshape(len(matrices), len(first))


class RotationNetwork(nn.Module):
    """One layer of `delta_rule` with `angle` that tracks a permutation group; made by `compile_rotations`."""

    keys: Tensor
    angles: Tensor
    basis: Tensor

    def __init__(self, dfa: DFA, backend: str, dtype: torch.dtype):
        super().__init__()
        n, self.dfa, self.backend = dfa.n_states, dfa, backend
        tables = [dfa.transitions[letter] for letter in dfa.alphabet]
        swaps = [table for table in tables if n - len(cycle_lengths(table)) == 1]
        turns = [table for table in dict.fromkeys(tables) if table not in swaps]
        if not all(multiply(g, h) == multiply(h, g) for g, h in combinations(turns, 2)):
            raise UserError(
                "compile_rotations: the letters that swap more than two states do not commute. Use "
                "`compile_dfa`, which needs several factors per token."
            )
        basis, angles = common_planes([Permutation(table).A() for table in turns], n)
        keys = np.zeros((len(tables), len(basis)))
        by_letter = np.zeros((len(tables), angles.shape[1] if turns else len(basis) // 2))
        for i, table in enumerate(tables):
            if table in swaps:
                moved = [q for q in range(n) if table[q] != q]
                keys[i] = basis @ (np.eye(n)[moved[0]] - np.eye(n)[moved[1]]) / np.sqrt(2)
            else:
                by_letter[i] = angles[turns.index(table)]
        for name, value in (("keys", keys), ("angles", by_letter), ("basis", basis)):
            self.register_buffer(name, torch.tensor(value, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> one number per state, (B, T, n): 1 for the state of the automaton, 0 for others."""
        (B, T), (K, n) = tokens.shape, self.basis.shape
        k = self.keys[tokens]
        beta = 2.0 * (k.square().sum(-1) > 0.5)
        # One head reads each state's coordinate: heads have equal states and different queries.
        spread = (B, T, n, K)
        o, _ = delta_rule(
            self.basis.T.expand(spread),
            k[:, :, None].expand(spread),
            k.new_zeros(B, T, n, 1),
            beta.to(k.dtype)[:, :, None].expand(B, T, n),
            angle=self.angles[tokens][:, :, None].expand(B, T, n, K // 2),
            scale=1.0,
            initial_state=self.basis[:, self.dfa.start, None].expand(B, n, K, 1),
            backend=self.backend,
        )
        return o[..., 0]

    @torch.no_grad()
    def states(self, word: Iterable[str]) -> list[int]:
        """The automaton's states along the word, decoded from the layer; `dfa.run` gives the true ones."""
        place = {letter: i for i, letter in enumerate(self.dfa.alphabet)}
        tokens = torch.tensor([[place[letter] for letter in word]], dtype=torch.int64)
        return [self.dfa.start, *self(tokens)[0].argmax(-1).tolist()]


def compile_rotations(
    dfa: DFA, *, backend: str = "auto", dtype: torch.dtype = torch.float32
) -> RotationNetwork:
    """The weights of one layer of rotations and single reflections that tracks a permutation group.

    Every letter must permute the states, and those that swap more than two of them must commute.
    """
    check_group(dfa, "rotations")
    return RotationNetwork(dfa, backend, dtype)
