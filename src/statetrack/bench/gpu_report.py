"""The comparison on a GPU: each op against its peer and against the lower bound of the hardware."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from statetrack.bench.cases import Work, check_chosen
from statetrack.bench.gpu_cases import GPU_CASES, GpuCase
from statetrack.bench.gpu_floor import Ceilings
from statetrack.bench.gpu_measure import (
    CAPTURED,
    first_call_seconds,
    measured_ceilings,
    seconds_from_python,
    seconds_in_graph,
    wake_triton,
)
from statetrack.bench.gpu_steps import (
    GPU_STEPS,
    PROTOCOL_STEPS,
    GpuTrainingStep,
    ProtocolStep,
    seconds_per_step,
)
from statetrack.errors import UserError
from statetrack.ops.backends import TRITON_IS_THERE

HEAD = (
    f"{'op and shape':<44}{'called':>9}{'peer':>9}{'ratio':>8}{'in graph':>10}{'peer':>9}{'ratio':>8}"
    f"{'floor':>8}{'x floor':>9}   (ms)"
)


def gpu_report(
    peers: bool, cold: bool, chosen: Callable[[str], bool], keep: Callable[[dict[str, Any]], None]
) -> None:
    """Measure and print the cases `chosen` by name; `keep` receives the results after each.

    First calls are reported only if `cold`: otherwise they depend on what the cache holds.
    """
    check_chosen(chosen, [case.name for case in (*GPU_CASES, *GPU_STEPS, *PROTOCOL_STEPS)])
    ceilings = measured_ceilings()
    if TRITON_IS_THERE:
        wake_triton()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: "
        f"{ceilings.bytes / 1e12:.2f} TB/s copied, "
        f"{ceilings.float32 / 1e12:.0f} TFLOP/s float32, {ceilings.matrix / 1e12:.0f} TFLOP/s bf16 products"
    )
    print(f"\n{HEAD}")
    report: dict[str, Any] = {"ceilings": asdict(ceilings), "calls_in_graph": CAPTURED}
    report |= {"ops": [], "steps": []}
    for case in GPU_CASES:
        if chosen(case.name):
            report["ops"].append(_op(case, ceilings, peers, cold))
            keep(report)
    _sign_costs(report["ops"])
    print(f"\n{'training step':<44}{'ours':>9}{'peer':>9}{'ratio':>8}{'floor':>10}   (ms)")
    for step in (*GPU_STEPS, *PROTOCOL_STEPS):
        if chosen(step.name):
            report["steps"].append(_step(step, ceilings, peers, cold))
            keep(report)
    if not cold:
        return
    print(f"\n{'first call of a shape':<44}{'ours':>9}{'peer':>9}{'ratio':>8}   (s)")
    for row in (*report["ops"], *report["steps"]):
        cells = [("ours_first_s", 9), ("peer_first_s", 9), ("first_ratio", 8)]
        print(f"{row['case']:<44}" + "".join(_cell(row.get(name), width) for name, width in cells))


def _op(case: GpuCase, ceilings: Ceilings, peers: bool, cold: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case.name, "peer": case.peer_name}
    row["floor_ms"] = 1e3 * case.floor.seconds(ceilings)
    row |= {"floor_bytes": case.floor.bytes, "floor_operations": case.floor.operations}
    works = _works(case, peers)
    row |= _first_calls(works, cold)
    for (who, work), called in zip(works.items(), seconds_from_python(list(works.values())), strict=True):
        row[f"{who}_called_ms"] = 1e3 * called
        row[f"{who}_graph_ms"] = 1e3 * seconds_in_graph(work, CAPTURED)
    for kind in ("called", "graph"):
        row[f"{kind}_ratio"] = _ratio(row, f"{kind}_ms")
    cells = [("ours_called_ms", 9), ("peer_called_ms", 9), ("called_ratio", 8)]
    cells += [("ours_graph_ms", 10), ("peer_graph_ms", 9), ("graph_ratio", 8), ("floor_ms", 8)]
    text = "".join(_cell(row.get(name), width) for name, width in cells)
    print(f"{case.name:<44}{text}{row['ours_graph_ms'] / row['floor_ms']:>9.1f}", flush=True)
    return row


def _sign_costs(rows: list[dict[str, Any]]) -> None:
    """Add to the rows of gates in [-1,1], and print, their times as a multiple of the same with [0,1]."""
    by_name = {row["case"]: row for row in rows}
    pairs = [
        (row, by_name.get(row["case"].replace("[-1,1]", "[0,1]"))) for row in rows if "[-1,1]" in row["case"]
    ]
    if any(unsigned for _, unsigned in pairs):
        print("\nours in [-1,1], as a multiple of its time in [0,1]:")
    for signed, unsigned in pairs:
        if unsigned:
            signed["sign_cost"] = signed["ours_graph_ms"] / unsigned["ours_graph_ms"]
            print(f"  {signed['case']:<42}{signed['sign_cost']:>9.2f}x")


def _step(
    step: GpuTrainingStep | ProtocolStep, ceilings: Ceilings, peers: bool, cold: bool
) -> dict[str, Any]:
    row: dict[str, Any] = {"case": step.name, "peer": step.peer_name}
    row["floor_ms"] = 1e3 * step.floor.seconds(ceilings) if step.floor else None
    works = _works(step, peers)
    row |= _first_calls(works, cold)
    for who, work in works.items():
        row[f"{who}_ms"] = 1e3 * seconds_per_step(work)
    row["ratio"] = _ratio(row, "ms")
    cells = [("ours_ms", 9), ("peer_ms", 9), ("ratio", 8), ("floor_ms", 10)]
    text = "".join(_cell(row.get(name), width) for name, width in cells)
    print(f"{step.name:<44}{text}", flush=True)
    return row


def _first_calls(works: dict[str, Work], cold: bool) -> dict[str, Any]:
    found: dict[str, Any] = {f"{who}_first_s": first_call_seconds(work) for who, work in works.items()}
    return found | {"first_ratio": _ratio(found, "first_s")} if cold else {}


def _works(case: GpuCase | GpuTrainingStep | ProtocolStep, peers: bool) -> dict[str, Work]:
    """The work of ours, and of the peer if it is requested and installed."""
    works = {"ours": case.ours()}
    if peers and not isinstance(case, ProtocolStep):
        try:
            works["peer"] = case.peer()
        except UserError as error:
            print(f"({error})")
    return works


def _ratio(row: dict[str, Any], kind: str) -> float | None:
    peer = row.get(f"peer_{kind}")
    return None if peer is None else peer / row[f"ours_{kind}"]


def _cell(value: float | None, width: int) -> str:
    return f"{'-' if value is None else f'{value:.3f}' if value < 10 else f'{value:.1f}':>{width}}"
