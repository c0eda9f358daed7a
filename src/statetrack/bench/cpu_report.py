"""The comparison on a CPU: time and peak memory as ratios to the peer, and how cost grows with length.

Ours is the backend that "auto" selects, the native kernels where they were built; "chunked", the plain
PyTorch backend, is timed as well.
"""

from collections.abc import Callable
from typing import Any

import torch

from statetrack.bench.cases import CPU_CASES, Case, check_chosen, growth_cases, signed_case
from statetrack.bench.measure import median_seconds, peak_bytes
from statetrack.errors import UserError
from statetrack.ops.native import library
from statetrack.provenance import processor


def cpu_report(
    peers: bool,
    threads: int,
    seconds: float,
    growth: bool,
    chosen: Callable[[str], bool],
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Measure and print the cases `chosen` by name, in float32; `keep` receives the results after each."""
    check_chosen(chosen, [case.name for case in CPU_CASES])
    torch.set_num_threads(threads)
    report: dict[str, Any] = {"comparisons": [], "growth": []}
    print(f"{processor()}, {threads} threads, torch {torch.__version__}, float32")
    print(f"native kernels: {library.ABSENT or library.INSTRUCTIONS}")
    columns = (
        f"{'ours':>9}{'chunked':>9}{'peer ms':>9}{'faster':>8}{'chunked':>9}{'ours MB':>9}{'peer MB':>9}"
    )
    print(f"\n{'op and shape':<34}{columns}  peer")
    for case in filter(lambda case: chosen(case.name), CPU_CASES):
        row = compare(case, seconds, peers)
        report["comparisons"].append(row)
        print(_line(row))
        keep(report)
    signed = [row for row in report["comparisons"] if "sign_cost" in row]
    if signed:
        print("\nours in [-1,1], as a multiple of its time in [0,1]:")
        for row in signed:
            print(f"  {row['case']:<32}{row['sign_cost']:>9.2f}x")
    for cases in growth_cases() if growth else ():
        if chosen(cases[0].name):
            report["growth"].append(_growth(cases, seconds / 3))
            keep(report)


def compare(case: Case, seconds: float, peers: bool = True) -> dict[str, Any]:
    """Times and memory of ours and the peer, and their ratios; without the peer if it is not installed."""
    signed = signed_case(case)
    contenders = [case.ours(), case.ours("chunked"), *([signed.ours()] if signed else [])]
    try:
        contenders += [case.peer()] if peers else []
    except UserError as error:
        print(f"({error})")
    times = median_seconds(contenders, seconds)
    sign = {"sign_cost": times.pop(2) / times[0]} if signed else {}
    row: dict[str, Any] = {"case": case.name, "peer": case.peer_name}
    row |= {"ours_ms": 1e3 * times[0], "chunked_ms": 1e3 * times[1], "ours_bytes": peak_bytes(case, "ours")}
    row |= sign
    if len(times) > 2:
        row |= {
            "peer_ms": 1e3 * times[2],
            "speedup": times[2] / times[0],
            "chunked_speedup": times[2] / times[1],
            "peer_bytes": peak_bytes(case, "peer"),
        }
    return row


def _line(row: dict[str, Any]) -> str:
    def cell(value: float | None, width: int, text: str) -> str:
        return f"{'-' if value is None else text.format(value):>{width}}"

    ours, theirs = row["ours_bytes"], row.get("peer_bytes")
    return (
        f"{row['case']:<34}{row['ours_ms']:>9.1f}{row['chunked_ms']:>9.1f}"
        f"{cell(row.get('peer_ms'), 9, '{:.1f}')}{cell(row.get('speedup'), 8, '{:.1f}x')}"
        f"{cell(row.get('chunked_speedup'), 9, '{:.1f}x')}{cell(ours and ours / 2**20, 9, '{:.0f}')}"
        f"{cell(theirs and theirs / 2**20, 9, '{:.0f}')}  {row['peer']}"
    )


def _growth(cases: list[Case], seconds: float) -> dict[str, Any]:
    """Microseconds per token against length: flat means linear cost."""
    print(f"\n{cases[0].name.split()[0]}, {' '.join(cases[0].name.split()[3:])}, one sequence:")
    rows = []
    for case in cases:
        (time,) = median_seconds([case.ours()], seconds, min_rounds=3)
        rows.append({"T": case.T, "ms": 1e3 * time, "us_per_token": 1e6 * time / case.T})
        print(f"  T {case.T:>6}  {1e3 * time:>9.1f} ms  {1e6 * time / case.T:>6.2f} us per token")
    return {"op": cases[0].name, "rows": rows}
