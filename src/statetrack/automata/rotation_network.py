"""Groups in one layer of the delta rule with rotations: (I - 2 k k^T) R, one reflection and turns of planes.

Let some letters of a permutation group commute, and let every other letter swap two states. The matrices of
the first are simultaneously diagonal over the complex numbers, so in a real orthonormal basis they turn
fixed planes, each by its own angle, or multiply a line by 1 or -1; with an unused second coordinate a line
is a plane as well, turned by 0 or pi. In the same basis a swap of i and j is the reflection I - 2 k k^T with
k = (e_i - e_j) / sqrt 2. So one layer of the delta rule with one factor per token and `angle` tracks the
group: S5 by a swap and a 5-cycle, for example, whose 5-cycle alone takes four reflections.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor, nn

from statetrack.automata.actions import Permutation
from statetrack.automata.dfa import DFA
from statetrack.automata.group_layers import check_group
from statetrack.automata.groups import Perm, cycle_lengths, dihedral_rotation, multiply, perm_order
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


@dataclass(frozen=True)
class Weights:
    """One layer: by letter a key (0: no reflection) and angles; the start; codebook rows and their states."""

    keys: np.ndarray
    angles: np.ndarray
    start: np.ndarray
    codebook: np.ndarray
    labels: list[int]


def swap_weights(dfa: DFA) -> Weights | None:
    """On the states: letters that swap two of them, and others that commute; None if these do not."""
    n, tables = dfa.n_states, [dfa.transitions[letter] for letter in dfa.alphabet]
    swaps = [table for table in tables if n - len(cycle_lengths(table)) == 1]
    turns = [table for table in dict.fromkeys(tables) if table not in swaps]
    if not all(multiply(g, h) == multiply(h, g) for g, h in combinations(turns, 2)):
        return None
    basis, angles = common_planes([Permutation(table).A() for table in turns], n)
    keys, by_letter = np.zeros((len(tables), len(basis))), np.zeros((len(tables), len(basis) // 2))
    for i, table in enumerate(tables):
        if table in swaps:
            moved = [q for q in range(n) if table[q] != q]
            keys[i] = basis @ (np.eye(n)[moved[0]] - np.eye(n)[moved[1]]) / np.sqrt(2)
        else:
            by_letter[i] = angles[turns.index(table)]
    return Weights(keys, by_letter, basis[:, dfa.start], basis.T, list(range(n)))


def polygon_weights(dfa: DFA, rotation: Perm) -> Weights:
    """A dihedral group in the plane: powers of `rotation` turn it, the other letters are mirrors.

    The first mirror is the horizontal axis; a mirror that equals it followed by the j-th power of the
    rotation has its axis at j pi / m.
    """
    m, tables = perm_order(rotation), [dfa.transitions[letter] for letter in dfa.alphabet]
    powers = [tuple(range(dfa.n_states))]
    while len(powers) < m:
        powers.append(multiply(powers[-1], rotation))
    mirrors = [table for table in tables if table not in powers]
    keys, angles = np.zeros((len(tables), 2)), np.zeros((len(tables), 1))
    # A vector at (2 i + 1) pi / (2 m), i counted modulo 2 m, lies on no axis; no two elements agree on it.
    moves = []
    for i, table in enumerate(tables):
        if table in powers:
            j = powers.index(table)
            angles[i] = 2 * np.pi * j / m
            moves.append([(x + 2 * j) % (2 * m) for x in range(2 * m)])
        else:
            j = next(j for j, power in enumerate(powers) if multiply(mirrors[0], power) == table)
            axis = np.pi * j / m
            keys[i] = -np.sin(axis), np.cos(axis)
            moves.append([(2 * j - x - 1) % (2 * m) for x in range(2 * m)])
    label = {0: dfa.start}
    for x in (order := [0]):
        for move, table in zip(moves, tables, strict=True):
            if move[x] not in label:
                label[move[x]] = table[label[x]]
                order.append(move[x])
    at = np.pi * (2 * np.array(order) + 1) / (2 * m)
    codebook = np.stack([np.cos(at), np.sin(at)], axis=1)
    return Weights(keys, angles, codebook[0], codebook, [label[x] for x in order])


class RotationNetwork(nn.Module):
    """One layer of `delta_rule` with `angle` that tracks a permutation group; made by `compile_rotations`.

    Tokens (B, T), indices into the alphabet -> scores (B, T, rows); the best row's label is the state.
    """

    keys: Tensor
    angles: Tensor
    start: Tensor
    codebook: Tensor
    labels: Tensor

    def __init__(self, dfa: DFA, weights: Weights, backend: str, dtype: torch.dtype):
        super().__init__()
        self.dfa, self.backend = dfa, backend
        for name in ("keys", "angles", "start", "codebook"):
            self.register_buffer(name, torch.tensor(getattr(weights, name), dtype=dtype))
        self.register_buffer("labels", torch.tensor(weights.labels))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> one score per row of the codebook, (B, T, rows)."""
        (B, T), (rows, K) = tokens.shape, self.codebook.shape
        k = self.keys[tokens]
        beta = 2 * (k.square().sum(-1) > 0.5).to(k.dtype)
        # One head scores each row: heads have equal states and different queries.
        spread = (B, T, rows, K)
        o, _ = delta_rule(
            self.codebook.expand(spread),
            k[:, :, None].expand(spread),
            k.new_zeros(B, T, rows, 1),
            beta[:, :, None].expand(B, T, rows),
            angle=self.angles[tokens][:, :, None].expand(B, T, rows, K // 2),
            scale=1.0,
            initial_state=self.start[:, None].expand(B, rows, K, 1),
            backend=self.backend,
        )
        return o[..., 0]

    @torch.no_grad()
    def states(self, word: Iterable[str]) -> list[int]:
        """The automaton's states along the word, decoded from the layer; `dfa.run` gives the true ones."""
        place = {letter: i for i, letter in enumerate(self.dfa.alphabet)}
        tokens = torch.tensor([[place[letter] for letter in word]], dtype=torch.int64)
        return [self.dfa.start, *self.labels[self(tokens)[0].argmax(-1)].tolist()]


def compile_rotations(
    dfa: DFA, *, backend: str = "auto", dtype: torch.dtype = torch.float32
) -> RotationNetwork:
    """The weights of one layer of rotations and single reflections that tracks a permutation group.

        compile_rotations(DFA.from_group("S5")).states("scs")

    Every letter must permute the states; those that swap more than two of them must commute, or the group
    must be dihedral.
    """
    check_group(dfa, "rotations")
    weights = swap_weights(dfa)
    rotation = None if weights is not None else dihedral_rotation([*dfa.transitions.values()])
    if rotation is not None:
        weights = polygon_weights(dfa, rotation)
    if weights is None:
        raise UserError(
            "compile_rotations: the letters that swap more than two states do not commute, and the group is "
            "not dihedral. Use `compile_dfa`, which takes several factors per token."
        )
    return RotationNetwork(dfa, weights, backend, dtype)
