"""The examples in the docstrings of the ops run, and print what they say."""

import doctest

import pytest
import torch

from statetrack import (
    delta_rule,
    gated_linear_attention,
    generalised_delta_rule,
    mlstm,
    selective_scan,
    short_convolution,
    slstm,
)

OPS = [delta_rule, gated_linear_attention, generalised_delta_rule, mlstm, selective_scan, short_convolution, slstm]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_the_example_of_the_docstring_prints_what_it_says(op):
    (example,) = doctest.DocTestFinder().find(op, op.__name__, globs={"torch": torch, op.__name__: op})
    result = doctest.DocTestRunner().run(example)
    assert result.attempted > 2
    assert result.failed == 0
