"""Theorems 1 and 2, on matrices and in finite precision."""

import re

import numpy as np
import pytest
import torch

from statetrack.automata import obstruct
from statetrack.errors import UserError


def householder(beta: float, v: list[float]) -> np.ndarray:
    unit = np.array(v) / np.linalg.norm(v)
    return np.eye(len(v)) - beta * np.outer(unit, unit)


def turn(angle: float) -> np.ndarray:
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


POSITIVE = [
    np.array([[0.5, 0.2], [0.0, 0.9]]),
    householder(0.7, [1, 2, 3]),
    householder(0.9, [1, 0]) @ householder(0.8, [1, 1]),  # two factors in [0,1]: Proposition 1.3
    np.eye(2),
]


@pytest.mark.parametrize("A", POSITIVE)
def test_nonnegative_eigenvalues_settle(A):
    # This B leads to the state 0.7 everywhere; without it float64 would shrink for thousands of steps.
    B = 0.7 * (np.eye(len(A)) - A) @ np.ones(len(A))
    found = obstruct.parity(A, B=B, steps=600, dtypes=("float16", "float32"))
    assert found.obstructed
    assert {t.period for t in found.trajectories if t.model == "cast"} == {1}


def test_a_sign_solves_parity():
    found = obstruct.parity([[-1.0]], B=[1.0], H0=[0.0])
    assert not found.obstructed
    assert "-1 is not a real number >= 0" in found.reason
    assert {t.period for t in found.trajectories} == {2}
    assert found.trajectories[0].states[:4, 0].tolist() == [0, 1, 0, 1]


def test_real_eigenvalues_alternate_and_cannot_count_to_three():
    swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    found = obstruct.counting(swap, 3, H0=[1.0, 0.0])
    assert found.obstructed
    assert {t.period for t in found.trajectories} == {2}
    assert not obstruct.counting(swap, 2).obstructed
    assert obstruct.counting(swap, 4).obstructed


def test_a_rotation_is_not_ruled_out():
    found = obstruct.counting(turn(2 * np.pi / 3), 3, dtypes=("float16",))
    assert not found.obstructed
    assert "off the real line" in found.reason
    assert {t.period for t in found.trajectories} == {3}


def test_a_second_layer_is_tested_on_products_of_two():
    mirrors = [householder(2.0, [1, 0]), householder(2.0, [1, 1])]
    assert obstruct.counting([mirrors], 3).obstructed
    assert not obstruct.counting([[[[-1.0]]], mirrors], 3).obstructed
    diagonal = [np.diag([-1.0, 0.5]), np.diag([1.0, -1.0])]
    assert obstruct.counting([diagonal, diagonal], 3).obstructed
    assert not obstruct.counting([diagonal, diagonal], 4).obstructed


def test_three_factors_in_0_1_can_leave_the_real_line():
    A = householder(1, [1, 0, 0]) @ householder(0.9, [1, 1, 0.2]) @ householder(0.9, [0.2, 1, 1])
    B = householder(0.99, [1, 0]) @ householder(0.9, [1, 1.5]) @ householder(0.9, [-1, 1.2])
    eigenvalues = np.concatenate([np.linalg.eigvals(A), np.linalg.eigvals(B)])
    assert np.all(np.abs(eigenvalues) <= 1 + 1e-12)
    assert np.any(np.abs(eigenvalues.imag) > 1e-3)


def test_sequential_rounding_can_show_a_period_the_theorem_excludes():
    found = obstruct.parity([[-0.03, -0.21], [0.07, 0.3]], B=[0.53, 1.52], dtypes=("float16",))
    assert found.obstructed  # the eigenvalues are 0.023 and 0.247
    assert [(t.model, t.period) for t in found.trajectories] == [("cast", 1), ("sequential", 2)]
    assert "sequential period 2 from step" in found.text()


SHIFT = np.diag(np.ones(7), 1)
DEFECTIVE = {"nilpotent": SHIFT, "one Jordan block": 0.5 * np.eye(8) + 0.4 * SHIFT}


def turned(A: np.ndarray, seed: int) -> np.ndarray:
    Q = np.linalg.qr(np.random.default_rng(seed).normal(size=A.shape))[0]
    return Q @ A @ Q.T


@pytest.mark.parametrize("name", DEFECTIVE)
@pytest.mark.parametrize("seed", range(5))
def test_defective_matrices_are_ruled_out_or_not_settled(name, seed):
    """Turned, their computed eigenvalues are off the line by up to 0.01; the true ones are 0 and 0.5."""
    A, short = DEFECTIVE[name], {"steps": 4, "dtypes": ("float32",)}
    assert obstruct.parity(A, **short).obstructed is True
    assert obstruct.counting(A, 3, **short).obstructed is True
    M = turned(A, seed)
    for found in (
        obstruct.parity(M, **short),
        obstruct.parity(M.astype(np.float32), **short),
        obstruct.counting(M, 3, **short),
    ):
        assert found.obstructed is None
        assert "not settled; the eigenvalue" in found.text()
    assert obstruct.counting(M, 2, **short).obstructed is False


def test_one_sure_eigenvalue_settles_a_defective_matrix():
    """-1 beside a Jordan block, and a Jordan block that is far from the half-line as a whole."""
    beside = np.diag([-1.0] + [0.5] * 7) + 0.4 * np.diag([0.0] + [1.0] * 6, 1)
    for A in (beside, DEFECTIVE["one Jordan block"] - np.eye(8)):
        assert obstruct.parity(turned(A, 0), steps=4).obstructed is False
    rotation = np.block([[turn(2.0), np.zeros((2, 8))], [np.zeros((8, 2)), SHIFT]])
    assert obstruct.counting(turned(rotation, 0), 3, steps=4).obstructed is False


def test_well_conditioned_matrices_are_always_settled():
    rng = np.random.default_rng(0)
    for _ in range(100):
        M = rng.normal(size=(6, 6)) / 2
        e = np.linalg.eigvals(M)
        expected = bool((np.abs(e.imag) < 1e-7).all() and (e.real > -1e-7).all())
        assert obstruct.parity(M, steps=1, dtypes=("float32",)).obstructed is expected


def test_tensors_and_numpy_numbers_are_welcome():
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], requires_grad=True)
    assert not obstruct.parity(swap, dtypes=(np.float16, torch.float32)).obstructed
    assert obstruct.counting([[swap]], np.int64(3), steps=np.int64(50), dtypes=np.float32).obstructed


def test_eventual_period_finds_start_and_length():
    rows = np.array([9, 8, 7] + [1, 2, 3] * 10)[:, None]
    assert obstruct.eventual_period(rows) == (3, 3)
    assert obstruct.eventual_period(np.arange(50)[:, None]) is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: obstruct.parity([[1.0, 2.0]]), "expected (n, n)"),
        (lambda: obstruct.parity([[np.nan]]), "not finite"),
        (lambda: obstruct.parity([[1.0]], B=[1.0, 2.0]), "B has shape (2,)"),
        (lambda: obstruct.parity([[1.0]], dtypes=("float8",)), "'float8' is not known"),
        (lambda: obstruct.counting([[1.0]], 0), "m is 0"),
        (lambda: obstruct.counting([[1.0]], 2.0), "m is 2.0"),
        (lambda: obstruct.counting([[1.0]], True), "m is True"),
        (lambda: obstruct.counting([], 3), "shape (0,)"),
        (lambda: obstruct.counting([[[]]], 3), "shape"),
        (lambda: obstruct.counting([np.full((2, 2), 1e300)] * 2, 3), "overflows"),
        (lambda: obstruct.parity(np.eye(2), steps=-1), "steps is -1"),
        (lambda: obstruct.parity(np.eye(2), steps=1.5), "steps is 1.5"),
        (lambda: obstruct.parity(np.eye(2), tolerance=-1), "tolerance is -1"),
        (lambda: obstruct.parity(np.eye(2), B=[0.0, np.nan]), "entry (1,) of B is nan"),
        (lambda: obstruct.parity(np.eye(2), H0=[np.inf, 0.0]), "entry (0,) of H0 is inf"),
        (lambda: obstruct.parity([[1j]]), "A has dtype complex128"),
        (lambda: obstruct.counting([[np.eye(2)] * 5] * 4, 3), "number more than"),
    ],
)
def test_mistakes_are_named(make, words):
    with pytest.raises(UserError, match=re.escape(words)):
        make()
