"""What the selective scan promises of dtypes, of its inputs, and of mistakes, in every backend."""

import pytest
import torch
import torch.nn.functional as F
from scan_inputs import RANGES, assert_same, random_inputs, run

from statetrack.errors import UserError
from statetrack.ops.checks import checked
from statetrack.ops.selective_scan import selective_scan


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_give_halves_and_a_float32_state(dtype, backend):
    inputs = random_inputs(T=30)
    results = run(inputs, backend, dtype)
    assert results["h"].dtype == torch.float32
    assert {name: x.dtype for name, x in results.items() if name != "h"} == {
        x: dtype for x in results if x != "h"
    }
    rounded = {name: x.to(dtype).double() for name, x in inputs.items()}
    expected = run(rounded, "reference")
    # Only inputs and results are rounded: the state is exact to float32, the output to half an ulp.
    torch.testing.assert_close(results["h"].double(), expected["h"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        results["out"], expected["out"].to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5
    )


def test_parameters_may_stay_in_float32_beside_inputs_in_halves():
    inputs = random_inputs()
    leaves = {name: x.bfloat16() if name in ("u", "delta", "z") else x.float() for name, x in inputs.items()}
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    out, h = selective_scan(**leaves, return_last_state=True)
    (out.sum() + h.sum()).backward()
    assert (out.dtype, h.dtype) == (torch.bfloat16, torch.float32)
    assert all(x.grad.dtype == x.dtype for x in leaves.values())


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_autocast_does_not_lower_the_precision(backend):
    inputs = random_inputs(T=20)
    expected = run(inputs, backend, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(inputs, backend, torch.float32)
    assert_same(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("eigenvalues", RANGES)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_results_stay_finite_where_the_exponential_underflows(backend, eigenvalues):
    inputs = random_inputs(T=40, D=4)
    inputs["delta"] = 10.0 ** torch.linspace(-6, 20, 40).expand(3, 4, 40).double()
    results = run(inputs, backend, torch.float32, eigenvalues=eigenvalues)
    assert all(x.isfinite().all() for x in results.values())


@pytest.mark.parametrize("eigenvalues", RANGES)
def test_float32_errors_do_not_grow_with_the_length(eigenvalues):
    """delta A small: a near one, where errors decay slowest."""
    inputs = random_inputs(B=1, T=5000, D=2, N=2, extras=())
    inputs["delta"] = inputs["delta"] * 1e-3
    exact, _ = selective_scan(**inputs, return_last_state=True, eigenvalues=eigenvalues)
    single, _ = selective_scan(
        **{name: x.float() for name, x in inputs.items()}, return_last_state=True, eigenvalues=eigenvalues
    )
    torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=1e-5)


def test_inputs_are_left_as_they_were():
    inputs = random_inputs(B=1, T=4, D=1, N=1)
    before = {name: x.clone() for name, x in inputs.items()}
    run(inputs, "chunked", delta_softplus=True)
    assert all(torch.equal(inputs[name], x) for name, x in before.items())


def test_the_last_state_comes_only_on_request():
    inputs = random_inputs()
    assert isinstance(selective_scan(**inputs), torch.Tensor)
    out, h = selective_scan(**inputs, return_last_state=True)
    assert (out.shape, h.shape) == ((3, 6, 7), (3, 6, 4))


def test_bias_and_softplus_are_those_of_pytorch():
    inputs = random_inputs(extras=("delta_bias",))
    inputs["delta"] = inputs["delta"] * 30  # on both sides of softplus's threshold of 20
    outside = {name: x for name, x in inputs.items() if name != "delta_bias"}
    outside["delta"] = F.softplus(inputs["delta"] + inputs["delta_bias"][:, None])
    torch.testing.assert_close(selective_scan(**inputs, delta_softplus=True), selective_scan(**outside))


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"u": torch.zeros(3, 6)}, r"u has shape \(3, 6\).*batch, channels, time"),
        (
            {"delta": torch.zeros(3, 7, 6)},
            r"delta has shape \(3, 7, 6\).*= \(3, 6, 7\).*Channels come before time",
        ),
        ({"A": torch.zeros(5, 4)}, r"A has shape \(5, 4\).*= \(6, 4\)"),
        ({"A": torch.zeros(6, 4, dtype=torch.complex64)}, "A is torch.complex64, expected a real tensor"),
        ({"B": torch.zeros(3, 7, 4)}, r"B has shape \(3, 7, 4\).*\(batch, states, time\) = \(3, 4, 7\)"),
        ({"B": torch.zeros(3, 4, 4, 7)}, "B has 4 groups, expected a number that divides u's 6 channels"),
        ({"C": torch.zeros(6, 5)}, r"C has shape \(6, 5\).*\(channels, states\) = \(6, 4\)"),
        (
            {"C": torch.zeros(7)},
            r"C has shape \(7,\), expected \(channels, states\), \(batch, states, time\) or",
        ),
        ({"D": torch.zeros(6, 1)}, r"D has shape \(6, 1\)"),
        ({"z": torch.zeros(3, 7, 6)}, r"z has shape \(3, 7, 6\)"),
        ({"delta_bias": torch.zeros(7)}, r"delta_bias has shape \(7,\)"),
        ({"initial_state": torch.zeros(3, 4, 6)}, r"initial_state has shape \(3, 4, 6\).*= \(3, 6, 4\)"),
        ({"u": torch.zeros(3, 6, 7, dtype=torch.long)}, "u is torch.int64, expected a floating-point tensor"),
        ({"D": torch.zeros(6, device="meta")}, "D is on meta, the other inputs are on cpu"),
        ({"eigenvalues": "[-1, 1]"}, r"eigenvalues is '\[-1, 1\]', expected"),
        ({"backend": "chuncked"}, "backend 'chuncked' is not known. Did you mean 'chunked'?"),
    ],
)
def test_wrong_input_is_named(change, message):
    with pytest.raises(UserError, match=message):
        selective_scan(**(random_inputs() | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": torch.full((3, 6, 7), -0.5)}, r"delta\[0, 0, 0\] = -0.5 is outside \[0, inf\].*softplus"),
        ({"A": torch.full((6, 4), 0.25)}, r"A\[0, 0\] = 0.25 is outside \[-inf, 0\].*A_log"),
        ({"A": torch.full((6, 4), -torch.inf)}, "A holds NaN or infinity"),
        ({"delta": torch.full((3, 6, 7), torch.nan)}, "delta holds NaN or infinity"),
        ({"initial_state": torch.full((3, 6, 4), torch.inf)}, "initial_state holds NaN or infinity"),
    ],
)
def test_checked_mode_refuses_values_that_leave_the_range(change, message):
    inputs = random_inputs(extras=()) | change
    selective_scan(**inputs)
    with checked(), pytest.raises(UserError, match=message):
        selective_scan(**inputs)


def test_checked_mode_judges_delta_after_bias_and_softplus():
    inputs = random_inputs(extras=("delta_bias",))
    with checked():
        selective_scan(**(inputs | {"delta": -inputs["delta"]}), delta_softplus=True)
        selective_scan(**(inputs | {"delta": -inputs["delta"], "delta_bias": torch.full((6,), 100.0)}))
