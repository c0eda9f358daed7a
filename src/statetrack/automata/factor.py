"""Matrices as products of generalised Householder matrices: Proposition 1, with 2n factors, not 3n."""

from dataclasses import dataclass

import numpy as np

from statetrack.automata.actions import swaps
from statetrack.automata.numbers import real_array
from statetrack.errors import UserError

# For float64; formats of lower precision get a larger tolerance, see `_rounding`.
ORTHOGONAL_SLACK = 1e-11  # singular values this close to 1 make an orthogonal matrix
NORM_SLACK = 1e-9  # norms up to 1 plus this are clipped to 1
MAX_SLACK = 0.02  # upper bound of the tolerance, for half precision


@dataclass(frozen=True)
class Factorisation:
    """M = (I - betas[0] v_0 v_0^T)(I - betas[1] v_1 v_1^T) ..., with v_i = vectors[i].

    `kind` is "permutation", "orthogonal" or "contraction"; `error` is the largest entry of |M - product|.
    Vectors have norm 1 and betas lie in [0, 2], except for permutations: their swaps are stored as
    v = e_i - e_j with beta = 1, which is exact. `unit()` converts them to vectors of norm 1.
    """

    kind: str
    betas: np.ndarray
    vectors: np.ndarray
    error: float

    def __len__(self) -> int:
        return len(self.betas)

    def __iter__(self):
        return iter(zip(self.betas.tolist(), self.vectors, strict=True))

    def product(self) -> np.ndarray:
        """The product of the factors."""
        return _product(self.betas, self.vectors)

    def eigenvalues(self) -> np.ndarray:
        """For every factor, the one eigenvalue that can differ from 1."""
        return 1 - self.betas * np.square(self.vectors).sum(axis=-1)

    def unit(self) -> "Factorisation":
        """The same factors with vectors of norm 1, as in Eq. 3."""
        norms = np.linalg.norm(self.vectors, axis=-1)
        return Factorisation(self.kind, self.betas * norms**2, self.vectors / norms[:, None], self.error)


def factor(M: object) -> Factorisation:
    """The generalised Householder factors of a square matrix M with spectral norm at most 1, in float64.

        permutation    n - cycles swaps, exact
        orthogonal     rank(M - I) <= n reflections, the fewest possible
        contraction    M = U S V^T = (U V^T)(V S V^T): at most n reflections, then I - (1 - s_i) v_i v_i^T
                       for every singular value s_i < 1, at most 2n in all

    For a matrix in a format of lower precision, "orthogonal" and "norm at most 1" hold up to its rounding.

    >>> cycle = factor([[0, 0, 1], [1, 0, 0], [0, 1, 0]])         # three points in a circle: two swaps
    >>> cycle.kind, cycle.vectors.shape
    ('permutation', (2, 3))
    """
    M, eps = _checked(M)
    n, slack = len(M), _rounding(len(M), eps)
    rows, columns = np.nonzero(M)
    if len(rows) == n and np.all(M[rows, columns] == 1) and len(set(columns)) == len(set(rows)) == n:
        permutation = [0] * n
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            permutation[column] = row
        vectors = np.array(swaps(tuple(permutation))).reshape(-1, n)
        return _finish("permutation", M, np.ones(len(vectors)), vectors)
    U, sigma, Vt = np.linalg.svd(M)
    excess, allowed = sigma[0] - 1, max(NORM_SLACK, slack)
    if excess > allowed:
        norm = f"{sigma[0]:.6g}, over 1 by {excess:.3g}" if excess > 1e-5 else f"1 + {excess:.3g}"
        raise UserError(
            f"factor: the matrix has norm {norm}, and products of generalised Householder matrices with "
            f"eigenvalues in [-1,1] have norm at most 1 (up to {allowed:.1g} more passes as rounding). "
            f"Divide it by its norm."
        )
    if np.abs(sigma - 1).max() <= max(ORTHOGONAL_SLACK, slack):
        vectors = _reflections(M, eps)
        return _finish("orthogonal", M, np.full(len(vectors), 2.0), vectors)
    mirrors = _reflections(U @ Vt)
    shrinks = 1 - np.minimum(sigma, 1)
    kept = shrinks > np.finfo(float).eps
    betas = np.concatenate([np.full(len(mirrors), 2.0), shrinks[kept]])
    return _finish("contraction", M, betas, np.concatenate([mirrors, Vt[kept]]))


def _checked(M: object) -> tuple[np.ndarray, float]:
    array, eps = real_array(M, "factor", "the matrix")
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.size == 0:
        raise UserError(f"factor: the matrix has shape {array.shape}, expected (n, n) with n of at least 1.")
    return array, eps


def _rounding(n: int, eps: float) -> float:
    """How far rounding to a format can move singular values away from 1; 0 for float64."""
    return min(8 * n * eps, MAX_SLACK) if eps > np.finfo(float).eps else 0.0


def _reflections(M: np.ndarray, eps: float = float(np.finfo(float).eps)) -> np.ndarray:
    """Unit vectors v_1, ..., v_r with M = (I - 2 v_1 v_1^T) ... (I - 2 v_r v_r^T), r = rank(M - I).

    M is the identity on the complement of the range of M - I, so it suffices to work in an orthonormal basis
    of that range. There Householder's QR takes r - 1 reflections, and one more if the last sign is negative.
    Each reflection changes M - I by rank one, so r is the minimum.
    """
    n = len(M)
    U, sigma, _ = np.linalg.svd(M - np.eye(n))
    basis = U[:, sigma > min(8 * eps * np.sqrt(n), MAX_SLACK)]
    R = basis.T @ M @ basis
    vectors = []
    for j in range(len(R)):
        x = R[j:, j]
        v = _mirror(x)
        if v is None:
            continue
        R[j:] -= 2 * np.outer(v, v @ R[j:])
        vectors.append(basis[:, j:] @ v)
    return np.array(vectors).reshape(-1, n)


def _mirror(x: np.ndarray) -> np.ndarray | None:
    """The unit vector whose reflection maps x to |x| e_1, without cancellation; None if x is |x| e_1."""
    rest = float(x[1:] @ x[1:])
    norm = np.sqrt(x[0] ** 2 + rest)
    v = x.copy()
    # x_1 - |x| = -rest / (x_1 + |x|) avoids cancellation when x_1 > 0.
    v[0] = -rest / (x[0] + norm) if x[0] > 0 else x[0] - norm
    length = np.linalg.norm(v)
    return None if length < np.finfo(float).tiny else v / length


def _product(betas: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    P = np.eye(vectors.shape[-1])
    for beta, v in zip(betas, vectors, strict=True):
        P = P - beta * np.outer(P @ v, v)
    return P


def _finish(kind: str, M: np.ndarray, betas: np.ndarray, vectors: np.ndarray) -> Factorisation:
    error = float(np.abs(_product(betas, vectors) - M).max())
    return Factorisation(kind, betas, vectors, error)
