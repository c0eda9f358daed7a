"""Matrices as products of generalised Householder matrices: Proposition 1, with 2n factors, not 3n."""

from dataclasses import dataclass

import numpy as np

from statetrack.automata.actions import swaps
from statetrack.automata.numbers import real_array
from statetrack.errors import UserError

# In float64; coarser formats get more, see `_rounding`.
ORTHOGONAL_SLACK = 1e-11  # singular values this close to 1 make an orthogonal matrix
NORM_SLACK = 1e-9  # norms up to 1 plus this are rounding, and clipped
MOST_SLACK = 0.02  # what half precision gets at most


@dataclass(frozen=True)
class Factorisation:
    """M = (I - betas[0] v_0 v_0^T)(I - betas[1] v_1 v_1^T) ..., with v_i = vectors[i].

    `error` is the largest entry of |M - product|.

    Vectors have norm 1 and betas lie in [0, 2], but for permutations: their swaps are kept as v = e_i - e_j
    with beta = 1, which is exact. `unit()` gives them in the common form.
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
        """The one eigenvalue of every factor that need not be 1."""
        return 1 - self.betas * np.square(self.vectors).sum(axis=-1)

    def unit(self) -> "Factorisation":
        """The same factors with vectors of norm 1, as in Eq. 3."""
        norms = np.linalg.norm(self.vectors, axis=-1)
        return Factorisation(self.kind, self.betas * norms**2, self.vectors / norms[:, None], self.error)


def factor(M: object) -> Factorisation:
    """Factors of a square matrix of Euclidean norm at most 1, in float64.

    A matrix in a coarser format is orthogonal, and of norm 1, up to the rounding of that format.

    permutation    n - cycles swaps, exact
    orthogonal     rank(M - I) <= n reflections, the fewest possible
    contraction    M = U S V^T = (U V^T)(V S V^T): at most n reflections, then I - (1 - s_i) v_i v_i^T
                   for every singular value s_i < 1, at most 2n in all
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
    """What rounding to a format may add to singular values of 1; nothing is added for float64's own."""
    return min(8 * n * eps, MOST_SLACK) if eps > np.finfo(float).eps else 0.0


def _reflections(M: np.ndarray, eps: float = float(np.finfo(float).eps)) -> np.ndarray:
    """Unit vectors v_1, ..., v_r with M = (I - 2 v_1 v_1^T) ... (I - 2 v_r v_r^T), r = rank(M - I).

    M is the identity on the complement of the range of M - I, so the work happens in an orthonormal basis of
    that range. There Householder's QR needs r - 1 reflections and perhaps one for the last sign; since each
    reflection moves one dimension at most, no fewer than r would do.
    """
    n = len(M)
    U, sigma, _ = np.linalg.svd(M - np.eye(n))
    basis = U[:, sigma > min(8 * eps * np.sqrt(n), MOST_SLACK)]
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
    """The unit vector whose reflection takes x to |x| e_1, without cancellation; None if x is there."""
    rest = float(x[1:] @ x[1:])
    norm = np.sqrt(x[0] ** 2 + rest)
    v = x.copy()
    # x_1 - |x| = -rest / (x_1 + |x|) keeps its digits when x_1 > 0.
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
