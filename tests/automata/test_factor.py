"""Factorisations into generalised Householder matrices: counts and errors."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from statetrack.automata import factor
from statetrack.errors import UserError


def orthogonal(n: int, rng: np.random.Generator) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(n, n)))[0]


@given(permutation=st.permutations(range(9)))
def test_a_permutation_is_exactly_n_minus_cycles_swaps(permutation):
    P = np.eye(9)[permutation]
    found = factor(P)
    assert found.kind == "permutation"
    assert found.error == 0
    assert len(found) == np.linalg.matrix_rank(P - np.eye(9))
    assert np.array_equal(found.eigenvalues(), -np.ones(len(found)))
    assert np.allclose(found.unit().betas, 2)
    assert np.allclose(found.unit().product(), P)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 33, 128])
def test_an_orthogonal_matrix_is_rank_of_m_minus_i_reflections(n):
    rng = np.random.default_rng(n)
    for fixed in {0, n // 2, n - 1}:
        basis = orthogonal(n, rng)
        M = (
            basis[:, fixed:] @ orthogonal(n - fixed, rng) @ basis[:, fixed:].T
            + basis[:, :fixed] @ basis[:, :fixed].T
        )
        found = factor(M)
        assert found.error <= 4e-15
        assert len(found) == np.linalg.matrix_rank(M - np.eye(n), tol=1e-9) <= n
        assert np.all(found.betas == 2) or found.kind == "permutation"


@pytest.mark.parametrize("angle", [1e-3, 1e-8, 1e-12, np.pi])
def test_a_turn_in_one_plane_is_two_reflections_however_small(angle):
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(20, 2)))[0]
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    found = factor(np.eye(20) + basis @ (turn - np.eye(2)) @ basis.T)
    assert len(found) == 2
    assert found.error <= 4e-15


@pytest.mark.parametrize("n", [1, 2, 5, 64])
def test_a_contraction_is_at_most_2n_factors(n):
    rng = np.random.default_rng(n)
    for scale in (1.0, 0.3, 0.0):
        M = rng.normal(size=(n, n))
        found = factor(scale * M / np.linalg.norm(M, 2))
        assert found.error <= 5e-15
        assert len(found) <= 2 * n
        assert np.all(np.abs(found.eigenvalues()) <= 1 + 1e-12)
        assert np.allclose(np.linalg.norm(found.vectors, axis=1), 1)


def test_the_identity_needs_nothing_and_zero_needs_n():
    assert len(factor(np.eye(4))) == 0
    assert len(factor(np.zeros((4, 4)))) == 4


def test_tensors_and_lists_are_welcome():
    assert len(factor(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))) == 1
    assert [beta for beta, _ in factor([[0.5]])] == [0.5]


@pytest.mark.parametrize("n", [1, 2, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_orthogonal_up_to_the_rounding_of_the_format_they_come_in(n, dtype):
    M = torch.tensor(orthogonal(n, np.random.default_rng(n))).to(dtype).requires_grad_()
    found = factor(M)
    assert found.kind in ("orthogonal", "permutation")
    assert len(found) <= n
    assert found.error <= 4 * torch.finfo(dtype).eps


def test_one_float32_mirror_is_one_factor():
    v = orthogonal(20, np.random.default_rng(0))[0].astype(np.float32)
    assert len(factor(np.eye(20, dtype=np.float32) - 2 * np.outer(v, v))) == 1


def test_a_float32_matrix_of_norm_1_is_a_contraction():
    M = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    found = factor(M / np.linalg.norm(M, 2))
    assert found.kind == "contraction"
    assert found.error <= 1e-6


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        ([[1.0, 1.0], [0.0, 1.0]], "norm 1.61803, over 1 by 0.618"),
        ((1 + 2e-9) * np.eye(3), "norm 1 + 2e-09"),
        (np.float32(1.0001) * np.eye(3, dtype=np.float32), "norm 1.0001, over 1 by 0.0001"),
        ([[1e300, 1.0], [0.0, 1.0]], "norm 1e+300"),
        (np.zeros((2, 2), dtype=[("x", float)]), "has dtype [('x', '<f8')], expected real numbers"),
        (np.zeros((2, 2), dtype="datetime64[s]"), "has dtype datetime64[s]"),
        (np.array([[object()]]), "has dtype object"),
        ([[1.0, float("nan")], [0.0, 1.0]], "entry (0, 1) of the matrix is nan"),
        ([[1.0, 2.0]], "shape (1, 2)"),
        (np.zeros((0, 0)), "shape (0, 0)"),
        ([[1j]], "complex"),
        ("abc", "has dtype <U3, expected real numbers"),
    ],
)
def test_mistakes_are_named(matrix, words):
    with pytest.raises(UserError, match=re.escape(words)):
        factor(matrix)
