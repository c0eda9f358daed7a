"""The native delta rule against the reference: results, every gradient, layouts, compilation."""

import pytest
import torch
from delta_inputs import OPTIONS, assert_same, random_inputs, run
from hypothesis import given
from hypothesis import strategies as st

from statetrack.errors import UserError
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.native import library

pytestmark = pytest.mark.skipif(library.ABSENT is not None, reason="the native library was not built")
STRETCHES = [1, 2, 31, 32, 33, 47, 48, 49, 100]  # a chunk holds 32 tokens, cut evenly: 47 is one, 48 is two


@pytest.mark.parametrize("T", STRETCHES)
@pytest.mark.parametrize(("given_inputs", "options"), OPTIONS)
def test_native_matches_reference(T, given_inputs, options):
    inputs = random_inputs(T=T, K=8, V=20, **given_inputs)
    expected = run(inputs, "reference", **options)
    assert_same(run(inputs, "native", torch.float32, **options), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("K", "V"), [(1, 1), (3, 70), (16, 16), (24, 40), (60, 31), (65, 5), (128, 128)])
def test_native_matches_reference_at_odd_widths(K, V):
    inputs = random_inputs(B=1, T=70, H=2, K=K, V=V, gate=True, state=True)
    expected = run(inputs, "reference")
    assert_same(run(inputs, "native", torch.float32), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("T", "n"), [(1930, 1), (1290, 1), (19, 11), (300, 11), (97, 16), (61, 32), (500, 9)]
)
def test_no_chunk_is_empty_where_even_chunks_do_not_add_up(T, n):
    """1930 steps are nearest to 60 chunks of 32; of the 33 that an even cut then takes, 59 are enough."""
    inputs = random_inputs(B=1, T=T, H=1, K=4, V=3, n=n, gate=True)
    expected = run(inputs, "chunked", householders=n)
    assert_same(run(inputs, "native", torch.float32, householders=n), expected, rtol=1e-3, atol=1e-3)


@given(
    shape=st.tuples(*(st.integers(1, high) for high in (3, 110, 3, 40, 40))),
    beta=st.sampled_from([0.0, 1.0, 2.0, (1.5, 2.0)]),
    n=st.integers(1, 4),
    gate=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_native_matches_reference_on_any_shape_and_range_of_beta(shape, beta, n, gate, seed):
    B, T, H, K, V = shape
    inputs = random_inputs(B, T, H, K, V, n, gate=gate, beta=beta, seed=seed)
    expected = run(inputs, "reference", householders=n)
    actual = run(inputs, "native", torch.float32, householders=n)
    # In one dimension a state near beta = 2 is a sum of +-1, as large as T: errors are relative to that.
    scale = {name: x.abs().max().clamp(min=1) for name, x in expected.items()}
    assert_same(
        {name: x / scale[name] for name, x in actual.items()},
        {name: x / scale[name] for name, x in expected.items()},
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    "bounds", [[0, 40], [0, 1, 2, 3], [0, 0, 5, 5, 38, 40], [0, 33, 33], [0, 70, 71, 200]]
)
@pytest.mark.parametrize(("given_inputs", "options"), OPTIONS)
def test_packed_sequences_match_reference(bounds, given_inputs, options):
    inputs = random_inputs(B=1, T=bounds[-1], sequences=len(bounds) - 1, **given_inputs)
    options = options | {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    expected = run(inputs, "reference", **options)
    assert_same(run(inputs, "native", torch.float32, **options), expected, rtol=1e-4, atol=1e-4)


def test_errors_stay_small_near_reflections_with_repeated_keys():
    """Five keys, beta = 1.99, T = 2048: the regime of group word problems, where errors do not decay."""
    inputs = random_inputs(B=1, T=2048, H=2, K=32, V=32, beta=1.99)
    inputs["k"] = inputs["k"][:, torch.arange(2048) % 5]
    expected, actual = run(inputs, "reference"), run(inputs, "native", torch.float32)
    for name, value in expected.items():
        assert (actual[name] - value).norm() / value.norm() < 3e-5, name


def test_single_steps_after_a_prefill_equal_the_full_pass():
    inputs = {name: x.float() for name, x in random_inputs(T=40, n=2, gate=True).items()}
    tokens = {"q": 1, "k": 2, "v": 2, "beta": 2, "g": 1}

    def part(start, stop):
        return {name: x[:, start * tokens[name] : stop * tokens[name]] for name, x in inputs.items()}

    options = {"householders": 2, "output_final_state": True, "backend": "native"}
    whole, last = delta_rule(**inputs, **options)
    _, S = delta_rule(**part(0, 35), **options)
    for t in range(35, 40):
        o, S = delta_rule(**part(t, t + 1), initial_state=S, **options)
        torch.testing.assert_close(o, whole[:, t : t + 1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(S, last, rtol=1e-5, atol=1e-5)


def test_memory_layout_changes_nothing():
    inputs = {name: x.float() for name, x in random_inputs(T=40, H=3, K=16, V=16, gate=True).items()}
    weights = torch.randn(2, 40, 3, 16, generator=torch.Generator().manual_seed(1))

    def results(change, weights):
        leaves = {name: change(x).requires_grad_() for name, x in inputs.items()}
        o, _ = delta_rule(**leaves, backend="native")
        return [o, *torch.autograd.grad(o, list(leaves.values()), weights)]

    expected = results(torch.clone, weights)
    # time last, heads first, or every second of a longer row: nothing is contiguous as the kernels want it
    for change in (
        lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.stack([x, x], dim=2).flatten(1, 2)[:, ::2],
    ):
        for actual, value in zip(results(change, change(weights)), expected, strict=True):
            assert torch.equal(actual, value)


@pytest.mark.parametrize("expand", [torch.zeros_like, torch.ones_like])
def test_a_gradient_may_be_one_number_expanded(expand):
    inputs = {name: x.float() for name, x in random_inputs(T=9).items()}
    expected = run_sum(inputs, lambda o: o.backward(expand(o)))
    actual = run_sum(inputs, lambda o: o.backward(expand(o[:1, :1, :1, :1]).expand_as(o)))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def run_sum(inputs, backward):
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    backward(delta_rule(**leaves, backend="native")[0])
    return [x.grad for x in leaves.values()]


def test_each_result_alone_has_gradients():
    inputs = random_inputs(T=40, gate=True, state=True)
    for result in (0, 1):
        gradients = []
        for backend, dtype in (("reference", torch.float64), ("native", torch.float32)):
            leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
            value = delta_rule(**leaves, output_final_state=True, backend=backend)[result]
            wanted = [leaves[name] for name in ("k", "v", "beta", "g", "initial_state")]
            gradients.append([x.double() for x in torch.autograd.grad(value.sum(), wanted)])
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_computed_in_float32(dtype):
    inputs = {name: x.to(dtype) for name, x in random_inputs(T=40).items()}
    results, expected = run(inputs, "native", dtype), run(inputs, "reference", dtype)
    assert (results["o"].dtype, results["S"].dtype, results["dk"].dtype) == (dtype, torch.float32, dtype)
    assert_same(results, expected, rtol=1e-2, atol=1e-2)  # one rounding of each, to 4e-3 in bfloat16


@pytest.mark.parametrize("strong", [-50.0, -1e4, -torch.inf])
def test_strong_decays_neither_overflow_nor_cost_the_digits_of_weak_ones(strong):
    inputs = random_inputs(B=1, T=90, gate=True)
    inputs["g"][:, ::9] = strong
    expected = delta_rule(**inputs, backend="reference")[0]
    results = run(inputs, "native", torch.float32)
    torch.testing.assert_close(results["o"].double(), expected, rtol=1e-4, atol=1e-5)
    assert all(torch.isfinite(x).all() for x in results.values())


def test_nan_is_not_swallowed():
    inputs = {name: x.float() for name, x in random_inputs(T=5, gate=True).items()}
    for name in inputs:
        poisoned = inputs | {name: inputs[name].clone()}
        poisoned[name][0, 2] = torch.nan
        assert delta_rule(**poisoned, backend="native")[0][0, 2].isnan().all(), name


def test_what_it_does_not_offer_is_refused_by_name_and_served_by_auto():
    inputs = random_inputs()
    with pytest.raises(UserError, match='"native" cannot run this: float64 is not offered there'):
        delta_rule(**inputs, backend="native")
    assert delta_rule(**inputs)[0].dtype == torch.float64
    empty = {name: x.float() for name, x in random_inputs(T=0, state=True).items()}
    assert torch.equal(delta_rule(**empty, output_final_state=True)[1], empty["initial_state"])


def test_auto_takes_it_on_a_cpu():
    inputs = {name: x.float().requires_grad_() for name, x in random_inputs().items()}
    assert delta_rule(**inputs)[0].grad_fn.name() == "_NativeBackward"


def test_second_derivatives_are_refused_not_wrong():
    inputs = {name: x.float().requires_grad_() for name, x in random_inputs().items()}
    o, _ = delta_rule(**inputs, backend="native")
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(o.sum(), inputs["v"], create_graph=True)


def test_without_gradients_nothing_is_kept():
    inputs = {name: x.float() for name, x in random_inputs(T=100).items()}
    from statetrack.ops.delta_rule.native import delta_forward

    *_, states, errors = delta_forward(*inputs.values(), None, None, None, 1.0, 1, False, False)
    assert states.numel() == errors.numel() == 0


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch itself
def test_compiles_into_one_graph():
    inputs = {name: x.float() for name, x in random_inputs(T=40, gate=True, state=True).items()}

    def results(rule):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        o, S = rule(**leaves, output_final_state=True)
        return [o, S, *torch.autograd.grad(o.square().sum() + S.sum(), list(leaves.values()))]

    compiled = torch.compile(delta_rule, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(results(compiled), results(delta_rule), strict=True):
        assert torch.equal(actual, expected)


def test_the_ops_keep_the_rules_of_torch_library():
    from statetrack.ops.delta_rule.native import delta_backward, delta_forward

    x = {name: tensor.float() for name, tensor in random_inputs(T=40, gate=True, state=True).items()}
    arguments, options = [*x.values(), None], (0.5, 1, True)
    _, final, states, errors = delta_forward(*arguments, *options, True)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(delta_forward, (*arguments, *options, True), test_utils=checks)
    gradients = (states, errors, torch.ones_like(x["v"]), final)
    torch.library.opcheck(delta_backward, (*arguments, *gradients, *options), test_utils=checks)
