"""The native gated linear attention against the loop: results, every gradient, layouts, compilation."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_gated_linear_attention import GATES, random_inputs, run, with_gradients

from statetrack.errors import UserError
from statetrack.ops.gated_linear_attention import gated_linear_attention
from statetrack.ops.native import library

pytestmark = pytest.mark.skipif(library.ABSENT is not None, reason="the native library was not built")
KINDS = ("channel", "head")


def rounded(inputs, dtype=torch.float32):
    return [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]


def assert_near(actual, expected, tolerance=1e-5):
    """Relative to the largest number of each tensor."""
    for x, y in zip(actual, expected, strict=True):
        assert x.isfinite().all()
        if x.numel():
            assert (x.double() - y).abs().max() <= tolerance * y.abs().max().clamp(min=1e-3)


def assert_is_the_loop(exact, tolerance=1e-5, **options):
    expected = with_gradients(exact, "reference", **options)
    assert_near(with_gradients(rounded(exact), "native", **options), expected, tolerance)


# a chunk has 16 tokens with a gate per channel and 32 with one per head; states are saved every 64
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 31, 33, 64, 65, 150])
@pytest.mark.parametrize("kind", GATES)
def test_native_is_the_loop_with_all_gradients(kind, T):
    assert_is_the_loop(random_inputs(T, kind, K=8, V=20))


@pytest.mark.parametrize(("K", "V"), [(1, 1), (3, 70), (16, 16), (60, 31), (65, 5), (128, 128)])
@pytest.mark.parametrize("kind", KINDS)
def test_widths_need_not_be_multiples_of_a_vector(kind, K, V):
    assert_is_the_loop(random_inputs(70, kind, B=1, H=2, K=K, V=V))


@given(shape=st.tuples(*(st.integers(1, high) for high in (3, 70, 3, 40, 40))), kind=st.sampled_from(KINDS))
def test_native_is_the_loop_on_any_shape(shape, kind):
    B, T, H, K, V = shape
    assert_is_the_loop(random_inputs(T, kind, B=B, H=H, K=K, V=V))


def loop(q, k, v, a, S, do, dS):
    """Forward and adjoint of S_t = a_t S_{t-1} + k_t v_t^T, o_t = S_t^T q_t for one head, in numpy."""
    states, o = [S], []
    for t in range(len(q)):
        S = a[t][:, None] * S + np.outer(k[t], v[t])
        states.append(S)
        o.append(S.T @ q[t])
    gradients = [np.zeros_like(x) for x in (q, k, v, a)]
    dq, dk, dv, da = gradients
    D = dS
    for t in reversed(range(len(q))):
        D = D + np.outer(q[t], do[t])
        dq[t], dk[t], dv[t] = states[t + 1] @ do[t], D @ v[t], D.T @ k[t]
        da[t] = (D * states[t]).sum(1)
        D = a[t][:, None] * D
    return [np.stack(o), S, *gradients, D]


@pytest.mark.parametrize("kind", KINDS)
def test_native_is_an_independent_loop_in_numpy(kind):
    exact = random_inputs(100, kind, B=1, H=1, K=5, V=7)
    do, dS = torch.randn(1, 100, 1, 7), torch.randn(1, 1, 5, 7)
    one = [x[0, :, 0].detach().numpy() for x in exact[:4]]
    one[3] = one[3] if kind == "channel" else one[3][:, None].repeat(5, 1)
    expected = loop(*one, exact[5][0, 0].detach().numpy(), do[0, :, 0].numpy(), dS[0, 0].numpy())
    expected[5] = expected[5] if kind == "channel" else expected[5].sum(1)
    leaves = [x for x in rounded(exact) if x is not None]
    q, k, v, a, state = leaves
    o, S = run((q, k, v, a, None, state), "native", scale=1.0)
    gradients = torch.autograd.grad([o, S], leaves, [do, dS])
    actual = [o[0, :, 0], S[0, 0], *(x[0, :, 0] for x in gradients[:4]), gradients[4][0, 0]]
    assert_near(actual, [torch.from_numpy(x) for x in expected])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences_at_and_across_zero(kind):
    """The loss is linear in every single gate: a difference over a whole unit is exact."""
    q, k, v, a, _, S = (None if x is None else x.detach() for x in random_inputs(40, kind, B=1, H=1))
    a[:, 18:22] = torch.tensor([0.0, 1e-7, -1e-7, 0.0], dtype=torch.float64).view(1, 4, *[1] * (a.ndim - 2))
    weights = torch.randn(1, 40, 1, 3, dtype=torch.float64)

    def loss(a):
        return (run((q, k, v, a, None, S), "reference")[0] * weights).sum()

    leaf = a.float().requires_grad_()
    o, _ = run((*(x.float() for x in (q, k, v)), leaf, None, S.float()), "native")
    (da,) = torch.autograd.grad((o * weights).sum(), leaf)
    for t, i in itertools.product((17, 18, 19, 20, 21, 22), range(4 if kind == "channel" else 1)):
        place = (0, t, 0, i)[: a.ndim]
        step = torch.zeros_like(a)
        step[place] = 0.5
        difference = loss(a + step) - loss(a - step)
        torch.testing.assert_close(da[place].double(), difference, rtol=1e-4, atol=1e-5)
        assert difference != 0


@pytest.mark.parametrize("size", [0.0, 1e-8, -1e-8, 1e-30])
@pytest.mark.parametrize("kind", KINDS)
def test_gates_that_are_tiny_over_a_chunk_lose_nothing_of_what_follows(kind, size):
    exact = random_inputs(150, kind)
    with torch.no_grad():
        exact[3][:, 40:100] = size
    assert_is_the_loop(exact)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("bounds", [[0, 5, 5, 70, 71, 200, 200], [0, 0, 64], [0, 1, 2, 3]])
def test_packed_sequences_are_those_of_the_loop(kind, bounds):
    exact = random_inputs(bounds[-1], kind, B=1, N=len(bounds) - 1)
    assert_is_the_loop(exact, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize("kind", GATES)
def test_pieces_and_single_steps_with_carried_state_equal_one_pass(kind):
    inputs = rounded(random_inputs(140, kind))
    expected = with_gradients(inputs, "native")
    outputs, S = [], inputs[5]
    for start, stop in ((0, 1), (1, 2), (2, 75), (75, 75), (75, 138), (138, 139), (139, 140)):
        backend = "native" if stop > start else "auto"
        o, S = run([x if x is None else x[:, start:stop] for x in inputs[:5]] + [S], backend)
        outputs.append(o)
    o = torch.cat(outputs, dim=1)
    loss = (o * torch.arange(o.numel()).view(o.shape).cos()).sum() + S.sin().sum()
    assert_near([o, S, *torch.autograd.grad(loss, [x for x in inputs if x is not None])], expected, 5e-5)


@pytest.mark.parametrize("kind", GATES)
def test_near_the_border_float32_keeps_five_digits_over_2048_steps(kind):
    exact = random_inputs(2048, kind, B=1, H=1, K=8)
    with torch.no_grad():
        size = 0.99 + 0.01 * exact[3].abs()
        exact[3].copy_((size * torch.where(exact[3] < 0, -1, 1)).float())
    if exact[4] is not None:  # the loop would add up its own rounding of the angles: take what float32 holds
        exact[4] = exact[4].detach().float().double().requires_grad_()
    # in float64 the chunks are the loop, and far quicker
    assert_near(with_gradients(rounded(exact), "native"), with_gradients(exact, "chunked"))


def test_memory_layout_changes_nothing():
    inputs = [x for x in rounded(random_inputs(40, H=3, K=16, V=16)) if x is not None][:4]
    weights = torch.randn(2, 40, 3, 16)

    def results(change, weights):
        q, k, v, a = leaves = [change(x.detach()).requires_grad_() for x in inputs]
        o, _ = gated_linear_attention(q, k, v, a=a, backend="native")
        (d_head,) = torch.autograd.grad(
            gated_linear_attention(q, k, v, a=a[..., 3], backend="native")[0], a, weights
        )
        return [o, d_head, *torch.autograd.grad(o, leaves, weights)]

    expected = results(torch.clone, weights)
    # time last, heads first, or every second of a longer row: nothing is contiguous as the kernels want it
    for change in (
        lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.stack([x, x], dim=2).flatten(1, 2)[:, ::2],
        lambda x: x[:, :1].expand_as(x) + x - x[:, :1],
    ):
        for actual, value in zip(results(change, change(weights)), expected, strict=True):
            torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-4)


def test_a_gradient_may_be_one_number_expanded():
    gradients = []
    for whole in (True, False):
        inputs = rounded(random_inputs(20))
        o, _ = run(inputs, "native")
        o.backward(torch.ones_like(o) if whole else torch.ones(()).expand_as(o))
        gradients.append([x.grad for x in inputs if x is not None])
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("result", [0, 1])
def test_each_result_alone_has_gradients(result, kind):
    gradients = []
    for backend, inputs in (("reference", exact := random_inputs(40, kind)), ("native", rounded(exact))):
        wanted = [x for i, x in enumerate(inputs) if i in (1, 2, 3, 5)]
        gradients.append(torch.autograd.grad(run(inputs, backend)[result].sum(), wanted))
    assert_near(gradients[1], gradients[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_computed_in_float32(dtype):
    inputs = rounded(random_inputs(40), dtype)
    actual, expected = (with_gradients(inputs, backend) for backend in ("native", "reference"))
    assert (actual[0].dtype, actual[1].dtype, actual[2].dtype) == (dtype, torch.float32, dtype)
    assert_near(actual, [x.double() for x in expected], 1e-2)  # one rounding of each, to 4e-3 in bfloat16


def test_what_it_does_not_offer_is_refused_by_name_and_served_by_auto():
    inputs = random_inputs(9)
    with pytest.raises(UserError, match='"native" cannot run this: float64 is not offered there'):
        run(inputs, "native")
    assert run(inputs, "auto")[0].dtype == torch.float64
    assert run(rounded(random_inputs(0)), "auto")[0].shape == (2, 0, 2, 3)


def test_auto_takes_it_on_a_cpu():
    assert run(rounded(random_inputs(9)), "auto")[0].grad_fn.name() == "_NativeBackward"


def test_second_derivatives_are_refused_not_wrong():
    inputs = rounded(random_inputs(9))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(run(inputs, "native")[0].sum(), inputs[3], create_graph=True)


def test_without_gradients_nothing_is_kept():
    from statetrack.ops.gated_linear_attention.native import gated_forward

    q, k, v, a, _, S = (None if x is None else x.detach() for x in rounded(random_inputs(100)))
    assert gated_forward(q, k, v, a, S, None, 1.0, False)[2].numel() == 0
    assert gated_forward(q, k, v, a, S, None, 1.0, True)[2].shape == (4, 2, 16, 16)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch itself
def test_compiles_into_one_graph_with_packed_sequences_and_rotations():
    inputs, offsets = rounded(random_inputs(40, "channel turned", B=1, N=2)), torch.tensor([0, 13, 40])

    def op(q, k, v, a, angle, S):
        options = {"cu_seqlens": offsets, "output_final_state": True}
        return gated_linear_attention(q, k, v, a=a, angle=angle, initial_state=S, **options)

    results = []
    for function in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        o, S = function(*inputs)
        results.append([o, S, *torch.autograd.grad(o.square().sum() + S.sum(), inputs)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_the_ops_keep_the_rules_of_torch_library():
    from statetrack.ops.gated_linear_attention.native import gated_backward, gated_forward

    q, k, v, a, _, S = (None if x is None else x.detach() for x in rounded(random_inputs(40)))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    _, final, states = gated_forward(q, k, v, a, S, None, 0.5, True)
    torch.library.opcheck(gated_forward, (q, k, v, a, S, None, 0.5, True), test_utils=checks)
    gradients = (states, torch.ones_like(v), final)
    torch.library.opcheck(gated_backward, (q, k, v, a, S, None, *gradients, 0.5), test_utils=checks)
