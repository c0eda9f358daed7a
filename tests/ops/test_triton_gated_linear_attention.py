"""The Triton kernels of gated linear attention, interpreted, against the loop in float64."""

import dataclasses

import pytest
import torch
from test_gated_linear_attention import random_inputs, run, with_gradients
from torch._subclasses.fake_tensor import FakeTensorMode

from statetrack.layers.model import Model
from statetrack.layers.presets import model_config
from statetrack.ops.gated_linear_attention import gated_linear_attention
from statetrack.ops.gated_linear_attention.triton import launches
from statetrack.ops.gated_linear_attention.triton import plan as plan_module
from statetrack.ops.gated_linear_attention.triton.plan import Plan, make_plan

KINDS = ("channel", "head")


def few(T, kind="channel", **options):
    """Inputs of one sequence and head: the interpreter takes its time for every program."""
    return random_inputs(T, kind, **({"B": 1, "H": 1} | options))


def rounded(inputs, dtype=torch.float32):
    return [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]


def detached(inputs, dtype=torch.float32):
    return [None if x is None else x.detach().to(dtype) for x in inputs]


def assert_near(actual, expected, tolerance=2e-5):
    """Relative to the largest number of each tensor."""
    for x, y in zip(actual, expected, strict=True):
        assert torch.isfinite(x).all()
        assert (x.double() - y).abs().max() <= tolerance * y.abs().max().clamp(min=1e-6)


def assert_is_the_loop(exact, tolerance=2e-5, **options):
    expected = with_gradients(exact, "reference", **options)
    assert_near(with_gradients(rounded(exact), "triton", **options), expected, tolerance)


@pytest.mark.parametrize("shape", [(1, 1, 1, 4, 3), (5, 1, 2, 16, 20), (18, 1, 1, 40, 20)])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_the_loop_with_all_gradients(kind, shape):
    T, B, H, K, V = shape
    assert_is_the_loop(random_inputs(T, kind, B=B, H=H, K=K, V=V))


# what gates are replaced by, one kind per channel or head
SIZES = {
    "tiny": lambda a: 1e-8 * a.sign(),
    "nothing": lambda a: torch.where(a < 0, 0.0, 1e-30),
    "beyond one": lambda a: torch.where(a < 0, -1.02, 1.05) + 0.01 * a,
    "near the border": lambda a: (0.99 + 0.01 * a.abs()) * torch.where(a < 0, -1, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gates_of_any_size_over_a_chunk_and_more_lose_nothing_of_what_follows(kind):
    exact = few(40, kind, H=4 if kind == "head" else 1)
    with torch.no_grad():
        a = exact[3]
        for i, replaced in enumerate(SIZES.values()):
            a[:, 2:36, ..., i] = replaced(a[:, 2:36, ..., i])
    # what the float64 loop is given is what float32 holds
    assert_is_the_loop(rounded(rounded(exact), torch.float64))


def test_channels_with_and_without_small_gates_have_their_gradients_from_two_launches():
    """Of two chunks and two slices of channels, a gate below a quarter is in one of each."""
    exact = few(40, K=40)
    with torch.no_grad():
        a = exact[3]
        a.copy_(torch.where(a < 0, -1, 1) * (0.3 + 0.7 * a.abs()))
    assert_is_the_loop(exact)
    with torch.no_grad():
        a[:, 35, :, 2] = -0.01
        a[:, 3, :, 39] = 0
    assert_is_the_loop(exact)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_of_zero_cuts_what_came_before_exactly(kind):
    q, k, v, a, _, S = detached(few(20, kind))
    a[:, 10] = 0
    k2, v2 = (torch.cat([1e6 * x[:, :10], x[:, 10:]], dim=1) for x in (k, v))
    o, state = run((q, k, v, a, None, S), "triton")
    changed, changed_state = run((q, k2, v2, a, None, 1e6 * S), "triton")
    assert not torch.equal(o[:, :10], changed[:, :10])
    assert torch.equal(o[:, 10:], changed[:, 10:])
    assert torch.equal(state, changed_state)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logarithms_with_and_without_signs_have_finite_gradients_at_zero(kind, signed):
    *qkv, a, _, S = few(12, kind)
    a = a.detach() if signed else a.detach().abs()
    a[:, 2] *= 1.1 / a[:, 2].abs()  # one beyond 1, too
    assert torch.isinf(a.abs().log()).any()
    assert_logarithms_are_the_loop(qkv, a.abs().log(), a.sign() if signed else None, S)


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logarithms_of_zero_keep_the_state_and_its_sign(kind, signed, zero):
    """Gates of exactly 1, as hard gates and padding have them, alone and around one below 1."""
    *qkv, a, _, S = few(40, kind)
    g = torch.full_like(a, zero)
    g[:, 20] = -0.5
    assert_logarithms_are_the_loop(qkv, g, a.detach().sign() + (a == 0) if signed else None, S)


def assert_logarithms_are_the_loop(qkv, g, sign, S):
    results = []
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, "triton")):
        *given, S0, logarithms = rounded([*qkv, S, g], dtype)
        o, state = gated_linear_attention(
            *given,
            logarithms,
            sign=None if sign is None else sign.to(dtype),
            initial_state=S0,
            output_final_state=True,
            backend=backend,
        )
        gradients = torch.autograd.grad(o.sin().sum() + state.cos().sum(), [*given, S0, logarithms])
        results.append([o, state, *gradients])
    assert_near(results[1], results[0])


def test_packed_sequences_come_out_as_in_the_loop():
    bounds = torch.tensor([0, 3, 3, 36])
    assert_is_the_loop(few(36, "channel turned", N=3), cu_seqlens=bounds, max_seqlen=33)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_continues_a_prefill(kind):
    inputs = detached(few(20, kind))
    expected = run(detached(inputs, torch.float64), "reference")
    o, S = run([None if x is None else x[:, :18] for x in inputs[:5]] + [inputs[5]], "triton")
    outputs = [o]
    for t in (18, 19):
        o, S = run([None if x is None else x[:, t : t + 1] for x in inputs[:5]] + [S], "triton")
        outputs.append(o)
    assert_near([torch.cat(outputs, dim=1), S], expected)


@pytest.mark.parametrize("kind", ["channel", "head turned"])
def test_a_decoded_step_is_one_launch_and_is_the_loop(kind, monkeypatch):
    q, k, v, a, angle, S = detached(random_inputs(1, kind, K=20, V=40), torch.float64)
    launched = []
    start = launches.Launcher.__call__
    monkeypatch.setattr(
        launches.Launcher, "__call__", lambda self, *x: launched.append(self) or start(self, *x)
    )
    for gate in ({"a": a}, {"g": a.abs().log(), "sign": a.sign()}, {"g": a.abs().log()}):
        for state in (S, None):
            options = {"output_final_state": True, "initial_state": state, "angle": angle, **gate}
            expected = gated_linear_attention(q, k, v, **options, backend="reference")
            single = {name: x.float() if torch.is_tensor(x) else x for name, x in options.items()}
            actual = gated_linear_attention(q.float(), k.float(), v.float(), **single, backend="triton")
            assert_near(actual, expected, 1e-6)
    assert len(launched) == 6


@pytest.mark.parametrize(("kind", "dtype"), [("channel", torch.float16), ("head", torch.bfloat16)])
def test_half_precision_comes_back_in_its_dtype_with_a_float32_state(kind, dtype):
    inputs = rounded(few(12, kind), dtype)
    o, S, *gradients = with_gradients(inputs, "triton")
    assert (o.dtype, S.dtype) == (dtype, torch.float32)
    assert {x.dtype for x in gradients} == {dtype}
    assert_near([o, S, *gradients], with_gradients(rounded(inputs, torch.float64), "reference"), 3e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_slices_of_a_bfloat16_plan_are_the_loop(kind, monkeypatch):
    """Chunks of 64, slices of 64 and 128 columns, as on a GPU; the arithmetic is float32."""

    def plan(K, V, steps, dtype) -> Plan:
        monkeypatch.setattr(plan_module, "INTERPRETED", False)
        return dataclasses.replace(make_plan.__wrapped__(K, V, steps, torch.bfloat16), bf16=False)

    monkeypatch.setattr(launches, "make_plan", plan)
    assert plan(70, 40, 40, None).C == 64
    assert_is_the_loop(few(40, kind, K=70, V=40))


def test_the_ops_describe_their_results():
    """Fake and real implementations agree in shape, dtype and strides, so torch.compile can trust them."""
    q, k, v, a, _, S = detached(few(3))
    ops = torch.ops.statetrack

    def both(given):
        o, state, *saved = ops.gated_linear_attention_forward(*given, False, 0.5, True)
        gradients = ops.gated_linear_attention_backward(*given, saved, o, state, False, 0.5)
        return [(x.shape, x.dtype, x.stride()) for x in (o, state, *saved, *gradients)]

    real = both([q, k, v, a, None, S, None])
    with FakeTensorMode() as mode:
        q, k, v, a, S = (mode.from_tensor(x) for x in (q, k, v, a, S))
        assert both([q, k, v, a, None, S, None]) == real
    assert len(real) == 14


# dynamo itself makes an instance of every autograd function it traces
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_torch_compile_takes_the_ops_into_one_graph_with_packed_sequences_and_rotations():
    exact, bounds = few(20, "head turned", N=2), torch.tensor([0, 3, 20])

    def op(q, k, v, a, angle, S):
        return run([q, k, v, a, angle, S], "triton", cu_seqlens=bounds)

    inputs = rounded(exact)
    o, S = torch.compile(op, fullgraph=True, backend="aot_eager")(*inputs)
    loss = (o * torch.arange(o.numel()).view(o.shape).cos()).sum() + S.sin().sum()
    expected = with_gradients(exact, "reference", cu_seqlens=bounds)
    assert_near([o, S, *torch.autograd.grad(loss, inputs)], expected)


@pytest.mark.parametrize("name", ["gla", "mamba2", "hgrn2"])
def test_mixers_run_on_the_kernels_as_on_the_loop(name, monkeypatch):
    torch.manual_seed(0)
    model = Model(model_config(name, d_model=16, layers=1, heads=1, eigenvalues="[-1,1]"), 4, 5)
    tokens, results = torch.randint(4, (1, 5)), []
    for backend in ("triton", "reference"):
        monkeypatch.setenv("STATETRACK_BACKEND", backend)
        logits, _ = model(tokens)
        results.append([logits, *torch.autograd.grad(logits.sin().sum(), list(model.parameters()))])
    assert_near(results[0], [x.double() for x in results[1]], 1e-4)
