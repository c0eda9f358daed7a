"""The logistic function in PTX, carried out on the CPU; the interpreter takes the plain formula instead."""

import numpy as np
from ptx import carry_out

from statetrack.ops.triton_runtime import sigmoid as module


def sigmoid(y):
    with np.errstate(over="ignore", divide="ignore"):
        return carry_out(module.SIGMOID.value, 1, [y.view(np.uint32)])[0].view(np.float32)


def test_the_program_is_the_logistic_function():
    y = np.linspace(-80, 80, 4001).astype(np.float32)
    expected = 1 / (1 + np.exp(-y.astype(np.float64)))
    # the product with log2 e is rounded: an error of 2^-24 of the exponent, which is 115 here
    np.testing.assert_allclose(sigmoid(y), expected, rtol=2e-5)
    near = np.abs(y) <= 8
    np.testing.assert_allclose(sigmoid(y)[near], expected[near], rtol=2e-6)


def test_it_ends_at_zero_and_one_and_keeps_what_is_no_number():
    ends = sigmoid(np.array([-np.inf, -200.0, 200.0, np.inf, np.nan], np.float32))
    np.testing.assert_array_equal(ends, np.array([0, 0, 1, 1, np.nan], np.float32))
