"""Times and memory. Contenders alternate, so that a slow phase of the machine affects all of them."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from statetrack.bench.cases import KINDS, Case, Work, as_dict, work_of


def median_seconds(contenders: Sequence[Work], seconds: float = 3.0, min_rounds: int = 5) -> list[float]:
    """Median time of each contender over rounds in which every one runs once; at least `min_rounds`."""
    for work in contenders:
        work()
    times: list[list[float]] = [[] for _ in contenders]
    started = time.perf_counter()
    while len(times[0]) < min_rounds or time.perf_counter() - started < seconds:
        for work, own in zip(contenders, times, strict=True):
            before = time.perf_counter()
            work()
            own.append(time.perf_counter() - before)
    return [statistics.median(own) for own in times]


def peak_bytes(case: Case, who: str) -> int | None:
    """Resident memory one forward and backward adds at its peak, beyond inputs and their gradients.

    Measured in a process of its own, after one small call of the same kind has loaded what it needs. Linux
    only: None elsewhere.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None
    command = [sys.executable, "-m", "statetrack.bench.measure", json.dumps(as_dict(case)), who]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(result.stdout.split()[-1])


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _measure_in_this_process(case: Case, who: str) -> int:
    import dataclasses

    work_of(dataclasses.replace(case, B=1, T=8), who)()
    work = work_of(case, who)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    work()
    return _resident("VmHWM") - before


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    print(_measure_in_this_process(KINDS[fields.pop("kind")](**fields), sys.argv[2]))
