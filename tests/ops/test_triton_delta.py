"""The Triton kernels of the delta rule against the loop that defines it, interpreted where there is no GPU.

Both families are run: one kernel each way for short sequences, the chunked form for the rest.
"""

from dataclasses import replace

import pytest
import torch
from delta_inputs import OPTIONS, SPREAD, assert_same, largest_error, random_inputs, run

from statetrack.errors import UserError
from statetrack.ops.checks import checked
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.delta_rule.triton import backend as triton_backend
from statetrack.ops.delta_rule.triton import launches
from statetrack.ops.delta_rule.triton import plan as plans
from statetrack.ops.triton_runtime.sizes import HOPPER, GpuLimits


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["short", "chunked", "pairs", "many"])
def family(request, monkeypatch):
    """One kernel each way; chunks with few sequences, by one or by two; chunks with many."""
    forget()
    if request.param != "short":
        monkeypatch.setattr(plans, "SHORT_MAX_STEPS", 0)
    if request.param == "pairs":
        launch = plans.Launch(4, 16, 2)
        plan_with(monkeypatch, join_pairs=launch, sweep_pairs=launch, sweep_pairs_backward=launch)
    if request.param == "many":
        limits = GpuLimits(multiprocessors=0, shared_memory=HOPPER.shared_memory)
        monkeypatch.setattr(launches, "gpu_limits", lambda device: limits)
    yield request.param
    forget()


def plan_with(monkeypatch, **launched):
    """Kernels that are meant for chunks of 64 rows of bfloat16, which the interpreter cannot do."""
    make_plan = plans.make_plan.__wrapped__

    def plan(*args):
        packed = args[6]
        return make_plan(*args) if packed else replace(make_plan(*args), **launched)

    monkeypatch.setattr(launches, "make_plan", plan)


def forget():
    """The plans and launches made so far."""
    plans.make_plan.cache_clear()
    triton_backend.FORWARD_CALLS.clear()
    triton_backend.BACKWARD_CALLS.clear()


def compare(inputs, device, dtype=torch.float32, tolerance=1e-4, **options):
    """Triton on inputs rounded to `dtype`, against the reference in float64 on the same numbers."""
    rounded = {name: x.to(dtype).double().to(device) for name, x in inputs.items()}
    expected = run(rounded, "reference", **options)
    assert_same(run(rounded, "triton", dtype, **options), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("T", [1, 15, 16, 17, 31, 32, 33, 70])
def test_lengths_around_the_chunk(T, family, device):
    compare(random_inputs(B=2, T=T, H=1, state=family != "short"), device)


@pytest.mark.parametrize("T", [1, 33])
def test_float16(T, family, device):
    # results are rounded once, to 1e-3
    compare(random_inputs(B=1, T=T, H=2, state=family != "short"), device, torch.float16, tolerance=1e-2)


@pytest.mark.parametrize(
    ("T", "n", "K", "V"),
    [(39, 1, 24, 32), (48, 1, 32, 16), (24, 2, 32, 32), (32, 2, 32, 32), (100, 1, 8, 20), (128, 1, 16, 16)],
)
def test_the_longest_sequences_of_one_program(T, n, K, V, device):
    inputs = random_inputs(B=1, T=T, H=2, K=K, V=V, n=n)
    compare(inputs, device, householders=n, use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize(("change", "answer_only"), SPREAD)
def test_sizes_far_apart(change, answer_only, l2norm, family, device):
    inputs = {name: x.to(device) for name, x in random_inputs(B=1, T=75, H=1, K=8, V=8).items()}
    change(inputs)
    options = {"use_qk_l2norm_in_kernel": l2norm, "answer_only": answer_only}
    actual, expected = run(inputs, "triton", torch.float32, **options), run(inputs, "reference", **options)
    assert largest_error(actual, expected) < 1e-5


@pytest.mark.parametrize("T", [33, 48, 70, 200])
def test_float32_as_a_sum_of_bfloat16_terms_has_errors_below_1e_4_near_reflections(T, device, monkeypatch):
    """The products of a GPU, on five repeated keys and beta = 1.99; 200 steps take the chunk kernels."""
    if device.type == "cpu":
        monkeypatch.setattr(plans, "SPLIT", "emulated")
    forget()
    inputs = random_inputs(B=1, T=T, H=1, K=32, V=32, beta=1.99)
    inputs["k"] = inputs["k"][:, torch.arange(T) % 5]
    inputs = {name: x.to(device) for name, x in inputs.items()}
    options = {"use_qk_l2norm_in_kernel": True}
    actual, expected = run(inputs, "triton", torch.float32, **options), run(inputs, "chunked", **options)
    forget()
    for name, value in expected.items():
        error = (actual[name].double() - value).norm() / value.norm()
        assert error < (1e-5 if name == "S" else 1e-4), name


@pytest.mark.parametrize("max_seqlen", [37, 128, 129])
@pytest.mark.parametrize("n", [1, 2])
def test_packed_sequences_known_to_be_short(n, max_seqlen, device):
    """With empty ones between and at the ends; above 128 steps they take the chunked form."""
    bounds = torch.tensor([0, 0, 5, 5, 42, 43, 43], device=device)
    options = {"householders": n, "cu_seqlens": bounds, "max_seqlen": max_seqlen}
    compare(random_inputs(B=1, T=43, H=2, K=20, V=18, n=n, sequences=6), device, **options)


@pytest.mark.parametrize("max_seqlen", [None, 20, 129])
def test_offsets_may_lie_apart(max_seqlen, device):
    bounds = torch.tensor([[0, 5, 5, 20], [99] * 4], device=device).mT.flatten()[::2]
    assert not bounds.is_contiguous()
    compare(random_inputs(B=1, T=20), device, cu_seqlens=bounds, max_seqlen=max_seqlen)


def test_a_longest_length_needs_packed_sequences(device):
    inputs = {name: x.float().to(device) for name, x in random_inputs().items()}
    with pytest.raises(UserError, match="only with cu_seqlens"):
        delta_rule(**inputs, max_seqlen=7)


@pytest.mark.parametrize(("given_inputs", "options"), OPTIONS)
def test_every_option(given_inputs, options, family, device):
    compare(random_inputs(B=1, T=22, H=2, K=5, V=18, **given_inputs), device, **options)


@pytest.mark.parametrize("bounds", [[0, 0, 5, 42], [0, 32, 33, 42]])
@pytest.mark.parametrize(("given_inputs", "options"), OPTIONS)
def test_packed_sequences(bounds, given_inputs, options, device):
    inputs = random_inputs(B=1, T=42, H=1, sequences=3, **given_inputs)
    compare(inputs, device, cu_seqlens=torch.tensor(bounds, device=device), **options)


@pytest.mark.parametrize(("K", "V"), [(24, 60), (60, 24), (128, 16), (16, 128), (200, 40)])
def test_widths(K, V, device):
    compare(random_inputs(B=1, T=35, H=1, K=K, V=V, state=True), device, use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize(("given_inputs", "options"), OPTIONS)
def test_gradients_of_q_and_k_apart(given_inputs, options, device, monkeypatch):
    """The first launch hands dM on to the second."""
    monkeypatch.setattr(plans, "SHORT_MAX_STEPS", 0)
    plan_with(monkeypatch, gradients_q=plans.Launch(4, 16), gradients_k=plans.Launch(4, 16))
    forget()
    compare(random_inputs(B=1, T=22, H=2, K=5, V=18, **given_inputs), device, **options)
    forget()


@pytest.mark.parametrize("d", [64, 128])
def test_pairs_are_for_sweeps_alone_on_a_multiprocessor(d):
    by_programs = [plans.make_plan(d, d, 1000, n, torch.bfloat16, True) for n in range(1, 200)]
    pairs = [plan for plan in by_programs if plan.join_pairs is not None]
    assert len(pairs) == HOPPER.multiprocessors * 16 // d
    for plan in pairs:
        assert plan.sweep_pairs.slice == plan.sweep_pairs_backward.slice == 16
        assert plan.outputs is not None
        assert plan.prepare_backward is not None


def test_plans_follow_the_number_of_multiprocessors():
    few, many = (
        plans.make_plan(64, 64, 1000, 20, torch.bfloat16, True, gpu=GpuLimits(n, HOPPER.shared_memory))
        for n in (16, 132)
    )
    assert few.sweep.slice > many.sweep.slice
    assert few.outputs is None
    assert many.outputs is not None


@pytest.mark.parametrize("low", [0.0, 1.5])
def test_beta_at_its_ends_and_repeated_keys(low, family, device):
    inputs = random_inputs(B=1, T=40, H=1, K=8, V=4, beta=(low, 2.0))
    inputs["k"] = inputs["k"][:, :5].repeat(1, 8, 1, 1)
    inputs["beta"][:, ::3] = low
    compare(inputs, device)


@pytest.mark.parametrize("backend", ["reference", "chunked", "triton"])
@pytest.mark.parametrize("maximum", [1.0, 2.0])
def test_beta_from_logits(maximum, backend, family, device):
    inputs = {name: x.to(device) for name, x in random_inputs(B=1, T=20, H=1).items()}
    logits = inputs | {"beta": torch.logit(inputs["beta"] / 2)}
    dtype = torch.float32 if backend == "triton" else torch.float64
    actual = run(logits, backend, dtype, beta_from_logits=maximum)
    weights = {name: x.clone().requires_grad_() for name, x in logits.items()}
    expected = run(weights | {"beta": maximum * weights["beta"].sigmoid()}, "reference")
    slope = maximum * weights["beta"].sigmoid() * (1 - weights["beta"].sigmoid())
    expected["dbeta"] = expected["dbeta"] * slope
    tolerance = 1e-4 if backend == "triton" else 1e-9
    assert_same(actual, expected, rtol=tolerance, atol=tolerance)


def check_hard_betas(backend, dtype, maximum, device):
    inputs = {name: x.to(device) for name, x in random_inputs(B=1, T=20, H=1).items()}
    logits = torch.linspace(-9, 9, 20, dtype=torch.float64, device=device)[torch.randperm(20)].view(1, 20, 1)
    actual = run(inputs | {"beta": logits}, backend, dtype, beta_from_logits=maximum, hard_beta=True)
    share = logits.sigmoid()
    stretched = 1.02 * share - 0.01
    inside = (stretched > 0) & (stretched < 1)
    expected = run(inputs | {"beta": maximum * stretched.clamp(0, 1)}, "reference")
    expected["dbeta"] = torch.where(inside, expected["dbeta"] * maximum * 1.02 * share * (1 - share), 0.0)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    assert_same(actual, expected, rtol=tolerance, atol=tolerance)
    assert 4 < inside.sum() < 16
    assert not actual["dbeta"][~inside].any()


def test_hard_betas_reach_their_bounds_and_have_no_gradient_there(family, device):
    check_hard_betas("triton", torch.float32, 1.0 if family == "chunked" else 2.0, device)


@pytest.mark.parametrize("backend", ["reference", "chunked", "native"])
@pytest.mark.parametrize("maximum", [1.0, 2.0])
def test_hard_betas_of_the_backends_without_kernels(maximum, backend):
    dtype = torch.float32 if backend == "native" else torch.float64
    check_hard_betas(backend, dtype, maximum, torch.device("cpu"))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("strong", [-15.0, -30.0])
def test_the_gradient_of_a_strong_decay_keeps_its_digits(strong, n, device):
    """dg is of the order of e^g: as a difference of sums of order 1 it would be rounding errors."""
    inputs = random_inputs(B=1, T=70, H=1, n=n, gate=True, state=True)
    inputs["g"][:, 5::9] = strong
    inputs = {name: x.to(device) for name, x in inputs.items()}
    expected = run(inputs, "reference", householders=n)["dg"]
    actual = run(inputs, "triton", torch.float32, householders=n)["dg"].double()
    error = ((actual - expected).abs() / expected.abs())[:, 5::9]
    assert error.median() < 1e-4


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of the interpreter
def test_checked_mode_names_the_first_bad_step_of_a_chunk(family, device):
    """An overflow spreads to earlier outputs of its chunk: infinity times the zeros above the diagonal."""
    inputs = {name: x.float().to(device) for name, x in random_inputs(B=1, T=20, H=1).items()}
    inputs["v"][:, 12:] = 3e38
    o, _ = delta_rule(**inputs, scale=1e3, backend="triton")
    assert o[:, 13:].isfinite().all(dim=-1).logical_not().all()
    with checked(), pytest.raises(UserError, match=r"out\[0, 12, .*\(step 12 is the first\)"):
        delta_rule(**inputs, scale=1e3, backend="triton")


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_keys_too_long_to_be_squared_give_nan_and_no_zeros(family, device):
    inputs = {name: x.float().to(device) for name, x in random_inputs(B=1, T=20, H=1).items()}
    inputs["k"][:, 7] *= 1e20
    options = {"use_qk_l2norm_in_kernel": True, "backend": "triton"}
    o, _ = delta_rule(**inputs, **options)
    assert o[:, 7:].isnan().all()
    with checked(), pytest.raises(UserError, match=r"\|k\|\^2 of a key longer than 1.8e19"):
        delta_rule(**inputs, **options)


def test_a_loss_on_the_last_state_alone(family, device):
    inputs = {name: x.float().to(device) for name, x in random_inputs(T=20, gate=True).items()}
    results = []
    for backend in ("reference", "triton"):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        _, S = delta_rule(**leaves, output_final_state=True, backend=backend)
        assert S is not None
        # q touches no state
        gradients = torch.autograd.grad(S.square().sum(), list(leaves.values()), allow_unused=True)
        results.append(gradients[1:])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_no_last_state_is_made_unless_asked_for(family, device):
    inputs = {name: x.float().to(device) for name, x in random_inputs(T=20).items()}
    expected, _ = delta_rule(**inputs, backend="reference")
    o, S = delta_rule(**inputs, backend="triton")
    assert S is None
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-4)


def test_transposed_inputs_give_the_same(family, device):
    inputs = {name: x.float().to(device) for name, x in random_inputs(T=20).items()}
    moved = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    expected = run(inputs, "triton", torch.float32)
    assert_same(run(moved, "triton", torch.float32), expected, rtol=1e-6, atol=1e-6)


def test_second_derivatives_are_refused_not_wrong(device):
    inputs = {name: x.float().to(device).requires_grad_() for name, x in random_inputs().items()}
    o, _ = delta_rule(**inputs, backend="triton")
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(o.sum(), inputs["v"], create_graph=True)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 7, 20]])
def test_the_ops_describe_their_results(cu_seqlens, gate, family, device):
    """Fake and real implementations agree in shape, dtype and strides, so torch.compile can trust them."""
    inputs = [x.float().to(device) for x in random_inputs(B=1, T=20, gate=gate).values()]
    inputs += [None] * (6 - len(inputs))  # no gate, no first state
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, device=device)
    options = 0.5, 1, True, 2.0, None, True, False
    forward = (*inputs, bounds, *options, True)
    op = torch.ops.statetrack.delta_rule_forward.default
    torch.library.opcheck(op, forward, test_utils=("test_schema", "test_faketensor"))
    o, _, *saved = op(*forward)
    backward = (*inputs, bounds, saved, torch.ones_like(o), None, *options)
    op = torch.ops.statetrack.delta_rule_backward.default
    torch.library.opcheck(op, backward, test_utils=("test_schema", "test_faketensor"))


# dynamo itself makes an instance of every autograd function it traces
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_torch_compile_takes_the_ops_at_changing_lengths(device):
    def loss(q, k, v, beta):
        o, S = delta_rule(q, k, v, beta, beta_from_logits=2.0, output_final_state=True, backend="triton")
        assert S is not None
        return o.square().sum() + S.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for T in (20, 40, 50):
        inputs = random_inputs(B=1, T=T, H=1, K=16, V=16)
        leaves = [x.float().to(device).requires_grad_() for x in inputs.values()]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        actual = torch.autograd.grad(compiled(*leaves), leaves)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("state", [False, True])
def test_a_logit_of_beta_that_is_nan_is_seen_from_its_step_on(state, hard):
    """In the short kernels, and with a state in the chunked ones."""
    inputs = {name: x.float() for name, x in random_inputs(B=1, T=9, H=1, state=state).items()}
    inputs["beta"][:, 5] = float("nan")
    o, _ = delta_rule(**inputs, beta_from_logits=2.0, hard_beta=hard, backend="triton")
    assert o[:, 5:].isnan().all()


@pytest.mark.parametrize("beta", [0.0, 1e-6, 1e-3])
def test_gradients_of_small_betas_keep_their_digits_in_half_precision(beta):
    """dbeta is a quotient by beta, of a number that underflows in float16."""
    given = random_inputs(B=1, T=40, H=1, K=16, V=16, state=True, beta=beta)
    given = {name: x.half() for name, x in given.items()}
    gradients = []
    for dtype, backend in ((torch.float64, "reference"), (torch.float16, "triton")):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in given.items()}
        o, _ = delta_rule(**leaves, backend=backend)
        weights = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view_as(o).to(dtype)
        gradients.append(torch.autograd.grad((o * weights).sum(), leaves["beta"])[0].double())
    assert (gradients[1] - gradients[0]).abs().max() < 2e-3 * gradients[0].abs().max()
