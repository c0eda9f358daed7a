"""Minima as a GPU takes them, and small blocks for the chunked selective scan."""

import os

import numpy as np
import pytest

from statetrack.ops.selective_scan import blocked_scan


@pytest.fixture(autouse=True, scope="session")
def minima_as_on_a_gpu():
    """There, the minimum of NaN and a number is the number; Triton's interpreter gives NaN, and hides it."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder

    with pytest.MonkeyPatch.context() as patch:
        for name, function in (("create_minnumf", np.fmin), ("create_maxnumf", np.fmax)):
            patch.setattr(InterpreterBuilder, name, lambda self, x, y, f=function: self.binary_op(x, y, f))
        yield


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of two sequences and sixteen steps for D N = 24, so that small inputs need many."""
    monkeypatch.setitem(blocked_scan.STEP, "cpu", 64)
    monkeypatch.setitem(blocked_scan.BLOCK, "cpu", 0)
    assert blocked_scan.block_size(3, 6, 4) == (2, 16, None)


@pytest.fixture
def small_lanes(monkeypatch):
    """Blocks of sixteen steps in four lanes for three sequences with D N = 24."""
    monkeypatch.setattr(blocked_scan, "LANE", 4)
    monkeypatch.setitem(blocked_scan.STEP, "cpu", 24 * 3 * 32)
    assert blocked_scan.block_size(3, 6, 4) == (3, 16, 4)
