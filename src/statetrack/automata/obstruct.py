"""Theorems 1 and 2 applied to given matrices, with the state trajectories in finite precision.

Both theorems consider the words 1^k. If all eigenvalues of every A a layer can use are real and non-negative,
the rounded state becomes constant and parity cannot be computed; if they are real, it eventually alternates
between two values, and a stack of L layers reaches the periods 1, 2, 4, ..., 2^L only.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from statetrack.automata.numbers import dtype_name, real_array, whole_number
from statetrack.automata.pseudospectrum import find_off, rounding
from statetrack.errors import UserError

__all__ = ["Obstruction", "Trajectory", "counting", "eventual_period", "parity"]

DTYPES = ("float16", "float32", "float64")
TOLERANCE = 1e-7  # eigenvalues this close to the real line count as real
PRODUCT_CAP = 4096
DOUBT_CAP = 32  # products with uncertain eigenvalues after which the search for a certain one ends
UNSETTLED = " as computed, but rounding of the matrix could have moved it there: not settled numerically"


@dataclass(frozen=True)
class Trajectory:
    """The state on 1^k for k = 0, 1, ..., in one format.

    The model "cast" is the idealisation of the proofs: products and sums in high precision, rounded once
    each. The model "sequential" rounds after every step, as hardware does. Its rounded map is a finite
    automaton that can have periods the theorems exclude, because rounding errors can keep a decaying state
    from converging. `settles_at` and `period` are None if no period of up to 64 was found within the steps.
    """

    dtype: str
    model: str
    states: np.ndarray
    settles_at: int | None
    period: int | None


@dataclass(frozen=True)
class Obstruction:
    """The result of `parity` and `counting`: whether the theorem excludes the task, and the reason.

    `obstructed` is None where floating-point numbers cannot decide it: an eigenvalue is off the line that the
    theorem requires, but rounding a matrix with all eigenvalues on the line could give the same result. Such
    matrices are (nearly) defective.
    """

    theorem: str
    obstructed: bool | None
    reason: str
    eigenvalues: list[np.ndarray]
    trajectories: list[Trajectory]

    def text(self) -> str:
        """The result as text for a terminal."""
        verdict = {True: "ruled out", False: "not ruled out", None: "not settled"}[self.obstructed]
        lines = [f"{self.theorem}: {verdict}; {self.reason}."]
        for t in self.trajectories:
            end = (
                "no period of up to 64 yet"
                if t.period is None
                else f"period {t.period} from step {t.settles_at}"
            )
            lines.append(f"  {t.dtype:<8} {t.model:<10} {end}")
        return "\n".join(lines)


def parity(
    A: object,
    B: object = None,
    H0: object = None,
    *,
    steps: int = 1000,
    dtypes: Sequence[str] = DTYPES,
    tolerance: float = TOLERANCE,
) -> Obstruction:
    """Theorem 1: can layers with these matrices A(x) recognise (11)*? One matrix, or a stack of them.

    They can only if some eigenvalue is not a real number >= 0. The trajectories use the first matrix as
    A(1), with B(1) = B (default 0) and H_0 = H0 (default all ones).

        print(parity([[0.9]]).text())     Theorem 1 (parity): ruled out; every eigenvalue is ...
    """
    matrices, eps = _checked("parity", A)
    eigenvalues, off, sure = _search("parity", [(M,) for M in matrices], eps, tolerance, _from_half_line)
    if off is None:
        reason = "every eigenvalue is real and >= 0, so the rounded state on 1^k settles and parity does not"
    else:
        reason = f"the eigenvalue {_shown(off)} is not a real number >= 0{'' if sure else UNSETTLED}"
    paths = _trajectories("parity", matrices[0], B, H0, steps, dtypes)
    return Obstruction("Theorem 1 (parity)", off is None if sure else None, reason, eigenvalues, paths)


def counting(
    layers: object,
    m: int,
    B: object = None,
    H0: object = None,
    *,
    steps: int = 1000,
    dtypes: Sequence[str] = DTYPES,
    tolerance: float = TOLERANCE,
) -> Obstruction:
    """Theorem 2: can a stack of layers with these matrices recognise (1^m)*?

    `layers` is one matrix, or for every layer the list of its matrices. Layer i is tested on all products
    of 2^(i-1) of its matrices: the periods of the layers below produce such products. Counting modulo an m
    that is not a power of two needs a product with an eigenvalue off the real line. The trajectories are
    those of the first layer's first matrix.
    """
    modulus = whole_number(m)
    if modulus is None or modulus < 1:
        raise UserError(f"obstruct.counting: m is {m!r}, expected a whole number of at least 1.")
    # One matrix has rows of numbers; a list of layers has matrices, or lists of them.
    given = layers if isinstance(layers, list | tuple) and _depth(layers) > 2 else [layers]
    checked = [_checked("counting", layer) for layer in given]
    stacks, eps = [matrices for matrices, _ in checked], max(eps for _, eps in checked)
    words: list[tuple[np.ndarray, ...]] = []
    for i, matrices in enumerate(stacks):
        length = 2**i
        if len(matrices) ** length > PRODUCT_CAP:
            raise UserError(
                f"obstruct.counting: layer {i + 1} has {len(matrices)} matrices, and their products of "
                f"{length} number more than {PRODUCT_CAP}. Give it fewer, or test fewer layers."
            )
        words += product(matrices, repeat=length)
    eigenvalues, off, sure = _search("counting", words, eps, tolerance, _from_real_line)
    reachable = modulus & (modulus - 1) == 0 and modulus <= 2 ** len(stacks)
    if off is not None and (sure or not reachable):
        reason = f"the eigenvalue {_shown(off)} is off the real line{'' if sure else UNSETTLED}"
    elif reachable:
        reason = f"{m} is a power of two up to 2^{len(stacks)}, which real eigenvalues can reach"
    else:
        periods = " or ".join(str(2**i) for i in range(len(stacks) + 1))
        reason = f"every eigenvalue is real, so the state on 1^k has period {periods}"
    paths = _trajectories("counting", stacks[0][0], B, H0, steps, dtypes)
    obstructed = False if reachable else (off is None if sure else None)
    return Obstruction(f"Theorem 2 (counting modulo {m})", obstructed, reason, eigenvalues, paths)


def eventual_period(states: np.ndarray, longest: int = 64) -> tuple[int, int] | None:
    """(start, period) of the periodic end of a sequence of states (steps, ...), or None if there is none.

    A period up to `longest` counts if the end holds at least three repetitions and 16 entries past the first.
    """
    rows = [row.tobytes() for row in np.ascontiguousarray(states)]
    for period in range(1, min(longest, len(rows) // 3) + 1):
        start = len(rows) - period
        while start > 0 and rows[start - 1] == rows[start - 1 + period]:
            start -= 1
        if len(rows) - start >= max(3 * period, period + 16):
            return start, period
    return None


def _search(
    function: str,
    words: Sequence[tuple[np.ndarray, ...]],
    eps: float,
    tolerance: float,
    distance: Callable[[np.ndarray], np.ndarray],
) -> tuple[list[np.ndarray], complex | None, bool]:
    """The eigenvalues of every product, one off the line (None if none is), and whether that is certain."""
    if not isinstance(tolerance, int | float | np.number) or not tolerance >= 0:
        raise UserError(f"obstruct.{function}: tolerance is {tolerance!r}, expected a number of at least 0.")
    eigenvalues: list[np.ndarray] = []
    doubtful: list[complex] = []
    certain: complex | None = None
    for word in words:
        with np.errstate(over="ignore", invalid="ignore"):
            M = word[0] if len(word) == 1 else np.linalg.multi_dot(word)
        if not np.isfinite(M).all():
            raise UserError(
                f"obstruct.{function}: a product of {len(word)} matrices overflows; scale them down."
            )
        eigenvalues.append(np.linalg.eigvals(M))
        if certain is None and len(doubtful) < DOUBT_CAP:
            found = eigenvalues[-1]
            off, sure = find_off(M, found, distance(found), rounding(word, eps), tolerance)
            if sure:
                certain = off
            elif off is not None:
                doubtful.append(off)
    if certain is None and doubtful:
        return eigenvalues, doubtful[0], False
    return eigenvalues, certain, True


def _from_half_line(e: np.ndarray) -> np.ndarray:
    return np.where(np.real(e) >= 0, np.abs(np.imag(e)), np.abs(e))


def _from_real_line(e: np.ndarray) -> np.ndarray:
    return np.abs(np.imag(e))


def _depth(value: object) -> int:
    """The number of axes, as far as the first entries tell."""
    if isinstance(value, list | tuple):
        return 1 + (_depth(value[0]) if value else 0)
    return getattr(value, "ndim", 0)


def _checked(function: str, A: object) -> tuple[list[np.ndarray], float]:
    """A matrix or a stack of them as a list of float64 matrices, and the eps of the format they came in."""
    stack, eps = real_array(A, f"obstruct.{function}", "A")
    if stack.ndim == 2:
        stack = stack[None]
    if stack.ndim != 3 or stack.shape[1] != stack.shape[2] or stack.size == 0:
        raise UserError(
            f"obstruct.{function}: the matrices have shape {stack.shape}, expected (n, n) or (number, n, n)."
        )
    return list(stack), eps


def _trajectories(
    function: str, A: np.ndarray, B: object, H0: object, steps: int, dtypes
) -> list[Trajectory]:
    n, length = len(A), whole_number(steps)
    if length is None or length < 0:
        raise UserError(f"obstruct.{function}: steps is {steps!r}, expected a whole number of at least 0.")
    b = np.zeros(n) if B is None else real_array(B, f"obstruct.{function}", "B")[0]
    h = np.ones(n) if H0 is None else real_array(H0, f"obstruct.{function}", "H0")[0]
    if b.shape[:1] != (n,) or h.shape != b.shape:
        raise UserError(
            f"obstruct.{function}: B has shape {b.shape} and H0 {h.shape}, expected ({n},) or ({n}, d) each."
        )
    several = isinstance(dtypes, Iterable) and not isinstance(dtypes, str)
    names = [dtype_name(dtype) for dtype in (dtypes if several else [dtypes])]
    unknown = [name for name in names if name not in DTYPES]
    if unknown:
        raise UserError(
            f"obstruct.{function}: dtype {unknown[0]!r} is not known. Known: {', '.join(DTYPES)}."
        )
    paths = []
    for name in names:
        for model, run in (("cast", _cast_model), ("sequential", _sequential_model)):
            states = run(A, b, h, length, np.dtype(name))
            found = eventual_period(states) or (None, None)
            paths.append(Trajectory(name, model, states, *found))
    return paths


def _cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round to the nearest number of the format; overflow gives its largest number."""
    largest = np.finfo(dtype).max
    return np.clip(x, -np.longdouble(largest), np.longdouble(largest)).astype(dtype)


def _cast_model(A: np.ndarray, b: np.ndarray, h: np.ndarray, steps: int, dtype: np.dtype) -> np.ndarray:
    """cast(sum_{i<k} cast(A^i B) + cast(A^k H_0)), with products and sums in long double."""
    wide = np.longdouble
    A, power_b, power_h = A.astype(wide), b.astype(wide), h.astype(wide)
    total, states = np.zeros_like(power_b), []
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for _ in range(steps + 1):
            states.append(_cast(total + _cast(power_h, dtype).astype(wide), dtype))
            total = total + _cast(power_b, dtype).astype(wide)
            power_b, power_h = A @ power_b, A @ power_h
    return np.stack(states)


def _sequential_model(A: np.ndarray, b: np.ndarray, h: np.ndarray, steps: int, dtype: np.dtype) -> np.ndarray:
    """h <- A h + B with every number in the format."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        A, b, state = A.astype(dtype), b.astype(dtype), h.astype(dtype)
        states = [state]
        for _ in range(steps):
            state = (A @ state + b).astype(dtype)
            states.append(state)
    return np.stack(states)


def _shown(e: complex) -> str:
    return f"{e.real:.4g}" if abs(e.imag) < 1e-12 else f"{e.real:.4g}{e.imag:+.4g}i"
