"""The selective scan: its definition against the mathematics, and what every backend must keep to.

Dtypes and mistakes: test_scan_contract.py.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mambapy.pscan import pscan
from scan_inputs import EXTRAS, RANGES, assert_same, cut, random_inputs, run

from statetrack.ops.selective_scan import selective_scan


@pytest.mark.parametrize("eigenvalues", RANGES)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_gradients_match_finite_differences(backend, eigenvalues):
    inputs = random_inputs(B=2, T=3, D=4, N=2, weights=(2, 0))

    def scan(*tensors):
        return selective_scan(
            **dict(zip(inputs, tensors, strict=True)),
            delta_softplus=True,
            return_last_state=True,
            eigenvalues=eigenvalues,
            backend=backend,
        )

    assert torch.autograd.gradcheck(scan, [x.requires_grad_() for x in inputs.values()])


@pytest.mark.parametrize("name", ["u", "delta", "A", "B", "C", *EXTRAS])
def test_a_gradient_does_not_depend_on_which_others_are_asked_for(name):
    inputs = random_inputs()
    expected = run(inputs, "chunked", delta_softplus=True)
    alone = run(inputs, "chunked", wrt=[name], delta_softplus=True)
    assert_same(alone, {key: expected[key] for key in alone}, rtol=1e-12, atol=1e-12)


def test_each_result_alone_has_gradients():
    inputs = random_inputs()
    for result in (0, 1):
        gradients = []
        for backend in ("reference", "chunked"):
            leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
            value = selective_scan(**leaves, return_last_state=True, backend=backend)[result]
            gradients.append(
                torch.autograd.grad(value.sum(), [leaves[x] for x in ("u", "A", "initial_state")])
            )
        torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


def test_second_derivatives_are_refused_not_wrong():
    inputs = {name: x.requires_grad_() for name, x in random_inputs().items()}
    out = selective_scan(**inputs, backend="chunked")
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.sum(), inputs["u"], create_graph=True)


# The definition against others


def test_positive_range_matches_the_parallel_scan_of_mambapy():
    inputs = random_inputs(B=2, T=21, D=5, N=3, extras=("D",))
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    u, delta, B, C = (leaves[name].mT for name in ("u", "delta", "B", "C"))
    states = pscan(torch.exp(delta[..., None] * leaves["A"]), (delta * u)[..., None] * B[:, :, None])
    expected = ((states @ C[..., None]).squeeze(3) + leaves["D"] * u).mT
    expected_gradients = torch.autograd.grad(expected.square().sum(), list(leaves.values()))
    for backend in ("reference", "chunked"):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        out, h = selective_scan(**leaves, return_last_state=True, eigenvalues="[0,1]", backend=backend)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(h, states[:, -1])
        gradients = torch.autograd.grad(out.square().sum(), list(leaves.values()))
        torch.testing.assert_close(gradients, expected_gradients)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("eigenvalues", RANGES)
def test_both_ranges_match_a_loop_over_every_index_in_numpy(eigenvalues, backend):
    inputs = random_inputs(B=2, T=5, D=4, N=3, weights=(2, 1))
    u, delta, A, B, C, D, z, bias, state = (x.numpy() for x in inputs.values())
    expected, h = np.zeros_like(u), state.copy()
    for b, d, t in np.ndindex(*u.shape):
        step = np.log1p(np.exp(delta[b, d, t] + bias[d]))
        a = np.exp(step * A[d]) if eigenvalues == "[0,1]" else 2 * np.exp(step * A[d]) - 1
        h[b, d] = a * h[b, d] + step * B[b, d // 2, :, t] * u[b, d, t]
        y = C[b, :, t] @ h[b, d] + D[d] * u[b, d, t]
        expected[b, d, t] = y * z[b, d, t] / (1 + np.exp(-z[b, d, t]))
    out, last = selective_scan(
        **inputs, delta_softplus=True, return_last_state=True, eigenvalues=eigenvalues, backend=backend
    )
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(last, h, rtol=1e-12, atol=1e-12)


# Carried states


@pytest.mark.parametrize("eigenvalues", RANGES)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("split", [0, 1, 16, 20, 33])
def test_two_halves_with_carried_state_equal_one_pass(split, backend, eigenvalues, small_blocks):
    inputs = random_inputs(T=33, weights=(1, 2))
    options = {"return_last_state": True, "eigenvalues": eigenvalues, "backend": backend}
    expected, last = selective_scan(**inputs, **options)
    first, h = selective_scan(**cut(inputs, 0, split, inputs["initial_state"]), **options)
    second, h = selective_scan(**cut(inputs, split, 33, h), **options)
    torch.testing.assert_close(torch.cat([first, second], dim=2), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(h, last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("eigenvalues", RANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [6, 512])
def test_single_steps_after_a_prefill_equal_the_full_pass(D, dtype, eigenvalues):
    inputs = {name: x.to(dtype) for name, x in random_inputs(T=12, D=D).items()}
    options = {"return_last_state": True, "eigenvalues": eigenvalues, "delta_softplus": True}
    expected, last = selective_scan(**inputs, **options)
    out, h = selective_scan(**cut(inputs, 0, 7, inputs["initial_state"]), **options)
    outputs = [out]
    for t in range(7, 12):
        out, h = selective_scan(**cut(inputs, t, t + 1, h), **options)
        outputs.append(out)
    torch.testing.assert_close(h, last, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.cat(outputs, dim=2), expected)
    if D == 512:
        # At real widths states go through the same operations in the same order, to the last bit. At small
        # ones PyTorch may leave a number to the scalar end of a vector loop, which rounds once more.
        assert torch.equal(h, last)


def test_gradients_flow_through_a_carried_state(small_blocks):
    inputs = random_inputs(T=20)
    whole = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    expected = torch.autograd.grad(selective_scan(**whole).square().sum(), list(whole.values()))
    parts = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    first, h = selective_scan(**cut(parts, 0, 9, parts["initial_state"]), return_last_state=True)
    second = selective_scan(**cut(parts, 9, 20, h))
    actual = torch.autograd.grad(first.square().sum() + second.square().sum(), list(parts.values()))
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 5), (0, 0)])
def test_nothing_in_gives_nothing_out_and_keeps_the_state(B, T, backend):
    inputs = {name: x.requires_grad_() for name, x in random_inputs(B=B, T=T, weights=(2, 1)).items()}
    out, h = selective_scan(**inputs, return_last_state=True, backend=backend)
    (out.sum() + h.sum()).backward()
    assert out.shape == (B, 6, T)
    assert torch.equal(h, inputs["initial_state"])
    assert torch.equal(inputs["initial_state"].grad, torch.ones_like(h))


def test_the_default_range_is_that_of_the_layers_and_the_drop_in_has_that_of_mamba_ssm():
    from statetrack.compat.mamba_ssm import selective_scan_fn
    from statetrack.layers import MambaConfig

    inputs = random_inputs(extras=())
    assert MambaConfig().eigenvalues == "[-1,1]"
    assert torch.equal(selective_scan(**inputs), selective_scan(**inputs, eigenvalues="[-1,1]"))
    assert torch.equal(selective_scan_fn(**inputs), selective_scan(**inputs, eigenvalues="[0,1]"))


# Theorem 1, from both sides: the input 1^k, one channel, one state


@pytest.mark.parametrize("delta", [0.01, 0.5, 3.0, 50.0])
@pytest.mark.parametrize(("backend", "slack"), [("reference", 0.0), ("chunked", 1e-6)])
def test_with_eigenvalues_in_0_1_the_state_settles(backend, slack, delta):
    """Nothing tells even from odd. Chunked has slack: in lanes, rounding depends on the place in a lane."""
    ones = torch.ones(1, 1, 10_000)
    options = {"eigenvalues": "[0,1]", "backend": backend}
    out = selective_scan(
        ones, delta * ones, -ones[0, :, :1], ones, ones, initial_state=1000 * ones[:, :, :1], **options
    )
    changes = out.flatten().diff()
    assert (changes <= slack * out.flatten()[1:]).all()
    assert (changes[-1000:].abs() <= slack * out.flatten()[-1]).all()


def test_with_eigenvalues_in_minus_1_1_the_state_alternates_for_ever():
    ones = torch.ones(1, 1, 10_000)
    states = selective_scan(
        ones, 50 * ones, -ones[0, :, :1], 0 * ones, ones, initial_state=ones[:, :, :1], eigenvalues="[-1,1]"
    ).flatten()
    assert torch.equal(states, (-1.0) ** torch.arange(1, 10_001))


@settings(max_examples=15, deadline=None)
@given(bits=st.lists(st.booleans(), min_size=1, max_size=400))
def test_one_state_computes_parity_at_any_length(bits):
    """a = 1 on zeros (delta = 0) and -1 on ones (delta so large that exp underflows): the change of Eq. 2."""
    bits = torch.tensor(bits)
    ones = torch.ones(1, 1, len(bits))
    out = selective_scan(
        0 * ones,
        200.0 * bits.view(1, 1, -1),
        -ones[0, :, :1],
        ones,
        ones,
        initial_state=ones[:, :, :1],
        eigenvalues="[-1,1]",
    )
    assert torch.equal(out.flatten() < 0, bits.cumsum(0) % 2 == 1)


# Precision, memory, layouts
