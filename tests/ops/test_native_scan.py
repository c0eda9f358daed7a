"""The native selective scan against the reference: results, every gradient, layouts, compilation."""

import functools

import pytest
import scan_inputs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scan_inputs import EXTRAS, RANGES, run

from statetrack.errors import UserError
from statetrack.ops.native import library
from statetrack.ops.selective_scan import selective_scan

pytestmark = pytest.mark.skipif(library.ABSENT is not None, reason="the native library was not built")
random_inputs = functools.partial(scan_inputs.random_inputs, B=2, T=19)


def assert_close(actual, expected, tolerance=2e-5):
    """Errors relative to the largest number of each result: gradients of A, D and the bias are long sums."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = (actual[name].double() - value.double()).abs().max() / value.double().abs().max().clamp(min=1)
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("eigenvalues", RANGES)
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("extras", [(), ("D",), ("z",), ("delta_bias",), ("initial_state",), EXTRAS], ids=str)
def test_native_matches_reference(extras, softplus, eigenvalues):
    inputs = random_inputs(T=40, extras=extras)
    options = {"delta_softplus": softplus, "eigenvalues": eigenvalues}
    assert_close(run(inputs, "native", torch.float32, **options), run(inputs, "reference", **options))


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 31, 32, 33, 64, 65])
def test_native_matches_reference_around_the_chunk_length(T):
    inputs = random_inputs(T=T)
    options = {"eigenvalues": "[-1,1]", "delta_softplus": True}
    assert_close(run(inputs, "native", torch.float32, **options), run(inputs, "reference", **options))


@pytest.mark.parametrize(
    ("B", "T", "D", "N"), [(1, 700, 8, 4), (9, 20, 256, 16), (1, 17, 300, 7), (2, 40, 17, 1), (1, 70, 33, 65)]
)
def test_native_matches_reference_at_odd_sizes(B, T, D, N):
    inputs = random_inputs(B=B, T=T, D=D, N=N)
    options = {"eigenvalues": "[-1,1]", "delta_softplus": True}
    assert_close(run(inputs, "native", torch.float32, **options), run(inputs, "reference", **options))


@settings(max_examples=30)
@given(
    sizes=st.tuples(*(st.integers(1, high) for high in (10, 50, 40, 20))),
    extras=st.sets(st.sampled_from(EXTRAS)),
    eigenvalues=st.sampled_from(RANGES),
    softplus=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_native_matches_reference_for_any_shape(sizes, extras, eigenvalues, softplus, seed):
    inputs = scan_inputs.random_inputs(*sizes, extras=extras, seed=seed)
    options = {"eigenvalues": eigenvalues, "delta_softplus": softplus}
    assert_close(run(inputs, "native", torch.float32, **options), run(inputs, "reference", **options))


@pytest.mark.parametrize("time_last", [("u", "z"), ("delta", "B"), ("u", "delta", "z", "B", "C")])
def test_memory_layout_changes_nothing(time_last):
    """The Mamba layer hands over a mixture: some tensors with time last in memory, some with channels."""
    inputs = random_inputs(T=70, D=40)
    expected = run(inputs, "native", torch.float32)
    turned = {name: x.mT.contiguous().mT if name in time_last else x for name, x in inputs.items()}
    assert all(torch.equal(x, expected[name]) for name, x in run(turned, "native", torch.float32).items())


def test_slices_and_expanded_gradients_are_read_where_they_lie():
    inputs = {name: x.float() for name, x in random_inputs(T=40, D=20).items()}
    doubled = {
        name: torch.stack([x, x], -1).flatten(-2)[..., ::2] if x.ndim == 3 else x
        for name, x in inputs.items()
    }
    results = []
    for given_inputs, gradient in (
        (inputs, torch.ones(2, 20, 40)),
        (doubled, torch.ones(()).expand(2, 20, 40)),
    ):
        leaves = {name: x.detach().requires_grad_() for name, x in given_inputs.items()}
        out = selective_scan(**leaves, backend="native")
        results.append([out, *torch.autograd.grad(out, list(leaves.values()), gradient)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_output_follows_the_memory_layout_of_u():
    inputs = {name: x.float() for name, x in random_inputs().items()}
    assert selective_scan(**inputs, backend="native").is_contiguous()
    inputs["u"] = inputs["u"].mT.contiguous().mT
    assert selective_scan(**inputs, backend="native").mT.is_contiguous()


@pytest.mark.parametrize("eigenvalues", RANGES)
def test_single_steps_after_a_prefill_equal_the_full_pass_to_the_last_bit(eigenvalues):
    inputs = {name: x.float() for name, x in random_inputs(T=40).items()}
    options = {"return_last_state": True, "eigenvalues": eigenvalues, "backend": "native"}
    expected, last = selective_scan(**inputs, **options)
    time = ("u", "delta", "z", "B", "C")

    def part(start, stop, h):
        cut = {name: x[..., start:stop] if name in time else x for name, x in inputs.items()}
        return cut | {"initial_state": h}

    out, h = selective_scan(**part(0, 35, inputs["initial_state"]), **options)
    outputs = [out]
    for t in range(35, 40):
        out, h = selective_scan(**part(t, t + 1, h), **options)
        outputs.append(out)
    assert torch.equal(h, last)
    assert torch.equal(torch.cat(outputs, -1), expected)


@pytest.mark.parametrize("eigenvalues", RANGES)
def test_results_stay_finite_where_the_exponential_underflows(eigenvalues):
    inputs = random_inputs(T=40, D=4, B=3)
    inputs["delta"] = 10.0 ** torch.linspace(-6, 20, 40).expand(3, 4, 40).double()
    results = run(inputs, "native", torch.float32, eigenvalues=eigenvalues)
    assert all(x.isfinite().all() for x in results.values())


@pytest.mark.parametrize("softplus", [False, True])
def test_exponentials_and_softplus_are_exact_to_float32(softplus):
    """h_1 = a h_0 and h_1 = delta B u, read off directly, over the whole range of delta."""
    delta = torch.cat([torch.linspace(-80, 80, 4001), torch.linspace(-1, 1, 4001)]).double()
    delta = delta if softplus else delta.abs()
    ones = torch.ones(1, 1, 8002).double()
    inputs = {"u": ones.mT, "delta": delta.view(1, -1, 1), "A": -ones[0].mT}
    options = {"delta_softplus": softplus, "return_last_state": True, "eigenvalues": "[0,1]"}
    inputs |= {"B": ones[..., :1], "C": ones[..., :1], "initial_state": ones.mT}
    for change in ({"B": 0 * ones[..., :1]}, {"initial_state": 0 * ones.mT}):
        _, expected = selective_scan(**(inputs | change), **options, backend="reference")
        single = {name: x.float() for name, x in (inputs | change).items()}
        _, h = selective_scan(**single, **options, backend="native")
        # exp(-x) moves by x times the rounding of x: a few units where it is about e^-80
        torch.testing.assert_close(h.double(), expected, rtol=1e-5, atol=1e-37)
        near = expected > 0.1
        torch.testing.assert_close(h.double()[near], expected[near], rtol=5e-7, atol=0)


def test_nan_is_not_swallowed():
    inputs = {name: x.float() for name, x in random_inputs(T=5).items()}
    for name in ("u", "delta", "B", "C", "z"):
        poisoned = inputs | {name: inputs[name].clone()}
        poisoned[name][0, :, 2] = torch.nan
        assert selective_scan(**poisoned, backend="native")[0, :, 2].isnan().all(), name


def test_parameters_may_stay_in_float32_beside_inputs_in_halves():
    inputs = random_inputs()
    leaves = {name: x.bfloat16() if name in ("u", "delta", "z") else x.float() for name, x in inputs.items()}
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    out, h = selective_scan(**leaves, return_last_state=True, backend="native")
    (out.sum() + h.sum()).backward()
    assert (out.dtype, h.dtype) == (torch.bfloat16, torch.float32)
    assert all(x.grad.dtype == x.dtype for x in leaves.values())


def test_what_it_does_not_offer_is_refused_by_name_and_served_by_auto():
    inputs = {name: x.float() for name, x in random_inputs().items()}
    groups = inputs | {"B": inputs["B"][:, None].expand(-1, 2, -1, -1)}
    constant = inputs | {"C": inputs["A"]}
    for change, reason in (
        (groups, "fewer than 16"),
        (constant, "constant in time"),
        (random_inputs(), "float64 is not offered there"),
    ):
        with pytest.raises(UserError, match=f'"native" cannot run this: .*{reason}'):
            selective_scan(**change, backend="native")
        assert selective_scan(**change).shape == (2, 6, 19)
    one_group = inputs | {"B": inputs["B"][:, None]}
    assert torch.equal(
        selective_scan(**one_group, backend="native"), selective_scan(**inputs, backend="native")
    )


def test_second_derivatives_are_refused_not_wrong():
    inputs = {name: x.float().requires_grad_() for name, x in random_inputs().items()}
    out = selective_scan(**inputs, backend="native")
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.sum(), inputs["u"], create_graph=True)


@pytest.mark.parametrize(("T", "N"), [(256, 16), (1024, 16), (256, 64)])
def test_the_backward_keeps_no_more_numbers_than_u_holds(T, N):
    from statetrack.ops.selective_scan.native import scan_forward

    inputs = {name: x.float() for name, x in random_inputs(T=T, D=32, N=N, extras=()).items()}
    nothing = (None,) * 4
    saved = {keep: scan_forward(*inputs.values(), *nothing, False, False, keep)[2] for keep in (True, False)}
    assert saved[True].numel() <= inputs["u"].numel()
    assert saved[False].numel() == 0


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch itself
def test_compiles_into_one_graph():
    inputs = {name: x.float() for name, x in random_inputs().items()}

    def results(scan):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        out, h = scan(**leaves, return_last_state=True, delta_softplus=True)
        return [out, h, *torch.autograd.grad(out.square().sum() + h.sum(), list(leaves.values()))]

    compiled = torch.compile(selective_scan, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(results(compiled), results(selective_scan), strict=True):
        assert torch.equal(actual, expected)


def test_the_ops_keep_the_rules_of_torch_library():
    from statetrack.ops.selective_scan.native import scan_backward, scan_forward

    x = {name: tensor.float() for name, tensor in random_inputs().items()}
    out, last, saved = scan_forward(*x.values(), True, True, True)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(scan_forward, (*x.values(), True, True, True), test_utils=checks)
    inputs = list(x.values())[:-1]
    torch.library.opcheck(scan_backward, (*inputs, saved, out, last, True, True), test_utils=checks)


@pytest.mark.parametrize("weights", [(2, 1), (1, 2), (2, 2), (3, 2)])
@pytest.mark.parametrize("eigenvalues", RANGES)
def test_groups_run_one_after_the_other_and_match_the_reference(eigenvalues, weights):
    D = 16 * 6
    inputs = random_inputs(D=D, weights=weights)
    options = {"delta_softplus": True, "eigenvalues": eigenvalues}
    assert_close(run(inputs, "native", torch.float32, **options), run(inputs, "reference", **options))
    packed = random_inputs(B=1, T=9, D=D, weights=weights, extras=())
    options |= {"cu_seqlens": torch.tensor([0, 4, 9])}
    assert_close(run(packed, "native", torch.float32, **options), run(packed, "reference", **options))
