"""The examples in the docstrings of the ops run, and print what they say."""

import doctest

import pytest

from statetrack.ops.selective_scan import selective_scan
from statetrack.ops.short_convolution import short_convolution


@pytest.mark.parametrize("op", [selective_scan, short_convolution], ids=lambda op: op.__name__)
def test_the_example_of_the_docstring_prints_what_it_says(op):
    (example,) = doctest.DocTestFinder().find(op, op.__name__, globs={})
    result = doctest.DocTestRunner().run(example)
    assert result.attempted > 0
    assert result.failed == 0
