"""Fixed decays, elementwise recurrences and delta rules with two vectors of statetrack.compat.fla.

Each against fla's equation, written out step by step in float64.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from statetrack.compat import fla
from statetrack.errors import UserError


def inputs(T=9, B=2, H=3, K=4, V=5):
    """q, k, v, and two vectors and log decays per key channel; a state."""
    torch.manual_seed(0)
    q, k, a, b = (torch.randn(B, T, H, K) for _ in range(4))
    return q, k, torch.randn(B, T, H, V), 0.4 * a, 0.4 * b, -torch.rand(B, T, H, K), torch.randn(B, H, K, V)


def naive(q, k, v, gk=None, a=None, b=None, scale=None, state=None):
    """S = diag(exp(gk)) S + b (a^T S) + k v^T, o = scale S^T q; gk (B, T, H, K or 1)."""
    q, k, v = (x.double() for x in (q, k, v))
    S = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]) if state is None else state.double()
    o = []
    for t in range(q.shape[1]):
        read = 0 if a is None else (a[:, t, :, :, None].double() * S).sum(-2, keepdim=True)
        S = S if gk is None else S * gk[:, t, :, :, None].double().exp()
        S = S if a is None else S + b[:, t, :, :, None].double() * read
        S = S + k[:, t, :, :, None] * v[:, t, :, None]
        o.append((q[:, t, :, :, None] * S).sum(-2) * (q.shape[-1] ** -0.5 if scale is None else scale))
    return torch.stack(o, 1), S


def close(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)


def in_pieces(call, arguments, state, bounds=(0, 2, 9)):
    """`call(arguments, state)` on the sequences that are packed in one row, one after the other."""
    outputs, states = [], []
    for i in range(len(bounds) - 1):
        piece = [x[:1, bounds[i] : bounds[i + 1]] for x in arguments]
        o, S = call(piece, state[i : i + 1])
        outputs.append(o)
        states.append(S)
    return torch.cat(outputs, 1), torch.cat(states)


BOUNDS = torch.tensor([0, 2, 9])


@pytest.mark.parametrize(
    "rule", [fla.chunk_linear_attn, fla.fused_chunk_linear_attn, fla.fused_recurrent_linear_attn]
)
def test_linear_attention_is_a_sum_and_may_be_normalised(rule):
    q, k, v, *_, state = inputs()
    close(rule(q, k, v, None, state, True, normalize=False), naive(q, k, v, state=state))
    assert rule(q, k, v, normalize=False)[1] is None
    q, k = q.exp(), k.exp()  # a denominator that is not near 0
    z = torch.rand(2, 1, 3, 4)
    o, (S, last_z) = rule(q, k, v, 0.3, (state, z), True, normalize=True)
    numerator, expected = naive(q, k, v, scale=0.3, state=state)
    running = k.double().cumsum(1) + z
    denominator = 0.3 * (q * running).sum(-1, keepdim=True) + 1e-10
    close((o, S, last_z), (numerator / denominator, expected, running[:, -1:]))
    o, (none, last_z) = rule(q, k, v, normalize=True)
    running = k.double().cumsum(1)
    close((o,), (naive(q, k, v)[0] / (0.5 * (q * running).sum(-1, keepdim=True)),))
    assert none is None
    close((last_z,), (running[:, -1:],))


def test_normalised_linear_attention_goes_on_from_its_pair_of_states_and_backwards():
    q, k, v, *_ = inputs()
    q, k = q.exp(), k.exp()
    whole, _ = fla.chunk_linear_attn(q, k, v)
    first, pair = fla.chunk_linear_attn(q[:, :4], k[:, :4], v[:, :4], output_final_state=True)
    second, _ = fla.chunk_linear_attn(q[:, 4:], k[:, 4:], v[:, 4:], initial_state=pair)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    back, _ = fla.fused_recurrent_linear_attn(q, k, v, reverse=True, normalize=True)
    torch.testing.assert_close(back, fla.chunk_linear_attn(q.flip(1), k.flip(1), v.flip(1))[0].flip(1))


def test_packed_normalised_linear_attention_is_that_of_each_sequence():
    q, k, v, *_ = (x[:1] for x in inputs())
    q, k = q.exp(), k.exp()
    o, (S, z) = fla.chunk_linear_attn(q, k, v, output_final_state=True, cu_seqlens=BOUNDS)
    for i, (a, b) in enumerate(((0, 2), (2, 9))):
        alone = fla.chunk_linear_attn(q[:, a:b], k[:, a:b], v[:, a:b], output_final_state=True)
        torch.testing.assert_close((o[:, a:b], (S[i : i + 1], z[i : i + 1])), alone)


RETNET = torch.tensor([math.log(1 - 2.0 ** (-5 - h)) for h in range(3)], dtype=torch.float64)
LIGHTNING = -torch.tensor([8 / 3 * (1 - 2 / 5) * h for h in range(3)], dtype=torch.float64)
FIXED = {
    "retention": (
        RETNET,
        (fla.chunk_retention, fla.fused_chunk_retention, fla.fused_recurrent_retention),
        (),
    ),
    "lightning": (LIGHTNING, (fla.chunk_lightning_attn, fla.fused_recurrent_lightning_attn), (2, 5)),
}


@pytest.mark.parametrize("name", FIXED)
def test_fixed_decays_are_those_of_the_paper(name):
    gamma, rules, more = FIXED[name]
    q, k, v, *_, state = inputs(T=70)
    decay = gamma[:, None].expand(2, 70, 3, 1)
    expected = naive(q, k, v, decay, scale=0.3, state=state)
    for rule in rules:
        close(rule(q, k, v, *more, 0.3, state, True), expected)
        assert rule(q, k, v, *more)[1] is None
        row = (q, k, v)
        packed = rule(
            *(x[:1, :9] for x in row), *more, initial_state=state, output_final_state=True, cu_seqlens=BOUNDS
        )
        alone = in_pieces(
            lambda x, S: naive(*x, gamma[:, None].expand(1, x[0].shape[1], 3, 1), state=S), row, state
        )
        close(packed, alone)


def test_retention_backwards_and_with_values_first():
    q, k, v, *_, state = inputs()
    turned = state.transpose(-1, -2).contiguous()
    decay = RETNET[:, None].expand(2, 9, 3, 1)
    expected = naive(q.flip(1), k.flip(1), v.flip(1), decay, state=state)
    o, S = fla.fused_recurrent_retention(
        q, k, v, initial_state=turned, output_final_state=True, reverse=True, state_v_first=True
    )
    close((o.flip(1), S.transpose(-1, -2)), expected)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        fla.fused_recurrent_retention(q, k, v, transpose_state_layout=True)


def test_parallel_forms_give_the_weights_of_all_pairs():
    q, k, v, *_, gk, _ = inputs()
    g = gk[..., 0]
    for (o, weights), decay in (
        (fla.parallel_simple_gla(q, k, v, g, output_attentions=True), g),
        (fla.parallel_simple_gla(q, k, v, output_attentions=True), None),
        (fla.parallel_retention(q, k, v, output_attentions=True), RETNET.expand(2, 9, 3)),
    ):
        expected, _ = naive(q, k, v, None if decay is None else decay[..., None])
        close((o, torch.einsum("bhts,bshv->bthv", weights.double(), v.double())), (expected, expected))
        assert torch.equal(weights, weights.tril())
    assert fla.parallel_simple_gla(q, k, v, g)[1] is None
    with pytest.raises(UserError, match="per sequence"):
        fla.parallel_simple_gla(q[:1], k[:1], v[:1], g[:1], output_attentions=True, cu_seqlens=BOUNDS)
    # a decay that closes a head overflows nothing
    closed = fla.parallel_simple_gla(q, k, v, torch.full_like(g, -300.0), output_attentions=True)[1]
    torch.testing.assert_close(closed.diagonal(dim1=2, dim2=3).sum(-1), closed.sum((-1, -2)))


def test_fused_chunk_forms_are_the_chunk_forms():
    q, k, v, *_, gk, state = inputs()
    options = {"initial_state": state, "output_final_state": True}
    close(
        fla.fused_chunk_simple_gla(q, k, v, gk[..., 0], **options), naive(q, k, v, gk[..., :1], state=state)
    )
    gamma = RETNET.float()
    close(
        fla.fused_chunk_simple_gla(q, k, v, g_gamma=gamma)[:1],
        naive(q, k, v, RETNET[:, None].expand(2, 9, 3, 1))[:1],
    )
    close(fla.fused_chunk_gla(q=q, k=k, v=v, g=gk, **options), naive(q, k, v, gk, state=state))
    beta = torch.rand(2, 9, 3)
    expected = fla.chunk_delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True)
    actual = fla.fused_chunk_delta_rule(q=q, k=k, v=v, beta=beta, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("rule", [fla.chunk_hgrn, fla.fused_recurrent_hgrn])
def test_hgrn_is_an_elementwise_recurrence(rule):
    torch.manual_seed(0)
    x, g, h = torch.randn(2, 70, 6), F.logsigmoid(torch.randn(2, 70, 6)), torch.randn(2, 6)
    expected, last = [], h.double()
    for t in range(70):
        last = g[:, t].double().exp() * last + x[:, t]
        expected.append(last)
    close(rule(x, g, h, True), (torch.stack(expected, 1), last))
    assert rule(x, g)[1] is None
    with pytest.raises(UserError, match="g has shape"):
        rule(x, g[:, :3])
    with pytest.raises(UserError, match=r"expected \(batch, time, channels\)"):
        rule(x[0], g[0])


def test_packed_hgrn_is_that_of_each_sequence():
    torch.manual_seed(0)
    x, g, h = torch.randn(1, 9, 6), -torch.rand(1, 9, 6), torch.randn(2, 6)
    packed = fla.fused_recurrent_hgrn(x, g, h, True, BOUNDS)
    alone = in_pieces(lambda p, S: fla.chunk_hgrn(*p, S, True), (x, g), h)
    torch.testing.assert_close(packed, alone)


def test_dplr_and_rwkv7_have_a_product_of_two_vectors_beside_the_decay():
    q, k, v, a, b, gk, state = inputs()
    expected = naive(q, k, v, gk, a, b, 0.3, state)
    for o in (
        fla.chunk_dplr_delta_rule(q, k, v, a, b, gk, 0.3, state, True, safe_gate=True, lower_bound=-5.0),
        fla.fused_recurrent_dplr_delta_rule(q, k, v, a, b, gk, 0.3, state, True),
        fla.chunk_rwkv7(q, gk, k, v, a, b, 0.3, state, True, chunk_size=16),
        fla.fused_recurrent_rwkv7(q, gk, k, v, a, b, 0.3, state),
    ):
        close(o, expected)
    unscaled, scaled = naive(q, k, v, gk, a, b, 1.0)[0], naive(q, k, v, gk, a, b)[0]
    close((fla.chunk_rwkv7(q, gk, k, v, a, b)[0],), (unscaled,))  # its default is 1, as in fla
    close((fla.fused_recurrent_rwkv7(q, gk, k, v, a, b)[0],), (scaled,))
    close((fla.chunk_dplr_delta_rule(q, k, v, a, b, gk)[0],), (scaled,))
    kk, rate = F.normalize(a, dim=-1), torch.rand_like(a)
    close(
        fla.fused_mul_recurrent_rwkv7(q, gk, k, v, kk, rate, initial_state=state, output_final_state=True),
        naive(q, k, v, gk, -kk, kk * rate, 1.0, state),
    )


def test_iplr_has_no_decay():
    q, k, v, a, b, _, state = inputs()
    expected = naive(q, k, v, None, a, b, state=state)
    close(fla.chunk_iplr_delta_rule(q, k, v, a, b, None, state, True, chunk_size=32), expected)
    close(fla.fused_recurrent_iplr_delta_rule(q, k, v, a, b, None, state, True), expected)


def test_dplr_packed_and_backwards():
    q, k, v, a, b, gk, state = inputs()
    row = q, k, v, gk, a, b
    alone = in_pieces(lambda x, S: naive(*x, state=S), row, state)
    options = {"initial_state": state, "output_final_state": True, "cu_seqlens": BOUNDS}
    first = [x[:1] for x in (q, k, v, a, b, gk)]
    close(fla.chunk_dplr_delta_rule(*first, **options, cu_seqlens_cpu=BOUNDS), alone)
    backwards = in_pieces(
        lambda x, S: (lambda r: (r[0].flip(1), r[1]))(naive(*(y.flip(1) for y in x), state=S)), row, state
    )
    close(fla.fused_recurrent_dplr_delta_rule(*first, reverse=True, **options), backwards)


@pytest.mark.parametrize("rule", [fla.chunk_gdn2, fla.fused_recurrent_gdn2])
def test_gated_deltanet_2_erases_by_key_channel_and_writes_by_value_channel(rule):
    q, k, v, erase, _, gk, state = inputs()
    erase, write = torch.sigmoid(erase), torch.rand_like(v)
    unit = k.double() / torch.sqrt((k.double() ** 2).sum(-1, keepdim=True) + 1e-6)
    reader = q.double() / torch.sqrt((q.double() ** 2).sum(-1, keepdim=True) + 1e-6)
    S, outputs = state.double(), []
    for t in range(9):
        S = S * gk[:, t, :, :, None].double().exp()
        erased = ((erase[:, t] * unit[:, t])[..., None] * S).sum(-2)
        S = S + unit[:, t, :, :, None] * (write[:, t] * v[:, t] - erased)[:, :, None]
        outputs.append((reader[:, t, :, :, None] * S).sum(-2) / 2)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    close(rule(q, k, v, gk, erase, write, **options), (torch.stack(outputs, 1), S))
    turned = options | {"initial_state": state.transpose(-1, -2), "state_v_first": True}
    o, last = rule(q, k, v, gk, erase, write, **turned)
    close((o, last.transpose(-1, -2)), (torch.stack(outputs, 1), S))
    # the gate inside is that of KDA
    A_log, x = torch.randn(3), torch.randn_like(gk)
    inside = rule(q, k, v, x, erase, write, use_gate_in_kernel=True, A_log=A_log)[0]
    outside = rule(q, k, v, -A_log.exp()[:, None] * F.softplus(x), erase, write)[0]
    torch.testing.assert_close(inside, outside)


def test_gated_deltanet_2_with_one_gate_is_kda_with_grouped_heads_too():
    q, k, *_ = inputs(H=2)
    torch.manual_seed(1)
    v, gk, beta = torch.randn(2, 9, 4, 5), -torch.rand(2, 9, 4, 4), torch.rand(2, 9, 4)
    expected = fla.chunk_kda(q, k, v, gk, beta, use_qk_l2norm_in_kernel=True)[0]
    gates = beta[..., None].expand(2, 9, 4, 4), beta[..., None].expand_as(v)
    actual = fla.fused_recurrent_gdn2(q, k, v, gk, *gates, use_qk_l2norm_in_kernel=True)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_gradients_reach_every_input():
    q, k, v, a, b, gk, _ = (x.double().requires_grad_() for x in inputs(T=3))
    calls = (
        (lambda *x: fla.chunk_rwkv7(*x)[0], (q, gk, k, v, a, b)),
        (lambda *x: fla.chunk_linear_attn(x[0].exp(), x[1].exp(), x[2])[0], (q, k, v)),
        (lambda *x: fla.chunk_gdn2(*x)[0], (q, k, v, gk, b, v)),
        (lambda x, g: fla.chunk_hgrn(x[:, :, 0], g[:, :, 0])[0], (a, gk)),
    )
    for call, given in calls:
        assert torch.autograd.gradcheck(call, given)


def test_options_without_a_counterpart_name_the_way_round():
    q, k, v, a, b, gk, _ = inputs()
    for match, call in (
        ("initial_state of the next", lambda: fla.chunk_rwkv7(q, gk, k, v, a, b, cp_context=object())),
        (
            "initial_state of the next",
            lambda: fla.chunk_dplr_delta_rule(q, k, v, a, b, gk, cp_context=object()),
        ),
        ("a negative number", lambda: fla.chunk_dplr_delta_rule(q, k, v, a, b, gk, lower_bound=1.0)),
        ("'fast' is not known", lambda: fla.chunk_iplr_delta_rule(q, k, v, a, b, fast=True)),
        (
            "pieces of the sequence",
            lambda: fla.chunk_gdn2(q, k, v, gk, b, v, return_intermediate_states=True),
        ),
        (
            r"expected a number in \[-5, 0\)",
            lambda: fla.chunk_gdn2(q, k, v, gk, b, v, use_gate_in_kernel=True, safe_gate=True),
        ),
        ("w has shape", lambda: fla.chunk_gdn2(q, k, v, gk, b, v[..., :1])),
        ("layer_idx is 5", lambda: fla.chunk_lightning_attn(q, k, v, 5, 5)),
        ("'fast' is not known", lambda: fla.chunk_retention(q, k, v, fast=True)),
    ):
        with pytest.raises(UserError, match=match):
            call()
