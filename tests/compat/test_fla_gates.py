"""Gated linear attention, KDA and gates per key channel of statetrack.compat.fla against fla's equations."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from statetrack import delta_rule, gated_linear_attention
from statetrack.compat import fla
from statetrack.errors import UserError

GLA = (fla.chunk_gla, fla.fused_recurrent_gla)
SIMPLE = (fla.chunk_simple_gla, fla.fused_recurrent_simple_gla)
KDA = (fla.chunk_kda, fla.fused_recurrent_kda)


def naive(q, k, v, beta=None, g=None, gk=None, gv=None, scale=None, state=None):
    """One step after another in float64; value head i reads key head i H // G. Without `beta` the product of
    key and value is added as it is (linear attention), with it the delta rule is made. o and the last states.
    """
    q, k, v = (x.double() for x in (q, k, v))
    (B, T, H, K), (G, V) = q.shape, v.shape[2:]
    heads = torch.tensor([i * H // G for i in range(G)])
    S = torch.zeros(B, G, K, V, dtype=torch.float64) if state is None else state.double()
    o = []
    for t in range(T):
        if g is not None:
            S = S * torch.exp(g[:, t].double())[:, :, None, None]
        if gk is not None:
            S = S * torch.exp(gk[:, t].double())[:, :, :, None]
        if gv is not None:
            S = S * torch.exp(gv[:, t].double())[:, :, None, :]
        key, write = k[:, t, heads], v[:, t]
        if beta is not None:
            write = beta[:, t, :, None].double() * (write - (key[..., None] * S).sum(-2))
        S = S + key[..., None] * write[..., None, :]
        o.append((q[:, t, heads, :, None] * S).sum(-2) * (K**-0.5 if scale is None else scale))
    return torch.stack(o, 1), S


def inputs(B=2, T=9, H=2, G=2, K=4, V=3):
    """q, k, v, beta, g per head, gk per key channel, and a state."""
    torch.manual_seed(0)
    q, k = torch.randn(B, T, H, K), F.normalize(torch.randn(B, T, H, K), dim=-1)
    v, beta = torch.randn(B, T, G, V), 2 * torch.rand(B, T, G)
    return q, k, v, beta, -torch.rand(B, T, G), -2 * torch.rand(B, T, G, K), torch.randn(B, G, K, V)


def close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-5)


def turned(state):
    return state.transpose(-1, -2).contiguous()


@pytest.mark.parametrize("T", [9, 70])
@pytest.mark.parametrize("rule", GLA)
def test_gla_decays_every_key_channel(rule, T):
    q, k, v, _, _, gk, state = inputs(T=T)
    o, none = rule(q, k, v, gk)
    close([o], naive(q, k, v, gk=gk)[:1])
    assert none is None
    options = {"scale": 0.3, "initial_state": state, "output_final_state": True}
    expected = naive(q, k, v, gk=gk, scale=0.3, state=state)
    o, last = rule(q, k, v, gk, **options)
    close((o, last), expected)
    assert last.dtype == torch.float32
    o, last = rule(q, k, v, gk, **options | {"initial_state": turned(state)}, state_v_first=True)
    close((o, turned(last)), expected)
    assert last.is_contiguous()


@pytest.mark.parametrize("rule", SIMPLE)
def test_simple_gla_decays_a_head_by_step_or_always_alike(rule):
    q, k, v, _, g, _, state = inputs(T=70)
    g_gamma = torch.tensor([-0.1, -0.7])
    options = {"initial_state": state, "output_final_state": True}
    close(rule(q, k, v, g, **options), naive(q, k, v, g=g, state=state))
    expected = naive(q, k, v, g=g_gamma.expand(2, 70, 2), state=state)
    close(rule(q, k, v, g_gamma=g_gamma, **options), expected)
    o, last = rule(q, k, v, None, g_gamma, None, turned(state), True, state_v_first=True)
    close((o, turned(last)), expected)
    close(rule(q, k, v, **options), naive(q, k, v, state=state))


def test_gla_without_gates_is_linear_attention():
    q, k, v, *_ = inputs()
    close(fla.fused_recurrent_gla(q, k, v)[:1], naive(q, k, v)[:1])


@pytest.mark.parametrize("packed", [False, True])
def test_reversed_time_runs_from_the_last_step_of_each_sequence(packed):
    q, k, v, _, g, gk, _ = inputs(B=1 if packed else 2, T=12)
    states = torch.randn(2, 2, 4, 3)
    options = {"initial_state": states, "output_final_state": True, "reverse": True}
    options |= {"cu_seqlens": torch.tensor([0, 5, 12])} if packed else {}
    channels = fla.fused_recurrent_gla(q, k, v, gk, **options)
    heads = fla.fused_recurrent_simple_gla(q, k, v, g, **options)
    rows = [(0, slice(0, 5)), (0, slice(5, 12))] if packed else [(0, slice(None)), (1, slice(None))]
    for i, (b, piece) in enumerate(rows):
        backwards = [x[b : b + 1, piece].flip(1) for x in (q, k, v, g, gk)]
        for (o, last), gates in ((channels, {"gk": backwards[4]}), (heads, {"g": backwards[3]})):
            expected = naive(*backwards[:3], **gates, state=states[i : i + 1])
            close((o[b : b + 1, piece].flip(1), last[i : i + 1]), expected)


def test_packed_sequences_are_sequences_of_their_own():
    q, k, v, beta, g, gk, _ = inputs(B=1, T=12)
    offsets, states = torch.tensor([0, 5, 12]), torch.randn(2, 2, 4, 3)
    options = {"initial_state": states, "output_final_state": True, "cu_seqlens": offsets}
    known = {"cu_seqlens_cpu": offsets}
    made = [
        ({"gk": gk}, fla.chunk_gla(q, k, v, gk, **options, **known)),
        ({"gk": gk}, fla.fused_recurrent_gla(q, k, v, gk, **options)),
        ({"g": g}, fla.chunk_simple_gla(q, k, v, g, **options, **known)),
        ({"g": g}, fla.fused_recurrent_simple_gla(q, k, v, g, **options)),
        ({"gk": gk, "beta": beta}, fla.chunk_kda(q, k, v, gk, beta, **options, **known)),
        ({"gk": gk, "beta": beta}, fla.fused_recurrent_kda(q, k, v, gk, beta, **options)),
    ]
    for given, (o, last) in made:
        for i, piece in enumerate((slice(0, 5), slice(5, 12))):
            parts = {name: x[:, piece] for name, x in given.items()}
            expected = naive(q[:, piece], k[:, piece], v[:, piece], **parts, state=states[i : i + 1])
            close((o[:, piece], last[i : i + 1]), expected)


@pytest.mark.parametrize(("H", "G"), [(2, 2), (2, 6), (1, 3)])
@pytest.mark.parametrize("rule", KDA)
def test_kda_decays_key_channels_of_grouped_value_heads(rule, H, G):
    q, k, v, beta, _, gk, state = inputs(T=70, H=H, G=G)
    expected = naive(q, k, v, beta, gk=gk, scale=0.3, state=state)
    close(rule(q, k, v, gk, beta, scale=0.3, initial_state=state, output_final_state=True), expected)
    for name in ("state_v_first", "transpose_state_layout"):
        old = name == "transpose_state_layout"
        context = pytest.warns(DeprecationWarning, match="state_v_first") if old else contextlib.nullcontext()
        with context:
            o, last = rule(
                q,
                k,
                v,
                gk,
                beta,
                scale=0.3,
                initial_state=turned(state),
                output_final_state=True,
                **{name: True},
            )
        close((o, turned(last)), expected)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("gate", ["softplus", "bounded", "bounded without A_log"])
@pytest.mark.parametrize("rule", KDA)
def test_kda_computes_gate_beta_and_norms_inside(rule, gate, negative):
    q, k, v, logits, _, x, _ = inputs(G=4)
    A_log, bias, k = torch.randn(4), torch.randn(16), 3 * k
    inside = {"use_gate_in_kernel": True, "dt_bias": bias, "use_qk_l2norm_in_kernel": True}
    inside |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": negative}
    shifted = x.double() + bias.double().view(4, 4)
    rate = A_log.double().exp()[:, None]
    if gate == "softplus":
        inside |= {"A_log": A_log}
        gk = -rate * torch.log1p(shifted.exp())
    elif gate == "bounded":
        inside |= {"A_log": A_log, "lower_bound": -3.0}
        gk = -3 / (1 + torch.exp(-rate * shifted))
    else:
        inside |= {"lower_bound": -3.0}
        gk = -3 / (1 + torch.exp(-shifted))
    if rule is fla.chunk_kda and gate != "softplus":
        inside |= {"safe_gate": True}
    beta = (2 if negative else 1) / (1 + torch.exp(-logits.double()))
    unit = [y / torch.sqrt((y.double() ** 2).sum(-1, keepdim=True) + 1e-6) for y in (q, k)]
    close(rule(q, k, v, x, logits, **inside)[:1], naive(*unit, v, beta, gk=gk)[:1])


def test_parameters_of_a_gate_inside_are_not_read_without_it():
    q, k, v, beta, _, gk, _ = inputs()
    unread = {"A_log": torch.zeros(2), "dt_bias": torch.ones(8), "lower_bound": -3.0}
    for rule in KDA:
        close(rule(q, k, v, gk, beta, **unread)[:1], naive(q, k, v, beta, gk=gk)[:1])


def test_gated_delta_rule_adds_the_decays_of_head_and_channel():
    rule = fla.fused_recurrent_gated_delta_rule
    q, k, v, beta, g, gk, state = inputs(G=4)
    options = {"beta": beta, "initial_state": state, "output_final_state": True}
    close(rule(q, k, v, gk=gk, **options), naive(q, k, v, beta, gk=gk, state=state))
    close(rule(q, k, v, g, gk, **options), naive(q, k, v, beta, g, gk, state=state))
    A_log = torch.randn(4)
    inside = -A_log.double().exp() * torch.log1p(g.double().exp())
    expected = naive(q, k, v, beta, inside, gk, state=state)
    close(rule(q, k, v, g, gk, use_gate_in_kernel=True, A_log=A_log, **options), expected)


def test_gradients_reach_what_the_gates_are_made_of():
    q, k, v, beta, g, x, _ = (y.double() for y in inputs(T=4, G=4))
    weights, A_log, bias = torch.randn_like(v), torch.randn(4).double(), torch.randn(16).double()
    leaves = [y.requires_grad_() for y in (q, k, v, beta, g, x, A_log, bias)]
    per_channel = -A_log.exp()[:, None] * torch.log1p((x + bias.view(4, 4)).exp())
    inside = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": bias}
    own = [y for y in leaves if y is not g]
    for made, expected, by in (
        (fla.chunk_kda(q, k, v, x, beta, **inside), naive(q, k, v, beta, gk=per_channel), own),
        (
            fla.fused_recurrent_gated_delta_rule(q, k, v, g, x, beta=beta),
            naive(q, k, v, beta, g, x),
            leaves[:6],
        ),
    ):
        actual = torch.autograd.grad((made[0] * weights).sum(), by)
        right = torch.autograd.grad((expected[0] * weights).sum(), by, retain_graph=True)
        for a, e in zip(actual, right, strict=True):
            torch.testing.assert_close(a, e)
    g_gamma = torch.tensor([-0.1, -0.7], dtype=torch.float64, requires_grad=True)
    made, _ = fla.chunk_simple_gla(q, k, v[:, :, :2], g_gamma=g_gamma)
    right, _ = naive(q, k, v[:, :, :2], g=g_gamma.expand(2, 4, 2))
    (actual,) = torch.autograd.grad((made * weights[:, :, :2]).sum(), g_gamma)
    (expected,) = torch.autograd.grad((right * weights[:, :, :2]).sum(), g_gamma)
    torch.testing.assert_close(actual, expected)


def test_the_way_round_value_gates_computes_them():
    """What the error for gv says: heads of one value channel each."""
    q, k, v, beta, _, gk, _ = inputs()
    gv = -torch.rand(v.shape)
    wide = [y.repeat_interleave(3, dim=2) for y in (q, k, gk, beta)]
    values, gate = v.flatten(2)[..., None], wide[2] + gv.flatten(2)[..., None]
    o, _ = gated_linear_attention(*wide[:2], values, gate)
    close([o.reshape(v.shape)], naive(q, k, v, gk=gk, gv=gv)[:1])
    o, _ = delta_rule(*wide[:2], values, wide[3], g=gate)
    close([o.reshape(v.shape)], naive(q, k, v, beta, gk=gk, gv=gv)[:1])


def test_options_without_a_counterpart_name_the_way_round():
    q, k, v, beta, g, gk, _ = inputs()
    simple, kda = fla.chunk_simple_gla, fla.chunk_kda
    stepwise = fla.fused_recurrent_gated_delta_rule
    inside = {"use_gate_in_kernel": True}
    for match, call in (
        (r"gated_linear_attention with q, k", lambda: fla.fused_recurrent_gla(q, k, v, gk, v)),
        (r"statetrack.delta_rule with q, k", lambda: stepwise(q, k, v, gv=v)),
        (r"g + g_gamma", lambda: simple(q, k, v, g, torch.zeros(2))),
        (r"chunk_gla and", lambda: simple(q, k, v, gk)),
        (
            r"g_gamma has shape (3,), expected (heads,) = (2,)",
            lambda: simple(q, k, v, g_gamma=torch.zeros(3)),
        ),
        (r"64, 128 or 256", lambda: simple(q, k, v, g, chunk_size=48)),
        (r"32 or 64", lambda: kda(q, k, v, gk, beta, chunk_size=16)),
        (r"(batch, time, value heads, K) = (2, 9, 2, 4)", lambda: fla.chunk_gla(q, k, v, g)),
        (r"(batch, time, value heads, K) = (2, 9, 2, 4)", lambda: kda(q, k, v, g, beta)),
        (r"gk has shape", lambda: stepwise(q, k, v, gk=g)),
        (r"g has shape", lambda: stepwise(q, k, v, g[:, :1], gk)),
        (r"chunk_gla: g is a NoneType", lambda: fla.chunk_gla(q, k, v, None)),
        (r"needs A_log, or lower_bound", lambda: kda(q, k, v, gk, beta, **inside)),
        (r"A_log has shape (4,)", lambda: kda(q, k, v, gk, beta, **inside, A_log=torch.ones(4))),
        (
            r"dt_bias has shape (2,)",
            lambda: kda(q, k, v, gk, beta, **inside, A_log=torch.ones(2), dt_bias=torch.ones(2)),
        ),
        (r"in [-5, 0)", lambda: kda(q, k, v, gk, beta, **inside, safe_gate=True, lower_bound=-6)),
        (r"in [-5, 0)", lambda: kda(q, k, v, gk, beta, **inside, safe_gate=True)),
        (r"initial_state of the next", lambda: kda(q, k, v, gk, beta, return_intermediate_states=True)),
        (r"initial_state of the next", lambda: kda(q, k, v, gk, beta, cp_context=object())),
        (r"empty sequences", lambda: kda(q, k, v, gk, beta, use_graph=True)),
        (r"2 * sigmoid", lambda: kda(q, k, v, gk, beta, allow_neg_eigval=True)),
        (r"expected (batch, time, heads)", lambda: kda(q, k, v, gk, torch.zeros_like(v))),
        (r"multiple of the heads of k", lambda: kda(q, k, v[:, :, :1], gk[:, :, :1], beta[:, :, :1])),
        (r"'chunk_sise' is not known", lambda: simple(q, k, v, g, chunk_sise=16)),
        (r"transpose axes 1 and 2", lambda: fla.fused_recurrent_gla(q, k, v, gk, head_first=True)),
    ):
        with pytest.raises(UserError) as raised:
            call()
        assert match in str(raised.value)


def test_options_that_change_no_number_are_taken():
    q, k, v, beta, g, gk, _ = inputs()
    taken = {"safe_gate": True, "disable_recompute": True, "max_num_seqs": 2, "chunk_size": 32}
    close(fla.chunk_kda(q, k, v, gk, beta, **taken)[:1], naive(q, k, v, beta, gk=gk)[:1])
    close(fla.chunk_simple_gla(q, k, v, g, chunk_size=128)[:1], naive(q, k, v, g=g)[:1])


def test_half_precision_goes_in_and_comes_out():
    q, k, v, beta, _, gk, _ = (x.bfloat16() for x in inputs())
    for (o, last), expected in (
        (fla.chunk_gla(q, k, v, gk, output_final_state=True), naive(q, k, v, gk=gk)),
        (fla.chunk_kda(q, k, v, gk, beta, output_final_state=True), naive(q, k, v, beta, gk=gk)),
    ):
        assert (o.dtype, last.dtype) == (torch.bfloat16, torch.float32)
        close([last], expected[1:])
        torch.testing.assert_close(o.double(), expected[0], rtol=1e-2, atol=1e-2)
