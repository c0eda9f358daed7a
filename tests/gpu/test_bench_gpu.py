"""The GPU benchmark itself: small cases, every column, and a file that grows with every case."""

import json

import pytest
import torch

from statetrack.bench import gpu_report
from statetrack.bench.gpu_cases import GpuDeltaRule, GpuGatedAttention, GpuGatedDelta, GpuSelectiveScan
from statetrack.commands.bench import BenchOptions, bench

pytestmark = pytest.mark.gpu


def test_every_op_is_timed_beside_its_floor(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # which `cold` sets: to be put back
    cases = [GpuDeltaRule(2, 20, 2, 32), GpuSelectiveScan(2, 20, 32, 4, torch.bfloat16)]
    for kind in (GpuGatedAttention, GpuGatedDelta):
        cases += [kind(1, 20, 2, 32, per_head, signed=True) for per_head in (False, True)]
    monkeypatch.setattr(gpu_report, "GPU_CASES", cases)
    monkeypatch.setattr(gpu_report, "GPU_STEPS", gpu_report.GPU_STEPS[:1])
    monkeypatch.setattr(gpu_report, "PROTOCOL_STEPS", gpu_report.PROTOCOL_STEPS[-1:])
    bench(BenchOptions(peers=False, cold=True, json=tmp_path / "bench.json"))
    written = json.loads((tmp_path / "bench.json").read_text())
    assert [row["case"] for row in written["ops"]] == [case.name for case in cases]
    for row in written["ops"]:
        assert 0 < row["floor_ms"] < row["ours_graph_ms"] < row["ours_first_s"] * 1e3
    assert len(written["steps"]) == 2
    assert all(0 < row["ours_ms"] < 50 for row in written["steps"])
    assert "training step" in capsys.readouterr().out
