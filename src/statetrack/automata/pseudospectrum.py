"""How far an eigenvalue can be trusted: what rounding of the matrix alone could do to it.

A defective matrix answers a change of size delta with eigenvalues that move by delta^(1/n): the nilpotent
shift of size 8, turned by an orthogonal matrix, has computed eigenvalues of modulus 0.01 all around 0.
"""

from collections.abc import Sequence

import numpy as np

RADII = (0.9, 0.6, 0.3, 0.1)
POINTS = 32
TRIED = 8


def rounding(word: Sequence[np.ndarray], eps: float) -> float:
    """The size of a change to the product of these matrices that rounding alone may make, in norm."""
    norm = 1.0
    for M in word:
        norm *= float(np.linalg.norm(M, 2))
    return 4 * len(word[0]) * len(word) * eps * norm


def surely_off(M: np.ndarray, e: complex, distance: float, delta: float) -> bool:
    """Whether every matrix within `delta` of M has an eigenvalue nearer to e than `distance`.

    That is so if a circle around e with a smaller radius has |(M - z)^-1| < 1 / delta everywhere on it: no
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
    """An eigenvalue whose distance from the allowed set is no rounding, and whether that is sure.

    (None, True) if all are within `tolerance` of the set, as far as computed. (e, False) if e is not, and
    rounding of M could have put it there.
    """
    # What rounding does to the best of eigenvalues, it does to all.
    off = np.flatnonzero(distances > max(tolerance, delta))
    off = off[np.argsort(-distances[off], kind="stable")]
    # They come in conjugate pairs, of which one will do.
    upper = [i for i in off if np.imag(eigenvalues[i]) >= 0]
    for i in upper[:TRIED]:
        if surely_off(M, complex(eigenvalues[i]), float(distances[i]), delta):
            return complex(eigenvalues[i]), True
    return (complex(eigenvalues[upper[0]]), False) if upper else (None, True)
