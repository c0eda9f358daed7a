"""Exact permutations and rotations near learned ones: the geometry of `statetrack snap`, without models.

The permutations of n points act on the n - 1 dimensions orthogonal to (1, ..., 1); a swap (i j) is there the
reflection along e_i - e_j. A tracker that has learned them holds the same matrices in some subspace of its
keys, turned by some isometry T and with errors: A_x T = T R_x approximately, with R_x exact. The residues of
Z_m act on a plane: 1 is a rotation by w/m of a turn, for some w.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from statetrack.automata.factor import factor
from statetrack.tasks.groups import Group

KINDS = ("standard", "standard x sign")


def kinds(points: int) -> tuple[str, ...]:
    """The representations to try: with the sign, that of S_2 is trivial, and that of S_3 the standard one."""
    return KINDS if points > 3 else KINDS[:1]


@dataclass(frozen=True)
class Representation:
    """An orthogonal matrix for each element of a group, and the reflections that it is a product of."""

    name: str
    matrices: np.ndarray  # (order, r, r)
    reflections: Callable[[int], np.ndarray]  # of an element: unit vectors (n, r), in the order applied


def representations(group: Group) -> list[Representation]:
    """Those that a head can have learned: irreducible over the reals, and, for Z_m, not always faithful."""
    if group.permutations is None:
        return [_rotations(group.order, w) for w in range(1, group.order // 2 + 1)]
    p = group.permutations
    return [
        Representation(
            f"{kind} representation",
            representation(p, kind),
            lambda x, kind=kind: reflections(p[x].tolist(), kind),
        )
        for kind in kinds(p.shape[1])
    ]


def _rotations(m: int, w: int) -> Representation:
    """The residue x of Z_m as a rotation by w x / m of a turn; a sign if that of 1 is half a turn."""
    turns = 2 * np.pi * (w * np.arange(m) % m) / m
    cos, sin = np.cos(turns), np.sin(turns)
    R = np.stack([np.stack([cos, -sin], axis=-1), np.stack([sin, cos], axis=-1)], axis=-2)
    R = R[:, :1, :1] if 2 * w == m else R
    size = R.shape[1]
    return Representation(
        f"rotation by {w}/{m} of a turn",
        R,
        lambda x: factor(R[x]).unit().vectors[::-1].reshape(-1, size),
    )


@dataclass(frozen=True)
class Fit:
    """T (K, n - 1) with orthonormal columns, and how far the learned transitions are from T R_x T^T."""

    isometry: np.ndarray
    misfit: np.ndarray  # (tokens,): the spectral norm of A_x T - T R_x
    nearest: np.ndarray  # (tokens,): the candidate nearest to T^T A_x T


def hyperplane(n: int) -> np.ndarray:
    """An orthonormal basis of the vectors of n entries that sum to zero, (n, n - 1)."""
    basis = np.zeros((n, n - 1))
    for j in range(n - 1):
        basis[: j + 1, j], basis[j + 1, j] = 1.0, -(j + 1.0)
    return basis / np.linalg.norm(basis, axis=0)


def representation(permutations: np.ndarray, kind: str = "standard") -> np.ndarray:
    """The matrices (m, n - 1, n - 1) of permutations (m, n) given by the images of their points.

    "standard x sign" multiplies those of odd permutations by -1. In n - 1 dimensions S_5 has no other
    irreducible representation than these two.
    """
    m, n = permutations.shape
    P = np.zeros((m, n, n))
    P[np.arange(m)[:, None], permutations, np.arange(n)] = 1.0  # e_i -> e_p(i)
    basis = hyperplane(n)
    R = basis.T @ P @ basis
    return R * np.linalg.det(P)[:, None, None] if kind == "standard x sign" else R


def reflections(permutation: Sequence[int], kind: str = "standard") -> np.ndarray:
    """Unit vectors (r, n - 1) of the reflections that make the permutation, the first to be applied first."""
    n = len(permutation)
    if kind == "standard":
        # as the automata compiler has them: a swap is (e_i - e_j) / sqrt 2
        vectors = factor(np.eye(n)[:, list(permutation)]).unit().vectors @ hyperplane(n)
    else:
        vectors = factor(representation(np.array([permutation]), kind)[0]).unit().vectors
    return vectors[::-1].reshape(-1, n - 1)


def fit_isometry(learned: np.ndarray, exact: np.ndarray, candidates: np.ndarray) -> Fit:
    """The isometry T for which A_x T is nearest to T R_x, over learned A_x (m, K, K), exact R_x (m, r, r).

        X = argmin over ||X|| = 1 of sum_x ||A_x X - X R_x||^2        T = X (X^T X)^(-1/2)

    If A_x contains the irreducible R_x once, X is a multiple of an isometry (Schur's lemma: X^T X commutes
    with every R_x and is symmetric, so it is a multiple of the identity), and T spans the subspace in which
    A_x acts as R_x. `candidates` (c, r, r) are the matrices that a token may be rounded to.
    """
    K, r = learned.shape[1], exact.shape[1]
    # the squares, as a quadratic form of the row-major X; R_x is orthogonal
    mixed = np.einsum("xij,xab->iajb", learned, exact).reshape(K * r, K * r)
    squares = np.einsum("xki,xkj->ij", learned, learned) + len(learned) * np.eye(K)
    normal = np.kron(squares, np.eye(r)) - mixed - mixed.T
    X = np.linalg.eigh(normal)[1][:, 0].reshape(K, r)
    U, _, Vt = np.linalg.svd(X, full_matrices=False)
    T = U @ Vt
    misfit = np.linalg.norm(learned @ T - T @ exact, ord=2, axis=(1, 2))
    products = np.einsum("xij,yij->xy", T.T @ learned @ T, candidates)  # all candidates have equal norm
    return Fit(T, misfit, products.argmax(axis=1))


def fixed_point(learned: np.ndarray, offsets: np.ndarray, isometry: np.ndarray) -> np.ndarray:
    """Z (r, V) such that S = T Z is nearest to a fixed point of all affine maps S -> A_x S + B_x.

    Learned writes beta k v^T move the state too. Around a common fixed point they are reflections and nothing
    else, v = S^T k; then S_t - S runs through a finite set.
    """
    T = isometry
    left = np.eye(T.shape[1]) - T.T @ learned @ T
    right = T.T @ offsets
    return np.linalg.lstsq(left.reshape(-1, T.shape[1]), right.reshape(-1, right.shape[-1]), rcond=1e-9)[0]


def swaps_from_keys(keys: np.ndarray) -> set[frozenset[int]] | None:
    """The points that the reflections along unit `keys` (m, K) swap, from their angles alone, or None.

    A point is given as the set of keys whose swaps move it. Keys of swaps that share a point are at 60 or
    120 degrees, of disjoint ones at 90. Of three keys at 60 degrees from each other, up to sign, those of
    (i j), (i k), (i l) have <a,b><b,c><c,a> = 1/8, those of a triangle (i j), (j k), (i k) have -1/8.
    """
    m = len(keys)
    n = round((1 + np.sqrt(1 + 8 * m)) / 2)
    if m == 0 or n * (n - 1) != 2 * m:
        return None
    G = keys @ keys.T
    size = np.abs(G)
    if np.any(size[~np.eye(m, dtype=bool)] > 0.75):
        return None
    meets = (size > 0.25) & ~np.eye(m, dtype=bool)
    if n == 2:
        return {frozenset([0])}  # both of its points
    points = {
        frozenset(
            [a, b, *(c for c in range(m) if meets[a, c] and meets[b, c] and G[a, b] * G[b, c] * G[c, a] > 0)]
        )
        for a, b in combinations(range(m), 2)
        if meets[a, b]
    }
    twice = all(sum(key in point for point in points) == 2 for key in range(m))
    return points if len(points) == n and twice else None
