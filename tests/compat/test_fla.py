"""statetrack.compat.fla against the signatures and the equations that flash-linear-attention documents."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from published_signatures import FLA, parameters, published

from statetrack.compat import fla
from statetrack.errors import UserError


def naive(q, k, v, beta, g=None, scale=None, state=None, n=1):
    """The documented recurrence, one sequence, head and step at a time, in float64; value head i reads key
    head i H // G. Returns o and the last states."""
    q, k, v, beta = (x.double() for x in (q, k, v, beta))
    (B, T, H, K), (G, V) = q.shape, v.shape[2:]
    scale = 1 / math.sqrt(K) if scale is None else scale
    o = torch.zeros(B, T, G, V, dtype=torch.float64)
    S = torch.zeros(B, G, K, V, dtype=torch.float64) if state is None else state.double().clone()
    for b in range(B):
        for i in range(G):
            h = i * H // G
            for t in range(T):
                if g is not None:
                    S[b, i] = S[b, i] * math.exp(g[b, t, i])
                for s in range(t * n, t * n + n):
                    read = k[b, s, h] @ S[b, i]
                    S[b, i] = S[b, i] + torch.outer(k[b, s, h], beta[b, s, i] * (v[b, s, i] - read))
                o[b, t, i] = scale * (q[b, t, h] @ S[b, i])
    return o, S


def unit(x):
    return x / torch.sqrt((x.double() ** 2).sum(-1, keepdim=True) + 1e-6)


def inputs(B=2, T=9, H=2, G=2, K=4, V=3, n=1, seed=0):
    torch.manual_seed(seed)
    q, k = torch.randn(B, T, H, K), F.normalize(torch.randn(B, T * n, H, K), dim=-1)
    v, beta = torch.randn(B, T * n, G, V), 2 * torch.rand(B, T * n, G)
    return q, k, v, beta, -torch.rand(B, T, G), torch.randn(B, G, K, V)


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FLA)
def test_signatures_are_those_of_fla(name):
    assert parameters(getattr(fla, name)) == published(FLA[name])


def test_the_short_names_are_the_same_functions():
    assert fla.chunk_gdn is fla.chunk_gated_delta_rule
    assert fla.fused_recurrent_gdn is fla.fused_recurrent_gated_delta_rule


@pytest.mark.parametrize("rule", [fla.chunk_delta_rule, fla.fused_recurrent_delta_rule])
def test_delta_rule_with_the_default_scale_and_with_another(rule):
    q, k, v, beta, _, state = inputs()
    o, none = rule(q, k, v, beta)
    close(o, naive(q, k, v, beta)[0])
    assert none is None
    o, last = rule(q, k, v, beta, 0.3, state, True)
    expected = naive(q, k, v, beta, None, 0.3, state)
    close(o, expected[0])
    close(last, expected[1])
    assert last.dtype == torch.float32


def test_fused_recurrent_beta_is_one_by_default():
    q, k, v, _, _, _ = inputs(G=4)
    expected, _ = naive(q, k, v, torch.ones(v.shape[:3]))
    close(fla.fused_recurrent_gated_delta_rule(q, k, v)[0], expected)
    expected, _ = naive(q, k, v[:, :, :2], torch.ones(2, 9, 2))
    close(fla.fused_recurrent_delta_rule(q, k, v[:, :, :2])[0], expected)


@pytest.mark.parametrize(("H", "G"), [(2, 2), (2, 6), (1, 3)])
@pytest.mark.parametrize("T", [9, 70])
def test_gated_rule_repeats_key_heads_for_grouped_values(H, G, T):
    q, k, v, beta, g, state = inputs(T=T, H=H, G=G)
    expected = naive(q, k, v, beta, g, state=state)
    for o, last in (
        fla.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True),
        fla.fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=state, output_final_state=True
        ),
    ):
        close(o, expected[0])
        close(last, expected[1])


@pytest.mark.parametrize("H", [1, 2])
def test_gradients_of_grouped_heads_are_summed(H):
    q, k, v, beta, g, _ = (x.double() for x in inputs(T=3, H=H, G=2 * H))
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta)]
    weights = torch.randn(2, 3, 2 * H, 3, dtype=torch.float64)
    actual = torch.autograd.grad((fla.chunk_gated_delta_rule(*leaves)[0] * weights).sum(), leaves)
    repeated = [x.repeat_interleave(2, 2) for x in (q, k)]
    S, total = torch.zeros(2, 2 * H, 4, 3, dtype=torch.float64), 0.0
    for t in range(3):
        S = S * g[:, t].exp()[..., None, None]
        read = torch.einsum("bhk,bhkv->bhv", repeated[1][:, t], S)
        S = S + torch.einsum("bhk,bhv->bhkv", repeated[1][:, t], beta[:, t, :, None] * (v[:, t] - read))
        total = total + (torch.einsum("bhk,bhkv->bhv", repeated[0][:, t], S) / 2 * weights[:, t]).sum()
    for a, e in zip(actual, torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(a, e)


def test_packed_sequences_are_sequences_of_their_own():
    q, k, v, beta, g, _ = inputs(B=1, T=12, G=4)
    offsets, states = torch.tensor([0, 5, 12]), torch.randn(2, 4, 4, 3)
    options = {"initial_state": states, "output_final_state": True, "cu_seqlens": offsets}
    grouped = fla.chunk_gated_delta_rule(q, k, v, g, beta, **options, cu_seqlens_cpu=offsets)
    stepwise = fla.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **options)
    plain_v, plain_beta = v[:, :, :2], beta[:, :, :2]
    plain = fla.chunk_delta_rule(q, k, plain_v, plain_beta, cu_seqlens=offsets, output_final_state=True)
    for i, (a, b) in enumerate(((0, 5), (5, 12))):
        piece = slice(a, b)
        expected = naive(
            q[:, piece], k[:, piece], v[:, piece], beta[:, piece], g[:, piece], state=states[i : i + 1]
        )
        for o, last in (grouped, stepwise):
            close(o[:, piece], expected[0])
            close(last[i : i + 1], expected[1])
        expected = naive(q[:, piece], k[:, piece], plain_v[:, piece], plain_beta[:, piece])
        close(plain[0][:, piece], expected[0])
        close(plain[1][i : i + 1], expected[1])


def test_qk_are_normalised_when_asked():
    q, k, v, beta, g, _ = inputs()
    k = 3 * k
    expected, _ = naive(unit(q), unit(k), v, beta)
    close(fla.chunk_delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True)[0], expected)
    expected, _ = naive(unit(q), unit(k), v, beta, g)
    close(fla.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0], expected)


@pytest.mark.parametrize("negative", [False, True])
def test_beta_and_gate_can_be_computed_inside(negative):
    q, k, v, _, x, _ = inputs(G=4)
    logits, A_log, bias = torch.randn(2, 9, 4), torch.randn(4), torch.randn(4)
    beta = (2 if negative else 1) * torch.sigmoid(logits.double())
    g = -A_log.double().exp() * torch.log1p((x + bias).double().exp())
    inside = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": bias}
    inside |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": negative}
    expected, _ = naive(q, k, v, beta, g)
    close(fla.chunk_gated_delta_rule(q, k, v, x, logits, **inside)[0], expected)
    close(fla.fused_recurrent_gated_delta_rule(q, k, v, x, beta=logits, **inside)[0], expected)


def test_states_with_values_first_are_transposed():
    q, k, v, beta, g, state = inputs(G=4)
    expected = naive(q, k, v, beta, g, state=state)
    turned = state.transpose(-1, -2).contiguous()
    options = {"initial_state": turned, "output_final_state": True}
    for name, warned in (("state_v_first", False), ("transpose_state_layout", True)):
        context = (
            pytest.warns(DeprecationWarning, match="state_v_first") if warned else contextlib.nullcontext()
        )
        with context:
            o, last = fla.chunk_gated_delta_rule(q, k, v, g, beta, **options, **{name: True})
        close(o, expected[0])
        close(last.transpose(-1, -2), expected[1])


def test_delta_product_makes_several_steps_per_token():
    q, k, v, beta, g, state = inputs(n=3)
    expected = naive(q, k, v, beta, g, state=state, n=3)
    o, last = fla.chunk_gated_delta_product(q, k, v, g, beta, 3, None, state, True)
    close(o, expected[0])
    close(last, expected[1])
    close(fla.chunk_gated_delta_product(q, k, v, None, beta, 3)[0], naive(q, k, v, beta, n=3)[0])


def test_half_precision_goes_in_and_comes_out():
    q, k, v, beta, g, _ = (x.bfloat16() for x in inputs(G=4))
    o, last = fla.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    assert (o.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    expected, S = naive(q, k, v, beta, g)
    close(last, S)
    torch.testing.assert_close(o.double(), expected, rtol=1e-2, atol=1e-2)


def test_options_without_a_counterpart_name_the_way_round():
    q, k, v, beta, g, _ = inputs()
    chunk, stepwise = fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule
    for match, call in (
        ("initial_state of the next", lambda: chunk(q, k, v, g, beta, cp_context=object())),
        ("2 \\* sigmoid", lambda: chunk(q, k, v, g, beta, allow_neg_eigval=True)),
        ("needs A_log", lambda: chunk(q, k, v, g, beta, use_gate_in_kernel=True)),
        ("transpose axes 1 and 2", lambda: chunk(q, k, v, g, beta, head_first=True)),
        ("expected \\(batch, time, heads\\)", lambda: stepwise(q, k, v, beta=torch.zeros_like(v))),
        ("16, 32 or 64", lambda: fla.chunk_delta_rule(q, k, v, beta, chunk_size=48)),
        ("'chunk_sise' is not known", lambda: fla.chunk_delta_rule(q, k, v, beta, chunk_sise=16)),
        ("multiple of the heads of k", lambda: chunk(q, k, v[:, :, [0, 0, 1]], g, beta)),
        ("not both", lambda: chunk(q, k, v, g, beta, state_v_first=True, transpose_state_layout=True)),
        ("scale is -1", lambda: fla.fused_recurrent_delta_rule(q, k, v, beta, -1)),
    ):
        with pytest.raises(UserError, match=match):
            call()


def test_head_first_false_is_the_only_layout_there_is():
    q, k, v, beta, _, _ = inputs()
    with pytest.warns(DeprecationWarning, match="leave it out"):
        o, _ = fla.chunk_delta_rule(q, k, v, beta, head_first=False, chunk_size=16)
    close(o, naive(q, k, v, beta)[0])
