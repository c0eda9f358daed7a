"""Gated linear attention: the chunked form against the loop, and the loop against the papers' formulas."""

import itertools
import math

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops.checks import checked
from statetrack.ops.gated_linear_attention import chunked as chunked_module
from statetrack.ops.gated_linear_attention import gated_linear_attention

BACKENDS = ("reference", "chunked")
GATES = ("channel", "head", "channel turned", "head turned")


def gate_shape(kind, B, T, H, K):
    if "head" in kind:
        return B, T, H
    return B, T, H, K // 2 if "turned" in kind else K


def random_inputs(T, kind="channel", B=2, H=2, K=4, V=3, N=None, dtype=torch.float64):
    """q, k, v, signed gates with a zero among them, angles or None, and an initial state, with gradients."""
    g = torch.Generator().manual_seed(T)
    q, k = (torch.randn(B, T, H, K, generator=g, dtype=dtype) for _ in range(2))
    v = torch.randn(B, T, H, V, generator=g, dtype=dtype)
    a = 2 * torch.rand(gate_shape(kind, B, T, H, K), generator=g, dtype=dtype) - 1
    if T > 2:
        a[:, T // 2, 0] = 0
    angle = 6 * torch.rand(B, T, H, K // 2, generator=g, dtype=dtype) if "turned" in kind else None
    S = torch.randn(N or B, H, K, V, generator=g, dtype=dtype)
    return [None if x is None else x.requires_grad_() for x in (q, k, v, a, angle, S)]


def run(inputs, backend, **options):
    q, k, v, a, angle, S = inputs
    options = {"initial_state": S, "output_final_state": True, "backend": backend} | options
    return gated_linear_attention(q, k, v, a=a, angle=angle, **options)


def with_gradients(inputs, backend, **options):
    """Outputs, last states, and the gradients of everything that has one."""
    o, S = run(inputs, backend, **options)
    loss = (o * torch.arange(o.numel()).view(o.shape).cos()).sum() + S.sin().sum()
    return [o, S, *torch.autograd.grad(loss, [x for x in inputs if x is not None], allow_unused=True)]


def assert_same(actual, expected, tolerance=1e-10):
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("T", [1, 2, 3, 63, 64, 65, 150])
@pytest.mark.parametrize("kind", GATES)
def test_chunks_are_the_loop_with_all_gradients(kind, T):
    inputs = random_inputs(T, kind)
    assert_same(with_gradients(inputs, "chunked"), with_gradients(inputs, "reference"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", GATES)
def test_gradients_are_those_of_finite_differences_at_and_across_zero(kind, backend):
    inputs = random_inputs(5, kind, B=1, H=1, V=2)
    with torch.no_grad():
        inputs[3].flatten()[:8:2] = torch.tensor([0.0, 1e-7, -1e-7, 0.0], dtype=torch.float64)[
            : len(inputs[3].flatten()[:8:2])
        ]
    given = [x for x in inputs if x is not None]

    def op(q, k, v, a, *rest):
        angle, S = rest if len(rest) == 2 else (None, *rest)
        return run((q, k, v, a, angle, S), backend)

    assert torch.autograd.gradcheck(op, given)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_does_not_jump_where_a_gate_changes_its_sign(backend):
    def gradient(value):
        q, k, v, a, _, S = random_inputs(40)
        with torch.no_grad():
            a[:, 20] = value
        o, _ = run((q, k, v, a, None, S), backend)
        return torch.autograd.grad(o.square().sum(), a)[0]

    assert gradient(0.0)[:, 20].abs().min() > 1e-6
    torch.testing.assert_close(gradient(1e-9), gradient(0.0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient(-1e-9), gradient(0.0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.0, 1e-8, -1e-8, 1e-30])
@pytest.mark.parametrize("kind", ["channel", "head"])
def test_gates_that_are_tiny_over_a_chunk_lose_nothing_of_what_follows(kind, size, dtype):
    exact = random_inputs(200, kind)
    with torch.no_grad():
        exact[3][:, 64:128] = size
    inputs = [None if x is None else x.detach().to(dtype).requires_grad_() for x in exact]
    expected = [x.to(dtype) for x in with_gradients(exact, "reference")]
    assert_same(with_gradients(inputs, "chunked"), expected, 1e-10 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logarithm_and_sign_are_the_gate_with_finite_gradients_at_zero(backend):
    q, k, v, a, _, S = random_inputs(70)
    g, sign = a.detach().abs().log().requires_grad_(), a.detach().sign()
    assert torch.isinf(g).any()
    o, state = gated_linear_attention(
        q, k, v, g, sign=sign, initial_state=S, output_final_state=True, backend=backend
    )
    assert_same((o, state), run((q, k, v, a, None, S), backend))
    d_g = torch.autograd.grad(o.sin().sum(), g)[0]
    d_a = torch.autograd.grad(run((q, k, v, a, None, S), backend)[0].sin().sum(), a)[0]
    torch.testing.assert_close(d_g, a * d_a)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", GATES)
def test_pieces_with_carried_state_equal_one_pass_with_all_gradients(kind, backend):
    inputs = random_inputs(140, kind)
    expected = with_gradients(inputs, backend)
    outputs, S = [], inputs[5]
    for start, stop in ((0, 1), (1, 2), (2, 75), (75, 75), (75, 140)):
        o, S = run([x if x is None else x[:, start:stop] for x in inputs[:5]] + [S], backend)
        outputs.append(o)
    o = torch.cat(outputs, dim=1)
    loss = (o * torch.arange(o.numel()).view(o.shape).cos()).sum() + S.sin().sum()
    given = [x for x in inputs if x is not None]
    assert_same([o, S, *torch.autograd.grad(loss, given)], expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", GATES)
def test_packed_sequences_come_out_as_if_each_were_alone(kind, backend):
    bounds = [0, 5, 5, 70, 71, 200, 200]
    inputs = random_inputs(200, kind, B=1, N=6)
    packed = with_gradients(inputs, backend, cu_seqlens=torch.tensor(bounds), max_seqlen=129)
    alone = [
        run([x if x is None else x[:, i:j] for x in inputs[:5]] + [inputs[5][n : n + 1]], backend)
        for n, (i, j) in enumerate(itertools.pairwise(bounds))
    ]
    o, S = torch.cat([o for o, _ in alone], 1), torch.cat([S for _, S in alone])
    loss = (o * torch.arange(o.numel()).view(o.shape).cos()).sum() + S.sin().sum()
    assert_same(packed, [o, S, *torch.autograd.grad(loss, [x for x in inputs if x is not None])])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_in_gives_nothing_out_and_keeps_the_state(backend):
    inputs = random_inputs(0, "channel turned")
    o, S = run(inputs, backend)
    assert o.shape == (2, 0, 2, 3)
    assert torch.equal(S, inputs[5])
    assert run(inputs, backend, initial_state=None)[1].abs().max() == 0
    assert run(inputs, backend, output_final_state=False)[1] is None


def test_chunks_computed_again_in_the_backward_give_the_same_gradients(monkeypatch):
    inputs = random_inputs(300)
    expected = with_gradients(inputs, "chunked")
    monkeypatch.setattr(chunked_module, "GROUP", 2000)
    monkeypatch.setattr(chunked_module, "KEEP", 0)
    assert_same(with_gradients(inputs, "chunked"), expected)


# Formulas that were written by others, from their equations


def test_unsigned_gates_per_channel_give_gla():
    """h_t = diag(exp gk_t) h_{t-1} + k_t v_t^T, read with q_t / sqrt(K) (Yang et al. 2024), as one sum."""
    q, k, v, _, _, _ = random_inputs(90)
    gk = torch.nn.functional.logsigmoid(torch.randn(q.shape, dtype=torch.float64))
    G = gk.cumsum(1)
    o, _ = gated_linear_attention(q, k, v, gk)
    for t in (0, 1, 63, 64, 89):
        decay = (G[:, t, None] - G[:, : t + 1]).exp()  # (B, t + 1, H, K)
        weights = (q[:, t, None] * decay * k[:, : t + 1]).sum(-1) / 2
        torch.testing.assert_close(o[:, t], torch.einsum("bsh,bshv->bhv", weights, v[:, : t + 1]))


def test_unsigned_gates_per_head_give_the_parallel_form_of_simple_gla():
    """O = (Q K^T / sqrt(K) o exp(G_t - G_s) masked) V (Dao and Gu 2024)."""
    q, k, v, _, _, _ = random_inputs(90)
    g = torch.nn.functional.logsigmoid(torch.randn(q.shape[:3], dtype=torch.float64))
    o, _ = gated_linear_attention(q, k, v, g)
    q, k, v, G = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), g.transpose(1, 2).cumsum(-1)
    D = (G[..., :, None] - G[..., None, :]).tril().exp().tril()
    torch.testing.assert_close(o, ((q @ k.mT / 2 * D) @ v).transpose(1, 2))


def test_cumulated_signs_fold_into_queries_and_keys():
    q, k, v, a, _, _ = random_inputs(100)
    a = a.detach().where(a != 0, 0.5)
    c = a.sign().cumprod(1)
    signed, _ = gated_linear_attention(q, k, v, a=a)
    folded, _ = gated_linear_attention(q * c, k * c, v, a=a.abs())
    torch.testing.assert_close(signed, folded)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pair_of_channels_counts_modulo_sixty_for_thousands_of_steps(backend):
    """A rotation by 6 degrees a step, gate 1: the state is back after every 60 steps."""
    T = 60 * 40 if backend == "chunked" else 60 * 3
    S = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    zero, q = torch.zeros(1, T, 1, 2), torch.tensor([1.0, 0.0]).expand(1, T, 1, 2)
    angle = torch.full((1, T, 1, 1), 2 * math.pi / 60)
    o, _ = gated_linear_attention(
        q,
        zero,
        zero[..., :1],
        a=torch.ones(1, T, 1),
        angle=angle,
        scale=1.0,
        initial_state=S,
        backend=backend,
    )
    expected = torch.cos(2 * math.pi * (torch.arange(1, T + 1) % 60).double() / 60).float()
    # the angle itself is rounded to float32
    torch.testing.assert_close(o.flatten(), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", GATES)
def test_near_the_border_float32_stays_within_a_ten_thousandth_over_2048_steps(kind):
    q, k, v, a, angle, S = (
        None if x is None else x.detach() for x in random_inputs(2048, kind, B=1, K=8, dtype=torch.float32)
    )
    a = (0.99 + 0.01 * a.abs()) * torch.where(a < 0, -1, 1)
    inputs = q, k, v, a, angle, S
    expected, S = run([None if x is None else x.double() for x in inputs], "reference")
    actual, S32 = run(inputs, "chunked")
    assert (actual - expected).norm() <= 1e-4 * expected.norm()
    assert (S32 - S).norm() <= 1e-4 * S.norm()


def test_half_precision_comes_back_in_its_dtype_with_a_float32_state():
    inputs = [None if x is None else x.detach().bfloat16() for x in random_inputs(9)]
    o, S = run(inputs, "auto")
    assert (o.dtype, S.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": None}, "expected either g, the logarithm of the gate, or a"),
        ({"sign": torch.ones(2, 6, 2, 4)}, "sign goes with g only"),
        ({"a": torch.ones(2, 2, 6)}, r"a has shape \(2, 2, 6\), expected \(batch, time, heads\)"),
        ({"a": torch.ones(2, 6, 2, 3)}, r"a has shape .* expected \(batch, time, heads, K\)"),
        ({"angle": torch.ones(2, 6, 2, 2)}, r"a has shape .* expected \(batch, time, heads, K / 2\)"),
        ({"angle": torch.ones(2, 6, 2, 4)}, r"angle has shape .* expected \(batch, time, heads, K / 2\)"),
        ({"k": torch.ones(2, 6, 2, 5)}, "k has shape"),
        ({"q": torch.ones(2, 6, 4)}, "expected four axes"),
        ({"v": torch.ones(2, 6, 2, 3, dtype=torch.long)}, "v is torch.int64"),
        ({"v": [1.0]}, "v is a list, expected a tensor"),
        ({"initial_state": torch.ones(1, 2, 4, 3)}, "initial_state has shape"),
        ({"scale": float("nan")}, "scale is nan, expected a finite number"),
        ({"scale": "0.5"}, "scale is '0.5', expected a finite number"),
        ({"backend": "naive"}, "backend 'naive' is not known"),
        ({"cu_seqlens": torch.tensor([0, 6])}, "need batch 1"),
    ],
)
def test_wrong_inputs_are_refused_by_name(changes, message):
    q = torch.ones(2, 6, 2, 4)
    given = {"q": q, "k": q, "v": torch.ones(2, 6, 2, 3), "a": q} | changes
    with pytest.raises(UserError, match=message):
        gated_linear_attention(**given)


def test_checked_mode_refuses_gates_beyond_one():
    q = torch.ones(1, 2, 1, 2)
    with checked(), pytest.raises(UserError, match=r"a\[0, 0, 0\] = 1.5 is outside \[-1, 1\]"):
        gated_linear_attention(q, q, q, a=torch.full((1, 2, 1), 1.5))
    with checked(), pytest.raises(UserError, match="g is the logarithm"):
        gated_linear_attention(q, q, q, torch.full((1, 2, 1), 0.5))
