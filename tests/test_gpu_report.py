"""What the GPU benchmark prints and keeps, its clocks replaced."""

from types import SimpleNamespace

import pytest
import torch

from statetrack.bench import gpu_report
from statetrack.bench.gpu_floor import Ceilings
from statetrack.bench.gpu_steps import ProtocolStep


class Alone(ProtocolStep):
    def ours(self):
        return "ours"


@pytest.mark.parametrize("cold", [False, True])
def test_first_calls_are_told_only_from_an_empty_cache(cold, monkeypatch, capsys):
    def stand_in(case):
        return SimpleNamespace(
            name=case.name,
            peer_name=case.peer_name,
            floor=case.floor,
            ours=lambda: "ours",
            peer=lambda: "peer",
        )

    seconds = {"ours": 1e-3, "peer": 4e-3}
    clocks = {
        "GPU_CASES": [stand_in(case) for case in gpu_report.GPU_CASES],
        "GPU_STEPS": [stand_in(step) for step in gpu_report.GPU_STEPS],
        "PROTOCOL_STEPS": [Alone(step.name, step.spec) for step in gpu_report.PROTOCOL_STEPS],
        "TRITON_IS_THERE": False,
        "measured_ceilings": lambda: Ceilings(4e12, 5e13, 8e14, 3e12),
        "first_call_seconds": lambda work: 1e3 * seconds[work],
        "seconds_from_python": lambda works: [seconds[work] for work in works],
        "seconds_in_graph": lambda work, calls: seconds[work],
        "seconds_per_step": lambda work: seconds[work],
    }
    for name, value in clocks.items():
        monkeypatch.setattr(gpu_report, name, value)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    kept = []
    gpu_report.gpu_report(True, cold, lambda name: True, kept.append)
    steps = kept[-1]["steps"]
    with_peer, alone = steps[: len(gpu_report.GPU_STEPS)], steps[len(gpu_report.GPU_STEPS) :]
    assert [row["case"] for row in alone] == [step.name for step in gpu_report.PROTOCOL_STEPS]
    assert all(row["ours_ms"] == 1.0 and row["ratio"] is None for row in alone)
    rows = [*kept[-1]["ops"], *with_peer]
    assert len(rows) == len(gpu_report.GPU_CASES) + len(gpu_report.GPU_STEPS)
    assert all(row.get("first_ratio") == (4.0 if cold else None) for row in rows)
    assert all(row["called_ratio"] == row["graph_ratio"] == 4.0 for row in kept[-1]["ops"])
    assert all(row["ratio"] == 4.0 for row in with_peer)
    costs = {row["case"]: row["sign_cost"] for row in kept[-1]["ops"] if "sign_cost" in row}
    assert set(costs) == {row["case"] for row in kept[-1]["ops"] if "[-1,1]" in row["case"]}
    assert set(costs.values()) == {1.0}
    assert ("first call of a shape" in capsys.readouterr().out) == cold
