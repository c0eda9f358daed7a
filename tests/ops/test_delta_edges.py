"""The delta rule at the edges of its contract: growth, bad values, strong decay, long keys, odd scales."""

import numpy as np
import pytest
import torch
from delta_inputs import assert_same, random_inputs, run

from statetrack.errors import UserError
from statetrack.ops.checks import checked
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.native import library

absent = pytest.mark.skipif(library.ABSENT is not None, reason="the native library was not built")
FAST = ["chunked", pytest.param("native", marks=absent)]
ALL = ["reference", *FAST]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("backend", FAST)
def test_growing_states_are_computed_as_defined(backend, n):
    """g > 0: a state that grows by up to e^0.5 a step, over more than a chunk."""
    inputs = random_inputs(B=1, T=50, n=n, gate=True, state=True)
    inputs["g"] = -0.5 * inputs["g"]
    expected = run(inputs, "reference", householders=n)
    actual = run(inputs, backend, torch.float32, householders=n)
    scale = {name: x.abs().max() for name, x in expected.items()}
    assert scale["S"] > 100
    assert_same(
        {name: x.double() / scale[name] for name, x in actual.items()},
        {name: x / scale[name] for name, x in expected.items()},
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "g"])
@pytest.mark.parametrize("backend", ALL)
def test_a_bad_value_leaves_earlier_outputs_alone(backend, name, value):
    for n, packed in ((1, None), (2, None), (1, [0, 5, 40])):
        inputs = {x: y.float() for x, y in random_inputs(B=1, T=40, H=1, n=n, gate=True).items()}
        offsets = None if packed is None else torch.tensor(packed)
        options = {"householders": n, "cu_seqlens": offsets, "backend": backend}
        expected, _ = delta_rule(**inputs, **options)
        step = 21 if name in ("q", "g") else 21 * n
        inputs[name][:, step] = value
        o, _ = delta_rule(**inputs, **options)
        torch.testing.assert_close(o[:, :21], expected[:, :21], rtol=1e-5, atol=1e-6)
        assert not o[:, 21].isfinite().all(), "and what it does spoil is seen"


@pytest.mark.parametrize("backend", FAST)
def test_a_bad_value_leaves_other_columns_alone(backend):
    inputs = {x: y.float() for x, y in random_inputs(B=1, T=40, H=1).items()}
    inputs["v"][:, 3, :, 0] = float("nan")
    o, _ = delta_rule(**inputs, backend=backend)
    assert o[:, 3:, :, 0].isnan().all()
    assert o[..., 1:].isfinite().all()


def test_checked_mode_names_the_first_bad_step():
    inputs = random_inputs(B=2, T=40, H=1)
    inputs["v"][1, 7] = float("nan")
    inputs["v"][0, 9] = float("nan")
    with checked(), pytest.raises(UserError, match=r"v\[1, 7, 0, 0\] = nan \(step 7 is the first\)"):
        delta_rule(**inputs)
    inputs = random_inputs(B=1, T=40, H=1)
    inputs["v"][:, 12:] = 1e308
    with checked(), pytest.raises(UserError, match=r"out.*\(step 1[2-9] is the first\)"):
        delta_rule(**inputs, scale=1e3)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("strong", [-15.0, -20.0, -30.0])
@pytest.mark.parametrize("backend", FAST)
def test_the_gradient_of_a_strong_decay_keeps_its_digits(backend, strong, n):
    """dg is of the order of e^g: as a difference of sums of order 1 it would be rounding errors."""
    inputs = random_inputs(B=2, T=70, n=n, gate=True, state=True)
    inputs["g"][:, 5::9] = strong
    expected = run(inputs, "reference", householders=n)["dg"]
    actual = run(inputs, backend, torch.float32, householders=n)["dg"].double()
    error = ((actual - expected).abs() / expected.abs())[:, 5::9]
    assert error.median() < 1e-4


@pytest.mark.parametrize(("K", "closed"), [(16, 20), (128, 40)])
@pytest.mark.parametrize("name", ["g", "a"])
@pytest.mark.parametrize("backend", FAST)
def test_decays_behind_closed_gates_keep_their_digits(backend, name, K, closed):
    """Most of a chunk is closed, then decays of 5e-5: in one sum with the closed ones they would be lost."""
    inputs = random_inputs(B=1, T=256, H=1, K=K, gate=True)
    g = torch.where(torch.arange(256) % 64 < closed, -float("inf"), -5e-5)
    inputs["g"] = g[None, :, None].double()
    if name == "a":
        inputs["a"] = inputs.pop("g").exp()
    exact, _ = delta_rule(**inputs, backend="reference")
    o, _ = delta_rule(**{x: y.float() for x, y in inputs.items()}, backend=backend)
    # chunked sums logarithms in float32
    assert (o.double() - exact).norm() / exact.norm() < (
        1e-4 if (backend, name) == ("chunked", "g") else 2e-6
    )


@pytest.mark.parametrize("backend", ALL)
def test_long_keys_are_normalised_and_not_lost(backend):
    inputs = random_inputs(T=40)
    inputs["q"], k = inputs["q"] / inputs["q"].norm(dim=-1, keepdim=True), inputs["k"]
    options = {"use_qk_l2norm_in_kernel": True, "scale": 1.0}
    expected = run(inputs, "reference", **options)
    actual = run(inputs | {"k": 1e20 * k}, backend, torch.float32, **options)
    actual["dk"] = 1e20 * actual["dk"]
    assert_same(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ALL)
def test_a_scale_of_zero_gives_zeros_and_no_nan(backend):
    inputs = random_inputs(T=40)
    options = {"use_qk_l2norm_in_kernel": True, "scale": 0.0}
    assert_same(
        run(inputs, backend, torch.float32, **options), run(inputs, "reference", **options), 1e-4, 1e-4
    )


@pytest.mark.parametrize("scale", [np.float32(-0.5), np.int64(-3), -0.5])
@pytest.mark.parametrize("backend", ALL)
def test_a_scale_is_any_finite_number_of_python_or_numpy(backend, scale):
    inputs = random_inputs(T=40)
    options = {"use_qk_l2norm_in_kernel": True}
    ones = run(inputs, backend, torch.float32, scale=1.0, **options)["o"]
    torch.testing.assert_close(
        run(inputs, backend, torch.float32, scale=scale, **options)["o"], ones * float(scale)
    )


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "0.5"])
def test_a_scale_that_is_no_number_is_refused(scale):
    with pytest.raises(UserError, match="scale is"):
        delta_rule(**random_inputs(), scale=scale)
