"""Small blocks for the chunked selective scan."""

import pytest

from statetrack.ops.selective_scan import blocked_scan


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
