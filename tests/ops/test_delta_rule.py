"""The delta rule: every backend against the loop that defines it, and the loop against the mathematics."""

import importlib
import math

import numpy as np
import pytest
import torch
from delta_inputs import OPTIONS, assert_same, random_inputs, run
from hypothesis import given, settings
from hypothesis import strategies as st

from statetrack.errors import UserError
from statetrack.ops.checks import checked
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.delta_rule.layout import DenseLayout, PackedLayout, chunk_length

NAMES = ("q", "k", "v", "beta", "g", "initial_state")


@pytest.mark.parametrize("T", [1, 2, 31, 32, 33, 64, 100])
@pytest.mark.parametrize(("given_inputs", "options"), OPTIONS)
def test_chunked_matches_reference_in_float64(T, given_inputs, options):
    inputs = random_inputs(T=T, **given_inputs)
    assert_same(run(inputs, "chunked", **options), run(inputs, "reference", **options), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("width", [24, 60, 128])
def test_chunked_matches_reference_in_float32_at_odd_widths(width):
    inputs = random_inputs(B=1, T=77, H=1, K=width, V=width // 2 + 1, state=True)
    expected = run(inputs, "reference")
    assert_same(run(inputs, "chunked", torch.float32), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "bounds", [[0, 40], [0, 1, 2, 3], [0, 0, 5, 5, 38, 40], [0, 33, 33], [0, 70, 70, 71]]
)
@pytest.mark.parametrize(("given_inputs", "options"), OPTIONS)
def test_packed_sequences_match_reference(bounds, given_inputs, options):
    inputs = random_inputs(B=1, T=bounds[-1], sequences=len(bounds) - 1, **given_inputs)
    options = options | {"cu_seqlens": torch.tensor(bounds)}
    assert_same(run(inputs, "chunked", **options), run(inputs, "reference", **options), rtol=1e-9, atol=1e-9)


def test_packed_sequences_equal_separate_calls():
    inputs = random_inputs(B=1, T=50)
    packed, states = delta_rule(**inputs, cu_seqlens=torch.tensor([0, 13, 50]), output_final_state=True)
    for i, part in enumerate((slice(0, 13), slice(13, 50))):
        o, S = delta_rule(**{name: x[:, part] for name, x in inputs.items()}, output_final_state=True)
        torch.testing.assert_close(packed[:, part], o)
        torch.testing.assert_close(states[i : i + 1], S)


def test_reference_is_a_product_of_generalised_householders():
    """Eq. 1 by hand in numpy: explicit matrices, no shared code."""
    inputs = random_inputs(B=1, T=6, H=1, K=4, V=3, state=True)
    q, k, v, beta = (inputs[name][0, :, 0].numpy() for name in ("q", "k", "v", "beta"))
    S, rows = inputs["initial_state"][0, 0].numpy(), []
    for t in range(6):
        S = (np.eye(4) - beta[t] * np.outer(k[t], k[t])) @ S + beta[t] * np.outer(k[t], v[t])
        rows.append(S.T @ q[t] / math.sqrt(4))
    o, final = delta_rule(**inputs, output_final_state=True, backend="reference")
    np.testing.assert_allclose(o[0, :, 0].numpy(), np.stack(rows), atol=1e-12)
    np.testing.assert_allclose(final[0, 0].numpy(), S, atol=1e-12)


def test_long_sequences_are_worked_off_in_segments(monkeypatch):
    module = importlib.import_module("statetrack.ops.delta_rule.chunked")
    monkeypatch.setattr(module, "segment_length", lambda numbers: 20)
    inputs, options = random_inputs(T=70, n=2, gate=True, state=True), {"householders": 2}
    assert_same(run(inputs, "chunked", **options), run(inputs, "reference", **options), rtol=1e-9, atol=1e-9)


def test_agrees_with_the_pytorch_gated_delta_rule_of_transformers():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    x = {name: tensor.float() for name, tensor in random_inputs(T=45, K=8, V=8, gate=True).items()}
    expected, state = torch_chunk_gated_delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["beta"], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    o, S = delta_rule(**x, use_qk_l2norm_in_kernel=True, output_final_state=True)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(S, state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_gradcheck(backend):
    inputs = random_inputs(B=1, T=5, H=1, K=3, V=2, n=2, gate=True, state=True)
    leaves = [x.requires_grad_() for x in inputs.values()]

    def f(*tensors):
        named = dict(zip(NAMES, tensors, strict=True))
        return delta_rule(**named, householders=2, output_final_state=True, backend=backend)

    assert torch.autograd.gradcheck(f, leaves)


@given(
    shape=st.tuples(*(st.integers(1, high) for high in (3, 80, 3, 9, 9))),
    beta=st.sampled_from([0.0, 1.0, 2.0, (1.5, 2.0)]),
    n=st.integers(1, 3),
    gate=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_backends_agree_on_any_shape_and_range_of_beta(shape, beta, n, gate, seed):
    B, T, H, K, V = shape
    inputs = random_inputs(B, T, H, K, V, n, gate=gate, beta=beta, seed=seed)
    assert_same(
        run(inputs, "chunked", householders=n), run(inputs, "reference", householders=n), rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize("T", [512, 2048])
def test_float32_stays_exact_near_reflections_with_repeated_keys(T):
    """Five keys, beta = 1.99: the regime of group word problems, where rounding errors do not decay."""
    inputs = random_inputs(B=1, T=T, H=2, K=32, V=32, beta=1.99)
    five = inputs["k"][:, :5]
    inputs["k"] = five[:, torch.arange(T) % 5]
    expected, _ = delta_rule(**inputs, backend="reference")
    actual, _ = delta_rule(**{name: x.float() for name, x in inputs.items()})
    assert (actual - expected).norm() / expected.norm() < 1e-4


def test_two_halves_with_carried_state_equal_one_pass():
    inputs = random_inputs(T=75, gate=True)
    whole, last = delta_rule(**inputs, output_final_state=True)
    first, S = delta_rule(**{name: x[:, :41] for name, x in inputs.items()}, output_final_state=True)
    second, S = delta_rule(
        **{name: x[:, 41:] for name, x in inputs.items()}, initial_state=S, output_final_state=True
    )
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(S, last)


def test_single_steps_after_a_prefill_equal_the_full_pass():
    inputs = random_inputs(T=40, n=2, gate=True)
    tokens = {"q": 1, "k": 2, "v": 2, "beta": 2, "g": 1}

    def part(start, stop):
        return {name: x[:, start * tokens[name] : stop * tokens[name]] for name, x in inputs.items()}

    whole, _ = delta_rule(**inputs, householders=2)
    _, S = delta_rule(**part(0, 35), householders=2, output_final_state=True)
    for t in range(35, 40):
        o, S = delta_rule(**part(t, t + 1), householders=2, initial_state=S, output_final_state=True)
        torch.testing.assert_close(o, whole[:, t : t + 1])


@settings(max_examples=15)
@given(bits=st.lists(st.booleans(), min_size=1, max_size=300))
def test_one_hand_set_head_computes_parity_at_any_length(bits):
    """K = 1, k = 1, v = 0, beta = 2 * bit: the state flips sign on every one (Eq. 2 with phi(1) = 1)."""
    assert_head_computes_parity(torch.tensor(bits))


def test_one_hand_set_head_computes_parity_at_length_10000():
    assert_head_computes_parity(torch.rand(10_000, generator=torch.Generator().manual_seed(0)) < 0.5)


def assert_head_computes_parity(bits):
    beta = 2.0 * bits.float().view(1, -1, 1)
    ones, zeros = torch.ones(*beta.shape, 1), torch.zeros(*beta.shape, 1)
    out, _ = delta_rule(ones, ones, zeros, beta, initial_state=torch.ones(1, 1, 1, 1))
    assert torch.equal(out.flatten() < 0, bits.cumsum(0) % 2 == 1)


def test_states_of_the_positive_range_converge_on_a_repeated_letter():
    """Theorem 1: with beta <= 1 the state on 1^k settles, so 1^k and 1^(k+1) end up indistinguishable."""
    for beta in (0.01, 0.5, 0.999, 1.0):
        inputs = random_inputs(B=1, T=1, H=1, K=8, V=4, beta=beta, state=True)
        repeated = {
            name: x.expand(-1, 5000, *x.shape[2:]) for name, x in inputs.items() if name != "initial_state"
        }
        o, _ = delta_rule(**repeated, initial_state=inputs["initial_state"])
        torch.testing.assert_close(o[:, -1], o[:, -2], rtol=0, atol=1e-12)


def test_states_of_the_extended_range_alternate_on_a_repeated_letter():
    inputs = random_inputs(B=1, T=1, H=1, K=8, V=4, beta=2.0, state=True)
    repeated = {
        name: x.expand(-1, 5000, *x.shape[2:]) for name, x in inputs.items() if name != "initial_state"
    }
    o, _ = delta_rule(**repeated, initial_state=inputs["initial_state"])
    torch.testing.assert_close(o[:, -1], o[:, -3], rtol=0, atol=1e-9)
    assert (o[:, -1] - o[:, -2]).abs().max() > 0.1


def test_strong_decay_neither_overflows_nor_poisons_gradients():
    inputs = random_inputs(T=70, gate=True)
    inputs["g"] = torch.full_like(inputs["g"], -50.0)
    results = run(inputs, "chunked", torch.float32)
    assert all(torch.isfinite(x).all() for x in results.values())


@pytest.mark.parametrize("strong", [-500.0, -1e4, -torch.inf])
def test_strong_decays_do_not_cost_the_digits_of_weak_ones(strong):
    inputs = random_inputs(B=1, T=90, gate=True)
    inputs["g"][:, ::9] = strong
    expected = delta_rule(**inputs, backend="reference")[0]
    actual = delta_rule(**{name: x.float() for name, x in inputs.items()})[0]
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


def test_second_derivatives_are_refused_not_wrong():
    inputs = {name: x.requires_grad_() for name, x in random_inputs().items()}
    o, _ = delta_rule(**inputs)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(o.sum(), inputs["v"], create_graph=True)


def test_halves_come_back_as_halves_and_states_as_float32():
    inputs = {name: x.bfloat16() for name, x in random_inputs(T=9).items()}
    o, S = delta_rule(**inputs, output_final_state=True)
    assert (o.dtype, S.dtype) == (torch.bfloat16, torch.float32)
    assert delta_rule(**inputs)[1] is None


def test_an_empty_sequence_keeps_the_state():
    inputs = random_inputs(T=0, state=True)
    for backend in ("reference", "chunked"):
        o, S = delta_rule(**inputs, output_final_state=True, backend=backend)
        assert o.shape == (2, 0, 2, 3)
        torch.testing.assert_close(S, inputs["initial_state"])


def test_saved_memory_grows_linearly_with_length():
    def saved_elements(T):
        inputs = random_inputs(B=1, T=T, H=1, K=16, V=16, state=True)
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        o, _ = delta_rule(**leaves)
        node = o.grad_fn
        while not hasattr(node, "saved"):  # `.to(dtype)` may sit on top
            node = node.next_functions[0][0]
        return sum(x.numel() for x in (*node.saved, *node.saved_tensors) if x is not None)

    assert saved_elements(4096) <= 4.1 * saved_elements(1024)


@pytest.mark.parametrize("T", [1, 33, 64, 500, 2048, 65536])
@pytest.mark.parametrize("householders", [1, 2, 40])
def test_chunks_cover_the_sequence_with_little_padding(T, householders):
    chunk = chunk_length(T, 32, householders)
    steps = -(-T // chunk)
    assert 1 <= chunk <= 48
    assert steps * chunk - T < steps


def test_layouts_invert_themselves():
    x = torch.arange(2 * 14 * 3).view(2, 14, 3)
    dense = DenseLayout(2, 7, 3, 3)
    assert torch.equal(dense.from_chunks(dense.to_chunks(x, 2), 2), x)
    packed = PackedLayout(torch.tensor([0, 2, 2, 7]), 3)
    assert torch.equal(packed.from_chunks(packed.to_chunks(x[:1], 2), 2), x[:1])


ERRORS = [
    (
        {"beta": torch.rand(2, 2, 7)},
        {},
        r"beta has shape \(2, 2, 7\), expected \(batch, time, heads\) = \(2, 7, 2\)",
    ),
    ({"k": torch.rand(2, 7, 2, 4)}, {}, r"k has shape .* expected .* = \(2, 7, 2, 5\)"),
    ({"q": torch.rand(2, 7, 5)}, {}, "expected four axes"),
    ({"q": torch.ones(2, 7, 2, 5, dtype=torch.long)}, {}, "q is torch.int64, expected a floating-point"),
    ({}, {"householders": 0}, "householders is 0"),
    ({}, {"cu_seqlens": [0, 3, 7]}, "cu_seqlens is a list, expected a tensor"),
    ({}, {"householders": 2}, r"time \* 2 householders"),
    ({}, {"initial_state": torch.zeros(2, 2, 3, 5)}, r"initial_state has shape .* = \(2, 2, 5, 3\)"),
    ({}, {"cu_seqlens": torch.tensor([0, 7])}, "need batch 1, got 2"),
    ({}, {"max_seqlen": 7}, "only with cu_seqlens"),
    ({}, {"beta_from_logits": 0.0}, "beta_from_logits is 0.0, expected the largest beta"),
    ({}, {"hard_beta": True}, "hard_beta is set without beta_from_logits"),
    ({}, {"backend": "chunk"}, "Did you mean 'chunked'"),
    ({"q": torch.rand(2, 7, 2, 280), "k": torch.rand(2, 7, 2, 280)}, {"backend": "triton"}, "more than 256"),
]


@pytest.mark.parametrize(("replaced", "options", "message"), ERRORS)
def test_wrong_inputs_name_what_came_and_what_was_expected(replaced, options, message):
    inputs = {name: x.float() for name, x in random_inputs().items()} | replaced
    with pytest.raises(UserError, match=message):
        delta_rule(**inputs, **options)


@pytest.mark.parametrize("offsets", [[1, 7], [0, 6], [0, 5, 3, 7]])
def test_wrong_offsets_are_refused(offsets):
    with pytest.raises(UserError, match="offsets that rise from 0 to time = 7"):
        delta_rule(**random_inputs(B=1), cu_seqlens=torch.tensor(offsets))


def test_checked_mode_refuses_beta_out_of_range_and_long_keys():
    good = random_inputs()
    with checked():
        delta_rule(**good)
        with pytest.raises(UserError, match=r"beta\[0, 0, 0\] = 2.5 is outside \[0, 2\]"):
            delta_rule(**good | {"beta": torch.full_like(good["beta"], 2.5)})
        with pytest.raises(UserError, match="use_qk_l2norm_in_kernel"):
            delta_rule(**good | {"k": 3 * good["k"]})
        with pytest.raises(UserError, match="v holds NaN"):
            delta_rule(**good | {"v": good["v"] * torch.nan})
    delta_rule(**good | {"beta": torch.full_like(good["beta"], 2.5)})
