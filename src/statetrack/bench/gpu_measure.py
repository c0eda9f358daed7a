"""Times on a GPU: the first call, calls from Python, and inside a CUDA graph."""

import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch

from statetrack.bench.cases import Work
from statetrack.bench.gpu_floor import Ceilings
from statetrack.bench.measure import median_seconds

REPEATS = 20
CAPTURED = 10  # calls in one graph: launching a graph takes 8 us, once per training step


def wake_triton() -> None:
    """One small launch, so that loading Triton and building its driver do not count as a first call."""
    from statetrack.ops.partial_gradients import sum_over_programs

    sum_over_programs(torch.zeros(1, 1, device="cuda"), torch.float32)


def first_call_seconds(work: Work) -> float:
    """The time of the first call, with compilation and autotuning that are not cached."""
    torch.cuda.synchronize()
    before = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - before


def seconds_from_python(contenders: Sequence[Work]) -> list[float]:
    """Median time per call of consecutive calls, including the device. Contenders alternate."""
    return [
        seconds / REPEATS for seconds in median_seconds([partial(_in_a_row, w) for w in contenders], 1, 9)
    ]


def _in_a_row(work: Work) -> None:
    for _ in range(REPEATS):
        work()
    torch.cuda.synchronize()


def seconds_in_graph(work: Work, calls: int = 1) -> float:
    """Median time per call inside a CUDA graph of `CAPTURED` calls: the device time alone."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                work()
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


def measured_ceilings() -> Ceilings:
    """From one large read and write and large matrix products; an SM has 16 special-function lanes to 128."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds_in_graph(partial(_copy, target, source))
    products = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        products[dtype] = 2 * 8192**3 / seconds_in_graph(partial(_multiply, a, b, out))
    float32 = products[torch.float32]
    return Ceilings(copied, float32, products[torch.bfloat16], float32 / 2 * 16 / 128)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    torch.add(source, 1.0, out=target)


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b, out=out)
