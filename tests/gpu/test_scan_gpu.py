"""The compiled selective scan on a GPU: every dtype, long sequences, CUDA graphs and torch.compile."""

import pytest
import torch

from statetrack.ops.selective_scan import selective_scan
from statetrack.ops.selective_scan.arguments import ScanInputs, ScanOptions
from statetrack.ops.selective_scan.reference import selective_scan_reference

pytestmark = pytest.mark.gpu

EXTRAS = ("D", "z", "delta_bias", "initial_state")
# Relative to the norm of a float64 result: float32 arithmetic, and rounding to the dtype of the outputs.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def random_inputs(B, T, D, N, dtype=torch.float32, by_time=True, extras=EXTRAS):
    generator = torch.Generator("cuda").manual_seed(B + T + D + N)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    def wide():
        return (normal(B, D, T) if by_time else normal(B, T, D).mT).to(dtype)

    inputs = {
        "u": wide(),
        "delta": wide() * 0.5 - 1,
        "A": -normal(D, N).exp(),
        "B": normal(B, N, T).to(dtype),
        "C": normal(B, N, T).to(dtype),
        "D": normal(D),
        "z": wide(),
        "delta_bias": normal(D) * 0.5 - 1,
        "initial_state": normal(B, D, N),
    }
    return {name: x for name, x in inputs.items() if name in extras or name not in EXTRAS}


def run(inputs, reference=False, eigenvalues="[0,1]", softplus=True, cu_seqlens=None):
    leaves = {name: (x.double() if reference else x).detach().requires_grad_() for name, x in inputs.items()}
    if reference:
        out, h = selective_scan_reference(
            ScanInputs(**leaves, cu_seqlens=cu_seqlens), ScanOptions(softplus, eigenvalues)
        )
    else:
        options = {"delta_softplus": softplus, "eigenvalues": eigenvalues, "return_last_state": True}
        out, h = selective_scan(**leaves, **options, cu_seqlens=cu_seqlens, backend="triton")
    generator = torch.Generator("cuda").manual_seed(7)
    loss = sum(
        (x * torch.randn(x.shape, generator=generator, device="cuda").to(x.dtype)).sum() for x in (out, h)
    )
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"out": out, "h": h} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


def assert_close(inputs, dtype, **options):
    expected = run(inputs, reference=True, **options)
    for name, value in run(inputs, **options).items():
        error = (value.double() - expected[name]).norm() / expected[name].norm()
        assert error < TOLERANCE[dtype], f"{name}: relative error {error:.1e}"


# Every distinct set of options compiles kernels of its own, in seconds: the tests below share a few.
SHORT = {"B": 3, "T": 40, "D": 96, "N": 16}
LONG = {"B": 1, "T": 1000, "D": 64, "N": 16}


def test_a_short_sequence_matches_float64():
    assert_close(random_inputs(**SHORT), torch.float32)


def test_half_precision_at_odd_sizes_matches_float64():
    inputs = random_inputs(2, 45, 70, 16, torch.bfloat16, by_time=False)
    assert_close(inputs, torch.bfloat16, eigenvalues="[-1,1]")


def test_a_long_sequence_is_cut_and_matches_float64():
    from statetrack.ops.selective_scan.triton.plan import partition_for

    inputs = random_inputs(**LONG)
    assert partition_for(inputs["u"]).segments > 1
    assert_close(inputs, torch.float32, eigenvalues="[-1,1]")


def test_results_repeat_exactly():
    inputs = random_inputs(**LONG)
    once, again = (run(inputs, eigenvalues="[-1,1]") for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


@torch.no_grad()
def test_decoding_continues_a_prefill():
    inputs = random_inputs(**SHORT)
    options = {"delta_softplus": True, "return_last_state": True, "backend": "triton"}
    expected, last = selective_scan(**inputs, **options)
    state, outputs = inputs.pop("initial_state"), []
    for t in range(SHORT["T"]):
        now = {name: x[..., t : t + 1] if x.ndim == 3 else x for name, x in inputs.items()}
        out, state = selective_scan(**now, initial_state=state, **options)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, dim=-1), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)


def packed_inputs(lengths, D, N, dtype=torch.float32, **options):
    """Sequences of these lengths in one row, and their offsets."""
    inputs = random_inputs(1, sum(lengths), D, N, dtype, **options)
    if "initial_state" in inputs:
        inputs["initial_state"] = torch.randn(len(lengths), D, N, device="cuda")
    return inputs, torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


LENGTHS = [0, 1, 39, 16, 7, 17, 2, 0, 33, 8, 24, 5]


@pytest.mark.parametrize("by_time", [True, False])
def test_packed_sequences_match_float64(by_time):
    inputs, cu_seqlens = packed_inputs(LENGTHS, 70, 16, torch.bfloat16, by_time=by_time)
    assert_close(inputs, torch.bfloat16, eigenvalues="[-1,1]", cu_seqlens=cu_seqlens)


def test_many_packed_sequences_match_float64_and_repeat_exactly():
    from statetrack.ops.selective_scan.triton.plan import PAIRED, partition_for

    inputs, cu_seqlens = packed_inputs(
        LENGTHS * 6, 1024, 16, torch.bfloat16, by_time=False, extras=EXTRAS[:3]
    )
    assert partition_for(inputs["u"], cu_seqlens).tile == PAIRED
    options = {"eigenvalues": "[-1,1]", "cu_seqlens": cu_seqlens}
    assert_close(inputs, torch.bfloat16, **options)
    once, again = (run(inputs, **options) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_packed_sequences_may_change_between_replays_of_a_cuda_graph():
    inputs, offsets = packed_inputs(LENGTHS, 70, 16, torch.bfloat16, by_time=False)
    options = {"eigenvalues": "[-1,1]", "cu_seqlens": offsets}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        value_and_gradients(squared, inputs, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = value_and_gradients(squared, inputs, **options)
    for lengths in (LENGTHS, LENGTHS[::-1], [sum(LENGTHS) - 11] + [1] * 11):
        offsets.copy_(torch.tensor([0, *lengths]).cumsum(0))
        graph.replay()
        expected = value_and_gradients(squared, inputs, **options)
        assert all(torch.equal(actual, value) for actual, value in zip(replayed, expected, strict=True))


# PyTorch says that its mode which refuses to wait for the GPU is a prototype.
@pytest.mark.filterwarnings("ignore::UserWarning")
@torch.no_grad()
def test_padding_to_a_known_length_reads_no_offsets():
    inputs, cu_seqlens = packed_inputs(LENGTHS, 64, 16, by_time=False, extras=EXTRAS[:3])
    options = {"delta_softplus": True, "cu_seqlens": cu_seqlens}
    expected = selective_scan(**inputs, **options, backend="chunked")
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = selective_scan(**inputs, **options, max_seqlen=max(LENGTHS), backend="chunked")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def squared(**leaves):
    out, h = selective_scan(**leaves, delta_softplus=True, return_last_state=True, backend="triton")
    return out.square().sum() + h.square().sum()


def value_and_gradients(function, inputs, **options):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    value = function(**leaves, **options)
    return [value, *torch.autograd.grad(value, list(leaves.values()))]


def test_forward_and_backward_run_in_a_cuda_graph():
    inputs = random_inputs(**SHORT)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = value_and_gradients(squared, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = value_and_gradients(squared, inputs)
    graph.replay()
    torch.cuda.synchronize()
    for replayed, eager in zip(actual, expected, strict=True):
        torch.testing.assert_close(replayed, eager, rtol=1e-5, atol=1e-5)


# Dynamo says that it looks through the cache of a function that asks whether Triton is there.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_compile_takes_the_op_whole():
    inputs = random_inputs(**SHORT)
    compiled = torch.compile(squared, backend="aot_eager", fullgraph=True)
    results = (value_and_gradients(function, inputs) for function in (compiled, squared))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
