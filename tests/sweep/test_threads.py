"""The processor's threads are dealt out among the workers of a sweep."""

import json

import pytest
import torch
from test_local import jobs

from statetrack.sweep import sweep


@pytest.mark.slow
def test_workers_share_the_threads(tmp_path):
    """Two jobs, so two workers although three are allowed: of five threads each has two."""
    planned, before = jobs(tmp_path, 2), torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        assert sweep(planned, workers=3, device="cpu") == []
    finally:
        torch.set_num_threads(before)
    used = [json.loads((job.folder / "done.json").read_text())["machine"]["device"] for job in planned]
    assert used == ["CPU, 2 threads"] * 2
