"""How accurate computed eigenvalues are: how far rounding of the matrix alone could move them.

A perturbation of size delta moves the eigenvalues of a defective matrix by delta^(1/n): the nilpotent shift
of size 8, conjugated by an orthogonal matrix, has computed eigenvalues of modulus 0.01 around 0.
"""

from collections.abc import Sequence

import numpy as np

RADII = (0.9, 0.6, 0.3, 0.1)
POINTS = 32
TRIED = 8


def rounding(word: Sequence[np.ndarray], eps: float) -> float:
    """A bound, in norm, on how much rounding can change the product of these matrices."""
    norm = 1.0
    for M in word:
        norm *= float(np.linalg.norm(M, 2))
    return 4 * len(word[0]) * len(word) * eps * norm


def surely_off(M: np.ndarray, e: complex, distance: float, delta: float) -> bool:
    """Whether every matrix within `delta` of M has an eigenvalue nearer to e than `distance`.

    That holds if |(M - z)^-1| < 1 / delta everywhere on a circle around e with a smaller radius: no
    eigenvalue can cross it while M changes, and e is inside. The circle is sampled at a few points.
    """
    turns = np.exp(2j * np.pi * np.arange(POINTS) / POINTS)
    for radius in RADII:
        z = e + radius * distance * turns
        smallest = np.linalg.svd(M - z[:, None, None] * np.eye(len(M)), compute_uv=False)[:, -1]
        if smallest.min() > delta:
            return True
    return False


def find_off(
    M: np.ndarray, eigenvalues: np.ndarray, distances: np.ndarray, delta: float, tolerance: float
) -> tuple[complex | None, bool]:
    """An eigenvalue outside the allowed set, and whether it is certain that rounding did not put it there.

    (None, True) if all computed eigenvalues are within `tolerance` of the set. (e, False) if e is not, but
    rounding of M could explain it.
    """
    # Even well-conditioned eigenvalues have this error.
    off = np.flatnonzero(distances > max(tolerance, delta))
    off = off[np.argsort(-distances[off], kind="stable")]
    # Eigenvalues come in conjugate pairs; one of each pair suffices.
    upper = [i for i in off if np.imag(eigenvalues[i]) >= 0]
    for i in upper[:TRIED]:
        if surely_off(M, complex(eigenvalues[i]), float(distances[i]), delta):
            return complex(eigenvalues[i]), True
    return (complex(eigenvalues[upper[0]]), False) if upper else (None, True)
