"""Repeated launches on a GPU: from the compiled kernel itself, on any stream, for any pointer, in a graph."""

import threading

import pytest
import torch
from triton import knobs

from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.selective_scan import selective_scan

pytestmark = pytest.mark.gpu


def delta_inputs():
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(3, 20, 2, 32, generator=generator, device="cuda") for _ in range(3))
    return [q, k, v, torch.rand(3, 20, 2, generator=generator, device="cuda")]


def scan_inputs():
    generator = torch.Generator("cuda").manual_seed(0)
    u, delta = (torch.randn(3, 32, 24, generator=generator, device="cuda") for _ in range(2))
    B, C = (torch.randn(3, 4, 24, generator=generator, device="cuda") for _ in range(2))
    return [u, delta.abs(), -torch.ones(32, 4, device="cuda"), B, C]


def run_delta(*inputs):
    return delta_rule(*inputs, use_qk_l2norm_in_kernel=True, backend="triton")[0]


def run_scan(*inputs):
    return selective_scan(*inputs, backend="triton")


OPS = [(run_delta, delta_inputs), (run_scan, scan_inputs)]


def results(run, inputs):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = run(*leaves)
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def assert_equal(actual, expected):
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize(("run", "make_inputs"), OPS)
def test_repeated_calls_give_what_the_first_one_gave(run, make_inputs):
    inputs = make_inputs()
    first = results(run, inputs)
    for _ in range(2):
        assert_equal(results(run, inputs), first)


@pytest.mark.parametrize(("run", "make_inputs"), OPS)
def test_a_first_call_compiles_for_both_directions_at_once_and_in_threads(
    run, make_inputs, tmp_path, monkeypatch
):
    threads = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda **_: threads.append(threading.current_thread().name)
    )
    leaves = [x.half().requires_grad_() for x in make_inputs()]  # float16, which no other test here takes
    out = run(*leaves)
    compiled = list(threads)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert compiled == threads
    assert threading.main_thread().name not in threads


@pytest.mark.parametrize(("run", "make_inputs"), OPS)
def test_another_stream_is_launched_on(run, make_inputs):
    """Its inputs are ready only there, after a wait that a launch on the default stream would not see."""
    inputs = make_inputs()
    expected = results(run, inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(x) for x in inputs]
        torch.cuda._sleep(50_000_000)
        for target, x in zip(late, inputs, strict=True):
            target.copy_(x)
        actual = results(run, late)
    stream.synchronize()
    assert_equal(actual, expected)


@pytest.mark.parametrize(("run", "make_inputs"), OPS)
def test_inputs_that_start_anywhere_are_taken(run, make_inputs):
    inputs = make_inputs()
    expected = results(run, inputs)
    moved = [x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x) for x in inputs]
    for actual, wanted in zip(results(run, moved), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    assert_equal(results(run, inputs), expected)


@pytest.mark.parametrize(("run", "make_inputs"), OPS)
def test_repeated_launches_are_captured(run, make_inputs):
    inputs = make_inputs()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = results(run, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = results(run, inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(actual, expected)
