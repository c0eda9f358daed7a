"""The native delta rule with a gate per key channel: results, every gradient, layouts, bad values."""

import itertools

import numpy as np
import pytest
import torch
from delta_inputs import random_inputs
from hypothesis import given
from hypothesis import strategies as st
from test_delta_gates import assert_near, gate_inputs, results

from statetrack.errors import UserError
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.native import library

pytestmark = pytest.mark.skipif(library.ABSENT is not None, reason="the native library was not built")
KINDS = ["g per channel", "a per channel", "g and sign per channel", "angle, a per pair"]


def rounded(inputs, dtype=torch.float32):
    return {name: x.to(dtype) for name, x in inputs.items()}


def assert_is_the_loop(inputs, tolerance=1e-5, **options):
    actual = results(inputs, "native", torch.float32, **options)
    assert all(x.isfinite().all() for x in actual.values())
    assert_near(actual, results(inputs, "reference", **options), tolerance)


# a chunk has 16 steps, and a state is saved every fourth chunk
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 33, 63, 64, 65, 150])
@pytest.mark.parametrize("kind", KINDS)
def test_native_is_the_loop_with_all_gradients(kind, T):
    assert_is_the_loop(gate_inputs(kind, T=T, K=8, V=20, state=True))


@pytest.mark.parametrize(("K", "V"), [(1, 1), (3, 70), (16, 16), (60, 31), (65, 5), (128, 128)])
def test_widths_need_not_be_multiples_of_a_vector(K, V):
    assert_is_the_loop(gate_inputs("a per channel", B=1, T=70, K=K, V=V, state=True))


@pytest.mark.parametrize(("T", "n"), [(33, 2), (50, 3), (26, 5), (20, 9), (5, 16)])
@pytest.mark.parametrize("kind", KINDS)
def test_several_factors_per_token_are_those_of_the_loop(kind, T, n):
    options = {"householders": n, "use_qk_l2norm_in_kernel": True, "scale": 0.7}
    assert_is_the_loop(gate_inputs(kind, T=T, n=n, state=True), **options)


@given(
    shape=st.tuples(*(st.integers(1, high) for high in (3, 70, 3, 40, 40))),
    beta=st.sampled_from([0.0, 1.0, 2.0, (1.5, 2.0)]),
    n=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_native_is_the_loop_on_any_shape_and_range_of_beta(shape, beta, n, seed):
    B, T, H, K, V = shape
    inputs = gate_inputs("a per channel", B, T, H, K, V, n, beta=beta, seed=seed, state=True)
    assert_is_the_loop(inputs, 1e-4, householders=n)


def loop(q, k, v, b, a, S, do, dS):
    """Forward and adjoint of the recurrence for one head, in numpy.

    With R = diag(a_t) S_{t-1} and e = v_t - R^T k_t the step is S_t = R + b_t k_t e^T.
    """
    states, o = [S], []
    for t in range(len(q)):
        R = a[t][:, None] * S
        S = R + b[t] * np.outer(k[t], v[t] - R.T @ k[t])
        states.append(S)
        o.append(S.T @ q[t])
    gradients = [np.zeros_like(x) for x in (q, k, v, b, a)]
    dq, dk, dv, db, da = gradients
    D = dS
    for t in reversed(range(len(q))):
        D = D + np.outer(q[t], do[t])
        dq[t] = states[t + 1] @ do[t]
        R = a[t][:, None] * states[t]
        e, de = v[t] - R.T @ k[t], b[t] * D.T @ k[t]
        db[t], dv[t] = k[t] @ D @ e, de
        dk[t] = b[t] * D @ e - R @ de
        dR = D - np.outer(k[t], de)
        da[t] = (dR * states[t]).sum(1)
        D = a[t][:, None] * dR
    return [np.stack(o), S, *gradients, D]


def test_native_is_an_independent_loop_in_numpy():
    exact = gate_inputs("a per channel", B=1, T=100, H=1, K=5, V=7, state=True)
    do, dS = torch.randn(1, 100, 1, 7), torch.randn(1, 1, 5, 7)
    names = ["q", "k", "v", "beta", "a", "initial_state"]
    one = [exact[name][0, 0] if name == "initial_state" else exact[name][0, :, 0] for name in names]
    expected = loop(*(x.numpy() for x in (*one, do[0, :, 0].double(), dS[0, 0].double())))
    leaves = {name: x.requires_grad_() for name, x in rounded(exact).items()}
    o, S = delta_rule(**leaves, scale=1.0, output_final_state=True, backend="native")
    gradients = torch.autograd.grad([o, S], [leaves[name] for name in names], [do, dS])
    actual = [o[0, :, 0], S[0, 0], *(x[0, :, 0] for x in gradients[:5]), gradients[5][0, 0]]
    for x, y in zip(actual, expected, strict=True):
        assert (x.double() - torch.from_numpy(y)).abs().max() <= 1e-5 * np.abs(y).max()


def test_gradients_are_those_of_finite_differences_at_and_across_zero():
    """The loss is linear in every single gate: a difference over a whole unit is exact."""
    inputs = gate_inputs("a per channel", B=1, T=40, H=1, K=4, V=3, state=True)
    inputs["a"][:, 14:18] = torch.tensor([0.0, 1e-7, -1e-7, 0.0], dtype=torch.float64).view(1, 4, 1, 1)
    weights = torch.randn(1, 40, 1, 3, dtype=torch.float64)

    def loss(a):
        return (delta_rule(**inputs | {"a": a}, backend="reference")[0] * weights).sum()

    leaf = inputs["a"].float().requires_grad_()
    o, _ = delta_rule(**rounded(inputs) | {"a": leaf}, backend="native")
    (da,) = torch.autograd.grad((o * weights).sum(), leaf)
    for t, i in itertools.product(range(13, 19), range(4)):
        step = torch.zeros_like(inputs["a"])
        step[0, t, 0, i] = 0.5
        difference = loss(inputs["a"] + step) - loss(inputs["a"] - step)
        torch.testing.assert_close(da[0, t, 0, i].double(), difference, rtol=1e-4, atol=1e-5)
        assert difference != 0


@pytest.mark.parametrize("size", [0.0, 1e-8, -1e-8, 1e-30])
def test_gates_that_are_tiny_over_chunks_lose_nothing_of_what_follows(size):
    inputs = gate_inputs("a per channel", T=120, state=True)
    inputs["a"][:, 40:90] = size
    inputs["a"][:, 100, :, 2] = 0
    assert_is_the_loop(inputs)


def test_a_gate_of_zero_cuts_off_exactly_what_was_before_it():
    inputs = rounded(gate_inputs("a per channel", T=40, state=True))
    inputs["a"][:, 21] = 0
    expected, _ = delta_rule(**inputs, backend="native")
    changed = inputs | {"v": inputs["v"].clone(), "initial_state": 1e3 * inputs["initial_state"]}
    changed["v"][:, :21] *= -1e3
    o, _ = delta_rule(**changed, backend="native")
    assert torch.equal(o[:, 21:], expected[:, 21:])
    assert not torch.equal(o[:, 20], expected[:, 20])


@pytest.mark.parametrize("gate", [-torch.inf, -1e4, -50.0])
def test_decays_without_end_are_gates_of_zero(gate):
    inputs = gate_inputs("g per channel", T=60, state=True)
    inputs["g"][:, ::9, :, :3] = gate
    assert_is_the_loop(inputs)


def test_gates_beyond_one_are_computed_as_defined():
    """A state that grows by up to 1.3 a step and changes its sign, over more than a chunk."""
    inputs = gate_inputs("a per channel", B=1, T=50, beta=(0.0, 0.4), state=True)
    inputs["a"] = torch.where(inputs["a"] < 0, -1.3, 1.2).double()
    assert results(inputs, "reference")["S"].abs().max() > 50
    assert_is_the_loop(inputs)


def test_near_the_border_float32_keeps_five_digits_over_2048_steps_with_all_gradients():
    """Gates of size 0.99 to 1 and beta in [1.5, 2], where rounding errors hardly decay."""
    inputs = gate_inputs("a per channel", B=1, T=2048, H=1, K=16, V=16, beta=(1.5, 2.0))
    a = inputs["a"]
    inputs["a"] = torch.where(a < 0, -1.0, 1.0) * (0.99 + 0.01 * a.abs())
    inputs = {name: x.float().double() for name, x in inputs.items()}
    expected, actual = results(inputs, "chunked"), results(inputs, "native", torch.float32)
    for name, value in expected.items():  # in float64 the chunks are the loop, and far quicker
        assert (actual[name] - value).norm() / value.norm() < 1e-5, name


@pytest.mark.parametrize("bounds", [[0, 5, 5, 70, 71, 200, 200], [0, 0, 64], [0, 1, 2, 3]])
@pytest.mark.parametrize("n", [1, 2])
def test_packed_sequences_are_those_of_the_loop(bounds, n):
    inputs = gate_inputs(
        "a per channel", B=1, T=bounds[-1], n=n, state=True, sequences=len(bounds) - 1, K=4, V=4
    )
    offsets = torch.tensor(bounds, dtype=torch.int32)
    assert_is_the_loop(inputs, householders=n, cu_seqlens=offsets, use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize("hard", [False, True])
def test_beta_may_come_as_logits(hard):
    inputs = gate_inputs("g and sign per channel", T=40)
    inputs["beta"] = 8 * inputs["beta"] - 8
    assert_is_the_loop(inputs, beta_from_logits=2.0, hard_beta=hard)


def test_pieces_and_single_steps_with_carried_state_equal_one_pass():
    inputs = rounded(gate_inputs("a per channel", T=100))
    expected, last = delta_rule(**inputs, output_final_state=True, backend="native")
    outputs, S = [], None
    for start, stop in ((0, 1), (1, 2), (2, 75), (75, 98), (98, 99), (99, 100)):
        part = {name: x[:, start:stop] for name, x in inputs.items()}
        o, S = delta_rule(**part, initial_state=S, output_final_state=True, backend="native")
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(S, last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "a"])
@pytest.mark.parametrize("backend", ["reference", "chunked", "native"])
def test_a_bad_value_leaves_earlier_outputs_and_other_heads_alone(backend, name, value):
    for n, packed in ((1, None), (2, None), (1, [0, 5, 40])):
        inputs = rounded(gate_inputs("a per channel", B=1, T=40, n=n))
        offsets = None if packed is None else torch.tensor(packed)
        options = {"householders": n, "cu_seqlens": offsets, "backend": backend}
        expected, _ = delta_rule(**inputs, **options)
        inputs[name][:, 21 if name in ("q", "a") else 21 * n, :1] = value
        o, _ = delta_rule(**inputs, **options)
        torch.testing.assert_close(o[:, :21], expected[:, :21], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(o[:, :, 1:], expected[:, :, 1:], rtol=1e-5, atol=1e-6)
        assert not o[:, 21, 0].isfinite().all(), "and what it does spoil is seen"


def test_a_bad_value_leaves_other_columns_alone():
    inputs = rounded(gate_inputs("a per channel", B=1, T=40))
    inputs["v"][:, 3, :, 0] = float("nan")
    o, _ = delta_rule(**inputs, backend="native")
    assert o[:, 3:, :, 0].isnan().all()
    assert o[..., 1:].isfinite().all()


def test_long_keys_are_normalised_and_not_lost():
    inputs = gate_inputs("a per channel", T=40)
    expected = results(inputs, "reference", use_qk_l2norm_in_kernel=True)
    long = inputs | {"k": 1e20 * inputs["k"]}
    actual = results(long, "native", torch.float32, use_qk_l2norm_in_kernel=True)
    assert_near(actual | {"dk": 1e20 * actual["dk"].double()}, expected, 1e-4)


def test_memory_layout_changes_nothing():
    inputs = rounded(gate_inputs("a per channel", T=40, H=3, K=16, V=16))
    weights = torch.randn(2, 40, 3, 16)

    def outcome(change, weights):
        leaves = {name: change(x).requires_grad_() for name, x in inputs.items()}
        o, _ = delta_rule(**leaves, backend="native")
        return [o, *torch.autograd.grad(o, list(leaves.values()), weights)]

    expected = outcome(torch.clone, weights)
    # time last, heads first, or every second of a longer row: nothing is contiguous as the kernels want it
    for change in (
        lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.stack([x, x], dim=2).flatten(1, 2)[:, ::2],
    ):
        assert all(map(torch.equal, outcome(change, change(weights)), expected))


@pytest.mark.parametrize("result", [0, 1])
def test_each_result_alone_has_gradients(result):
    inputs = gate_inputs("a per channel", T=40, state=True)
    gradients = []
    for backend, dtype in (("reference", torch.float64), ("native", torch.float32)):
        leaves = {name: x.requires_grad_() for name, x in rounded(inputs, dtype).items()}
        value = delta_rule(**leaves, output_final_state=True, backend=backend)[result]
        wanted = [leaves[name] for name in ("k", "v", "beta", "a", "initial_state")]
        gradients.append([x.double() for x in torch.autograd.grad(value.sum(), wanted)])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["a per channel", "angle, a per pair"])
def test_halves_are_computed_in_float32(dtype, kind):
    inputs = rounded(gate_inputs(kind, T=40), dtype)
    actual, expected = (results(inputs, backend, dtype) for backend in ("native", "reference"))
    assert (actual["o"].dtype, actual["S"].dtype, actual["da"].dtype) == (dtype, torch.float32, dtype)
    # one rounding of each, to 4e-3 in bfloat16
    assert_near(actual, {name: x.double() for name, x in expected.items()}, 1e-2)


def test_what_it_does_not_offer_is_refused_by_name_and_served_by_auto():
    inputs = gate_inputs("a per channel", T=9)
    with pytest.raises(UserError, match='"native" cannot run this: float64 is not offered there'):
        delta_rule(**inputs, backend="native")
    assert delta_rule(**inputs)[0].dtype == torch.float64
    many = rounded(random_inputs(T=2, n=17)) | {"a": torch.rand(2, 2, 2, 5)}
    with pytest.raises(UserError, match="more than 16 Householder factors are not offered there"):
        delta_rule(**many, householders=17, backend="native")
    assert delta_rule(**many, householders=17)[0].shape == (2, 2, 2, 3)


def test_a_library_from_before_these_kernels_leaves_them_to_the_chunked_form(monkeypatch):
    inputs = rounded(gate_inputs("a per channel", T=9))
    older = {name: call for name, call in library.CALL.items() if not name.startswith("channel")}
    monkeypatch.setattr(library, "CALL", older)
    with pytest.raises(UserError, match="from before it had gates per key channel: reinstall"):
        delta_rule(**inputs, backend="native")


def test_without_gradients_nothing_is_kept_and_with_them_a_state_every_64_steps():
    from statetrack.ops.delta_rule.native import delta_forward

    x = rounded(gate_inputs("a per channel", T=100))
    arguments = (x["q"], x["k"], x["v"], x["beta"], x["a"], None, None, 1.0, 1, False)
    assert [y.numel() for y in delta_forward(*arguments, False)[2:]] == [0, 0]
    assert delta_forward(*arguments, True)[2].shape == (4, 2, 16, 16)


def test_the_ops_keep_the_rules_of_torch_library():
    from statetrack.ops.delta_rule.native import delta_backward, delta_forward

    x = rounded(gate_inputs("a per channel", T=40, state=True))
    arguments = [x[name] for name in ("q", "k", "v", "beta", "a", "initial_state")] + [None]
    _, final, states, errors = delta_forward(*arguments, 0.5, 1, True, True)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(delta_forward, (*arguments, 0.5, 1, True, True), test_utils=checks)
    gradients = (states, errors, torch.ones_like(x["v"]), final)
    torch.library.opcheck(delta_backward, (*arguments, *gradients, 0.5, 1, True), test_utils=checks)
