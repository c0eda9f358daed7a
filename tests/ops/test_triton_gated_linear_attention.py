"""The Triton kernels of gated linear attention, interpreted, against the loop in float64."""

import pytest
import torch
from test_gated_linear_attention import random_inputs, run, with_gradients

from statetrack.ops.gated_linear_attention import gated_linear_attention
from statetrack.ops.gated_linear_attention.triton import launches
from statetrack.ops.gated_linear_attention.triton.plan import Plan, make_plan

KINDS = ("channel", "head")


def rounded(inputs, dtype=torch.float32):
    return [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]


def assert_near(actual, expected, tolerance=2e-5):
    """Relative to the largest number of each tensor."""
    for x, y in zip(actual, expected, strict=True):
        assert torch.isfinite(x).all()
        assert (x.double() - y).abs().max() <= tolerance * y.abs().max().clamp(min=1e-6)


def assert_is_the_loop(exact, tolerance=2e-5, **options):
    expected = with_gradients(exact, "reference", **options)
    assert_near(with_gradients(rounded(exact), "triton", **options), expected, tolerance)


@pytest.mark.parametrize(("T", "K", "V"), [(1, 4, 3), (31, 16, 20), (33, 20, 40), (70, 40, 16)])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_the_loop_with_all_gradients(kind, T, K, V):
    assert_is_the_loop(random_inputs(T, kind, B=1 + (T == 1), K=K, V=V))


@pytest.mark.parametrize("kind", KINDS)
def test_rotations_are_folded_before_the_kernels(kind):
    assert_is_the_loop(random_inputs(37, f"{kind} turned", B=1))


@pytest.mark.parametrize("size", [0.0, 1e-8, -1e-8, 1e-30])
@pytest.mark.parametrize("kind", KINDS)
def test_gates_that_are_tiny_over_a_chunk_lose_nothing_of_what_follows(kind, size):
    exact = random_inputs(80, kind, B=1)
    with torch.no_grad():
        exact[3][:, 20:70] = size
    assert_is_the_loop(exact)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_of_zero_cuts_what_came_before_exactly(kind):
    q, k, v, a, _, S = (None if x is None else x.detach().float() for x in random_inputs(40, kind, B=1))
    a[:, 20] = 0
    k2, v2 = (torch.cat([1e6 * x[:, :20], x[:, 20:]], dim=1) for x in (k, v))
    o, state = run((q, k, v, a, None, S), "triton")
    changed, changed_state = run((q, k2, v2, a, None, 1e6 * S), "triton")
    assert not torch.equal(o[:, :20], changed[:, :20])
    assert torch.equal(o[:, 20:], changed[:, 20:])
    assert torch.equal(state, changed_state)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_does_not_jump_where_a_gate_changes_its_sign(kind):
    def gradient(value):
        exact = random_inputs(40, kind, B=1)
        with torch.no_grad():
            exact[3][:, 20] = value
        o, _ = run([*rounded(exact)[:3], a := rounded(exact)[3], None, None], "triton")
        return torch.autograd.grad(o.square().sum(), a)[0]

    at_zero = gradient(0.0)
    assert at_zero[:, 20].abs().min() > 1e-6
    for value in (1e-9, -1e-9, 1e-14, -1e-14):
        torch.testing.assert_close(gradient(value), at_zero, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logarithms_with_and_without_signs_have_finite_gradients_at_zero(kind, signed):
    q, k, v, a, _, S = random_inputs(40, kind, B=1)
    a = a.detach() if signed else a.detach().abs()
    sign = a.sign() if signed else None
    results = []
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, "triton")):
        given = rounded([q, k, v, S, a.abs().log()], dtype)
        o, state = gated_linear_attention(
            *given[:3],
            given[4],
            sign=None if sign is None else sign.to(dtype),
            initial_state=given[3],
            output_final_state=True,
            backend=backend,
        )
        loss = o.sin().sum() + state.cos().sum()
        gradients = torch.autograd.grad(loss, given)
        # the loop multiplies -inf by a gate of 0 nowhere, but exp's derivative is 0 there
        results.append([o, state, *gradients])
    assert torch.isinf(a.abs().log()).any()
    assert_near(results[1], results[0])


@pytest.mark.parametrize("kind", [*KINDS, "channel turned"])
def test_packed_sequences_come_out_as_in_the_loop(kind):
    bounds = torch.tensor([0, 5, 5, 45, 46, 80, 80])
    assert_is_the_loop(random_inputs(80, kind, B=1, N=6), cu_seqlens=bounds, max_seqlen=40)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_continues_a_prefill(kind):
    inputs = [None if x is None else x.detach() for x in rounded(random_inputs(40, kind, B=2))]
    expected, last = run(inputs, "triton")
    o, S = run([None if x is None else x[:, :38] for x in inputs[:5]] + [inputs[5]], "triton")
    outputs = [o]
    for t in (38, 39):
        o, S = run([None if x is None else x[:, t : t + 1] for x in inputs[:5]] + [S], "triton")
        outputs.append(o)
    assert_near([torch.cat(outputs, dim=1), S], [expected, last], 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_near_the_border_float32_stays_within_a_ten_thousandth(kind):
    exact = random_inputs(300, kind, B=1, H=1, K=8)
    with torch.no_grad():
        a = exact[3]
        a.copy_((0.99 + 0.01 * a.abs()) * torch.where(a < 0, -1, 1))
    # what the float64 loop is given is what float32 holds
    exact = [None if x is None else x.detach().float().double().requires_grad_() for x in exact]
    assert_is_the_loop(exact, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_in_its_dtype_with_a_float32_state(dtype):
    inputs = rounded(random_inputs(33, B=1), dtype)
    o, S, *gradients = with_gradients(inputs, "triton")
    assert (o.dtype, S.dtype) == (dtype, torch.float32)
    assert {x.dtype for x in gradients} == {dtype}
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    assert_near([o, S, *gradients], with_gradients(exact, "reference"), 3e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_slices_of_a_bfloat16_plan_are_the_loop(kind, monkeypatch):
    """Chunks of 64, slices of 64 and 128 columns, as on a GPU; the arithmetic is float32."""

    def plan(K, V, steps, dtype) -> Plan:
        import dataclasses

        from statetrack.ops.gated_linear_attention.triton import plan as plan_module

        monkeypatch.setattr(plan_module, "INTERPRETED", False)
        return dataclasses.replace(make_plan.__wrapped__(K, V, steps, torch.bfloat16), bf16=False)

    monkeypatch.setattr(launches, "make_plan", plan)
    assert plan(80, 70, 100, None).C == 64
    assert_is_the_loop(random_inputs(101, kind, B=1, H=1, K=80, V=70))
