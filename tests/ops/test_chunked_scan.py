"""The chunked selective scan: the results of the loop that defines it, in blocks, with little memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scan_inputs import EXTRAS, RANGES, assert_same, random_inputs, run
from torch.utils._python_dispatch import TorchDispatchMode

from statetrack.ops.selective_scan import blocked_scan, selective_scan


@pytest.mark.parametrize("eigenvalues", RANGES)
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("extras", [(), ("D",), ("z",), ("delta_bias",), ("initial_state",), EXTRAS], ids=str)
def test_chunked_matches_reference(extras, softplus, eigenvalues):
    inputs = random_inputs(T=19, extras=extras)
    options = {"delta_softplus": softplus, "eigenvalues": eigenvalues}
    expected = run(inputs, "reference", **options)
    assert_same(run(inputs, "chunked", **options), expected, rtol=1e-11, atol=1e-11)
    single = run(inputs, "chunked", torch.float32, **options)
    assert_same(single, run(inputs, "reference", torch.float32, **options), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("C", [0, 1, 2, 3])
@pytest.mark.parametrize("B", [0, 1, 2, 6])
def test_chunked_matches_reference_for_every_form_of_B_and_C(B, C):
    inputs = random_inputs(T=9, weights=(B, C))
    expected = run(inputs, "reference", eigenvalues="[-1,1]")
    assert_same(run(inputs, "chunked", eigenvalues="[-1,1]"), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("eigenvalues", RANGES)
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 32, 33])
@pytest.mark.parametrize("weights", [(1, 1), (0, 2)])
def test_chunked_matches_reference_around_the_block_size(T, weights, eigenvalues, small_blocks):
    inputs = random_inputs(T=T, weights=weights)
    expected = run(inputs, "reference", eigenvalues=eigenvalues)
    assert_same(run(inputs, "chunked", eigenvalues=eigenvalues), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("eigenvalues", RANGES)
@pytest.mark.parametrize("T", [1, 3, 4, 7, 8, 9, 15, 16, 17, 24, 29, 37])
def test_chunked_matches_reference_around_the_lane_size(T, eigenvalues, small_lanes):
    inputs = random_inputs(T=T)
    expected = run(inputs, "reference", eigenvalues=eigenvalues)
    assert_same(run(inputs, "chunked", eigenvalues=eigenvalues), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("B", "T", "D", "N"), [(2, 700, 8, 4), (18, 20, 256, 16), (1, 17, 300, 7)])
def test_chunked_matches_reference_in_float32_at_the_sizes_it_is_used_with(B, T, D, N):
    inputs = random_inputs(B, T, D, N)
    expected = run(inputs, "reference", torch.float32, eigenvalues="[-1,1]")
    # Gradients of D and the bias add up B T terms, so their absolute error grows with their size.
    actual = run(inputs, "chunked", torch.float32, eigenvalues="[-1,1]")
    scale = {name: x.abs().max().clamp(min=1) for name, x in expected.items()}
    assert_same(
        {k: x / scale[k] for k, x in actual.items()},
        {k: x / scale[k] for k, x in expected.items()},
        1e-4,
        1e-5,
    )


@settings(max_examples=30, deadline=None)
@given(
    B=st.integers(1, 5),
    T=st.integers(1, 40),
    groups=st.sampled_from([1, 2, 3]),
    P=st.integers(1, 7),
    N=st.integers(1, 9),
    constant=st.sampled_from([(False, False), (True, False), (False, True), (True, True)]),
    extras=st.sets(st.sampled_from(EXTRAS)),
    eigenvalues=st.sampled_from(RANGES),
    softplus=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_chunked_matches_reference_for_any_shape(
    B, T, groups, P, N, constant, extras, eigenvalues, softplus, seed
):
    weights = tuple(0 if fixed else groups for fixed in constant)
    inputs = random_inputs(B, T, groups * P, N, weights=weights, extras=extras, seed=seed)
    options = {"eigenvalues": eigenvalues, "delta_softplus": softplus}
    expected = run(inputs, "reference", **options)
    assert_same(run(inputs, "chunked", **options), expected, rtol=1e-9, atol=1e-9)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements any operation gave."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            # Views and expanded tensors hold no memory of their own.
            if isinstance(x, torch.Tensor) and x._base is None:
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


def saved_elements(backend, **sizes):
    """How many numbers autograd keeps for the backward, beside the inputs themselves."""
    inputs = {name: x.float().requires_grad_() for name, x in random_inputs(**sizes).items()}
    own = {x.data_ptr() for x in inputs.values()}
    total = 0

    def pack(x):
        nonlocal total
        total += 0 if x.data_ptr() in own else x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        selective_scan(**inputs, backend=backend)
    return total


@pytest.mark.parametrize(("T", "N"), [(256, 16), (1024, 16), (256, 64)])
def test_the_backward_keeps_no_more_numbers_than_u_holds(T, N):
    B, D = 2, 32
    assert saved_elements("chunked", B=B, T=T, D=D, N=N) <= B * T * D


def test_no_tensor_grows_with_states_times_length():
    B, T, D, N = 2, 3000, 64, 16
    inputs = {name: x.float().requires_grad_() for name, x in random_inputs(B, T, D, N).items()}
    sequences, steps, _ = blocked_scan.block_size(B, D, N)
    with LargestTensor() as largest:
        selective_scan(**inputs).sum().backward()
    assert largest.elements <= max(B * T * D, sequences * steps * D * N)
    assert largest.elements < B * T * D * N / 4


@pytest.mark.parametrize(
    ("batch", "channels", "N"),
    [(1, 1, 1), (1, 8, 4), (8, 256, 16), (64, 256, 16), (4, 8192, 64), (2, 1, 900)],
)
def test_blocks_are_cache_sized_but_no_shorter_than_N(batch, channels, N):
    sequences, steps, lane = blocked_scan.block_size(batch, channels, N)
    assert 1 <= sequences <= batch
    assert steps >= max(N, 16)
    fits = sequences * steps * channels * N <= blocked_scan.BLOCK["cpu"]
    assert fits or steps < max(N, 16) + (lane or 1)
    assert lane is None or steps % lane == 0


def test_the_output_follows_the_memory_layout_of_u():
    inputs = random_inputs(B=2, T=5, D=6, N=4)
    expected = selective_scan(**inputs)
    assert expected.is_contiguous()
    transposed = inputs | {name: inputs[name].mT.contiguous().mT for name in ("u", "delta", "z", "B", "C")}
    out = selective_scan(**transposed)
    assert out.mT.is_contiguous()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("N", [1, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_results_may_be_written_into(transposed, N):
    inputs = random_inputs(T=5, N=N)
    if transposed:
        inputs["u"] = inputs["u"].mT.contiguous().mT
    results = []
    for double in (lambda x: 2 * x, lambda x: x.mul_(2)):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        out, h = selective_scan(**leaves, return_last_state=True)
        results.append(torch.autograd.grad(double(out).sum() + double(h).sum(), list(leaves.values())))
    torch.testing.assert_close(*results)
