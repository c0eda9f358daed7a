"""statetrack bench: the recurrences against what people use on a CPU, and how cost grows with length."""

import datetime
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from statetrack.bench.cases import CPU_CASES, Case, growth_cases
from statetrack.bench.measure import median_seconds, peak_bytes
from statetrack.commands.flags import parse
from statetrack.errors import UserError
from statetrack.files import write_json
from statetrack.run import processor


@dataclass(frozen=True)
class BenchOptions:
    """Forward and backward on the CPU, float32: time and peak memory as ratios to the peer, in one run."""

    threads: int = 2
    seconds: float = 3.0  # per comparison
    growth: bool = True  # also time lengths from 1k to 64k
    json: Path | None = None  # write everything measured to this file


def main(arguments: Sequence[str]) -> None:
    options = parse(BenchOptions, arguments, "statetrack bench")
    if options.threads < 1 or options.seconds < 0:
        raise UserError(
            f"bench: threads is {options.threads} and seconds {options.seconds}, expected at least 1 and 0."
        )
    torch.set_num_threads(options.threads)
    # transformers advises against its fallback, which is what is timed here
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    report = {"machine": machine(), "comparisons": [], "growth": []}
    print(f"{report['machine']['cpu']}, {options.threads} threads, torch {torch.__version__}, float32")
    print(
        f"\n{'op and shape':<34}{'ours ms':>9}{'peer ms':>9}{'faster':>8}{'ours MB':>9}{'peer MB':>9}  peer"
    )
    for case in CPU_CASES:
        row = compare(case, options.seconds)
        report["comparisons"].append(row)
        print(_line(row))
    if options.growth:
        for cases in growth_cases():
            report["growth"].append(_growth(cases, options.seconds / 3))
    if options.json:
        write_json(options.json, report)
        print(f"\nWritten to {options.json}")


def compare(case: Case, seconds: float) -> dict[str, Any]:
    """Our time and memory, the peer's, and their ratios; the peer is left out where it is not installed."""
    contenders = [case.ours()]
    try:
        contenders.append(case.peer())
    except UserError as error:
        print(f"({error})")
    times = median_seconds(contenders, seconds)
    row: dict[str, Any] = {"case": case.name, "peer": case.peer_name, "ours_ms": 1e3 * times[0]}
    row["ours_bytes"] = peak_bytes(case, "ours")
    if len(times) > 1:
        row |= {
            "peer_ms": 1e3 * times[1],
            "speedup": times[1] / times[0],
            "peer_bytes": peak_bytes(case, "peer"),
        }
    return row


def _line(row: dict[str, Any]) -> str:
    def cell(value: float | None, width: int, text: str) -> str:
        return f"{'-' if value is None else text.format(value):>{width}}"

    ours, theirs = row["ours_bytes"], row.get("peer_bytes")
    return (
        f"{row['case']:<34}{row['ours_ms']:>9.1f}{cell(row.get('peer_ms'), 9, '{:.1f}')}"
        f"{cell(row.get('speedup'), 8, '{:.1f}x')}{cell(ours and ours / 2**20, 9, '{:.0f}')}"
        f"{cell(theirs and theirs / 2**20, 9, '{:.0f}')}  {row['peer']}"
    )


def _growth(cases: list[Case], seconds: float) -> dict[str, Any]:
    """Microseconds per token against length: flat means linear cost."""
    print(f"\n{cases[0].name.split()[0]}, {' '.join(cases[0].name.split()[3:])}, one sequence:")
    rows = []
    for case in cases:
        (time,) = median_seconds([case.ours()], seconds, least=3)
        rows.append({"T": case.T, "ms": 1e3 * time, "us_per_token": 1e6 * time / case.T})
        print(f"  T {case.T:>6}  {1e3 * time:>9.1f} ms  {1e6 * time / case.T:>6.2f} us per token")
    return {"op": cases[0].name, "rows": rows}


def machine() -> dict[str, str]:
    """Where and with what the numbers were taken."""
    found = {"cpu": processor(), "python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "mambapy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | {"date": datetime.date.today().isoformat()}
