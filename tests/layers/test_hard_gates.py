"""Gates that reach their bounds, in every mixer that has them."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.layers import build, model_config
from statetrack.layers.hard_gates import chosen_gates, gate_values, hard_logits, hard_rate, hard_turn
from statetrack.ops.delta_rule.reference import beta_values

MIXERS = {
    "gla": {},
    "hgrn2": {},
    "mamba2": {"d_state": 8},
    "mamba3": {"d_state": 8},
    "mlstm": {},
    "mlstm, no normaliser": {"normaliser": False},
    "gated-deltanet": {},
    "gated-deltanet-signed": {},
    "kda": {},
    "kda, signed": {"signed_gate": True},
}
RANGES = [
    (name, eigenvalues)
    for name in MIXERS
    for eigenvalues in (*["[0,1]", "[-1,1]"], *["unit-circle"] * (name == "mamba3"))
]
TOKENS = torch.randint(5, (2, 24), generator=torch.Generator().manual_seed(0))


def model(name, eigenvalues="[-1,1]", **options):
    torch.manual_seed(0)
    options = MIXERS[name] | {"gate": "hard", "layers": 1, "heads": 2} | options
    return build(name.partition(",")[0], vocab_size=5, d_model=16, eigenvalues=eigenvalues, **options)


def push_to_the_bounds(net):
    """Enlarge the weights behind the gates, so that both bounds are reached."""
    with torch.no_grad():
        for name, p in net.named_parameters():
            if any(part in name for part in ("to_gate.0", "to_f.weight", "to_decay", "in_proj")):
                p *= 60


def test_hard_gates_are_the_smooth_ones_stretched_and_cut_off():
    s = torch.linspace(0.01, 0.99, 50)
    positive = torch.tensor([min(1.1 * x, 1.0) for x in s.tolist()])
    torch.testing.assert_close(chosen_gates("hard", {"g": s.log()})["g"].exp(), positive)
    torch.testing.assert_close(torch.sigmoid(hard_logits(torch.logit(s), False)), positive, rtol=0, atol=2e-7)
    signed = torch.tensor([min(max(1.2 * (2 * x - 1), -1.0), 1.0) for x in s.tolist()])
    torch.testing.assert_close(chosen_gates("hard", {"a": 2 * s - 1})["a"], signed)
    torch.testing.assert_close(
        2 * torch.sigmoid(hard_logits(torch.logit(s), True)) - 1, signed, rtol=0, atol=4e-7
    )
    assert (positive == 1).any()
    assert {-1.0, 1.0} < set(signed.tolist())


def test_angles_and_smooth_gates_stay_as_they_are():
    gates = {"g": -torch.rand(3), "angle": torch.rand(3)}
    assert chosen_gates("smooth", gates) is gates
    hard = chosen_gates("hard", gates)
    assert set(hard) == {"g", "angle"}
    assert hard["angle"] is gates["angle"]


def test_hard_turns_are_0_or_half_a_turn_where_they_are_near():
    t = torch.tensor([-0.9, -0.82, -0.5, -0.1, 0.0, 0.18, 0.3, 0.8, 0.82])
    expected = torch.tensor([-1.0, -1.0, -0.5, 0.0, 0.0, 0.0, 0.18, 0.98, 1.0])
    torch.testing.assert_close(hard_turn(t), expected)


def test_a_rotating_deltanet_has_exact_angles_of_both_kinds():
    net = build("deltanet-rotating", vocab_size=5, d_model=64, heads=1, gate="hard", layers=1)
    assert net.blocks[0].mixer.to_angle.weight.std() > 0.01  # not near 0, as smooth angles start
    with torch.no_grad():
        angle = net.blocks[0].mixer._controls(5 * torch.randn(4, 16, 64), None)[-2]["angle"].abs()
    assert (angle == 0).any()
    assert (angle == torch.tensor(torch.pi)).any()
    assert ((angle > 0) & (angle < torch.pi)).any()
    loss, _ = net(TOKENS, targets=TOKENS)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_a_turning_mamba3_keeps_and_turns_its_state_exactly():
    net = build("mamba3", vocab_size=5, d_model=64, eigenvalues="unit-circle", gate="hard", layers=1)
    mixer = net.blocks[0].mixer
    with torch.no_grad():
        x = 5 * torch.randn(4, 16, 64)
        gates = mixer._controls(x)[-1]
        step, rate = mixer.steps_and_rates(x)
    assert torch.equal(gates["g"] == 0, rate <= 0.5)  # whatever the step
    torch.testing.assert_close(gates["g"][rate > 0.5], -(step * (rate - 0.5))[rate > 0.5])
    angle = gates["angle"].abs()[..., : mixer.angles]
    assert (angle == 0).any()
    assert (angle == torch.tensor(torch.pi)).any()
    assert ((angle > 0) & (angle < torch.pi)).any()


def test_gradients_of_gates_are_those_without_the_cut():
    """Also beyond the bounds: a gate that starts there can leave them."""
    x = torch.tensor([-4.0, -1.0, 0.3, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    s = torch.sigmoid(x).detach()
    positive = 1.1 * s * (1 - s)
    for gate, expected in (
        (lambda x: chosen_gates("hard", {"g": torch.nn.functional.logsigmoid(x)})["g"], 1 - s),
        (lambda x: torch.sigmoid(hard_logits(x, False)), positive),
        (lambda x: chosen_gates("hard", {"a": torch.tanh(x / 2)})["a"] / 2, 1.2 * s * (1 - s)),
        (lambda x: torch.sigmoid(hard_logits(x, True)), 1.2 * s * (1 - s)),
        # angles and rates have none beyond theirs
        (lambda x: hard_turn(torch.sigmoid(x)), 1.6 * s * (1 - s) * torch.tensor([0, 1, 1, 0, 0])),
        (lambda x: hard_rate(torch.sigmoid(x)), s * (1 - s) * torch.tensor([0, 0, 1, 1, 1])),
    ):
        (gradient,) = torch.autograd.grad(gate(x).sum(), x)
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(("name", "eigenvalues"), RANGES)
def test_every_gate_learns_from_the_start(name, eigenvalues):
    """Weights behind the gates have gradients, also where all gates are at their bounds."""
    net = model(name, eigenvalues)
    net(TOKENS, targets=TOKENS)[0].backward()
    behind = ("to_gate.0.weight", "to_f.weight", "to_decay", "dt_bias")
    found = [p.grad for parameter, p in net.named_parameters() if any(part in parameter for part in behind)]
    assert found
    assert all((gradient != 0).any() for gradient in found)


@pytest.mark.parametrize(("name", "eigenvalues"), RANGES)
def test_every_mixer_reaches_its_bounds_and_has_finite_gradients_there(name, eigenvalues):
    net = model(name, eigenvalues)
    push_to_the_bounds(net)
    sizes = net.transition_eigenvalues(TOKENS)[0].abs()
    delta = name.startswith(("gated", "kda"))
    assert sizes.max() <= 1 + 1e-5
    assert (sizes == 1).any() or delta
    if eigenvalues == "[-1,1]" and not delta:
        assert (net.transition_eigenvalues(TOKENS)[0] == -1).any()
    loss, _ = net(TOKENS, targets=TOKENS)
    loss.backward()
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name


@pytest.mark.parametrize(("name", "eigenvalues"), RANGES)
def test_gradients_at_the_bounds_are_finite_in_bfloat16_too(name, eigenvalues):
    """1 - 2^-24 rounds to 1 there: gates are computed in float32."""
    net = model(name, eigenvalues)
    push_to_the_bounds(net)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = net(TOKENS, targets=TOKENS)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize(("name", "eigenvalues"), RANGES)
def test_decoding_token_by_token_equals_one_pass(name, eigenvalues):
    net = model(name, eigenvalues)
    push_to_the_bounds(net)
    with torch.no_grad():
        expected, _ = net(TOKENS)
        state, logits = None, []
        for t in range(TOKENS.shape[1]):
            step, state = net(TOKENS[:, t : t + 1], state)
            logits.append(step)
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)


def test_a_gate_at_its_bound_keeps_a_state_for_ten_thousand_steps():
    """Two heads of Mamba-2 with a step size near 0, so exp(Delta A) > 0.917: hard gates lose nothing."""
    kept = {}
    for gate in ("smooth", "hard"):
        mixer = model("mamba2", "[0,1]", gate=gate).blocks[0].mixer
        with torch.no_grad():
            mixer.dt_bias.fill_(-5.0)  # a decay of 0.993 per step
            mixer.in_proj.weight[-2:] = 0
            state = mixer(torch.randn(1, 4, 16))[1]
            before = state.S
            _, state = mixer(torch.zeros(1, 10_000, 16), state._replace(convolution=0 * state.convolution))
        # with an input of 0 the convolution's bias is still written: compare what is left of the first state
        _, without = mixer(
            torch.zeros(1, 10_000, 16), state._replace(S=0 * before, convolution=0 * state.convolution)
        )
        kept[gate] = ((state.S - without.S).norm() / before.norm()).item()
    assert kept["hard"] == pytest.approx(1, rel=1e-2)
    assert kept["smooth"] < 1e-6


@pytest.mark.parametrize("signed", [False, True])
def test_the_spectrum_of_kda_has_the_hard_betas_and_gates(signed):
    """Against the eigenvalues of (I - beta k k^T) diag(a), built for every token."""
    net = model("kda", signed_gate=signed, beta="hard", convolution=0)
    push_to_the_bounds(net)
    mixer, x = net.blocks[0].mixer, torch.randn(1, 6, 16)
    with torch.no_grad():
        _, k, _, _ = mixer._qkv(x, None)
        k = torch.nn.functional.normalize(k, dim=-1)
        beta, a = beta_values(mixer.to_beta(x), 2.0, True), gate_values(mixer._gates(x))
    matrices = (torch.eye(8) - beta[..., None, None] * k[..., :, None] * k[..., None, :]) * a[..., None, :]
    expected = torch.linalg.eigvals(matrices).abs().sort().values
    torch.testing.assert_close(
        mixer.transition_eigenvalues(x).abs().sort().values, expected, rtol=1e-3, atol=1e-3
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile makes an autograd.Function
@pytest.mark.parametrize("name", MIXERS)
def test_a_model_with_hard_gates_is_one_graph_forward_and_backward(name):
    net = model(name)
    expected, _ = net(TOKENS)
    logits, _ = torch.compile(net, fullgraph=True, backend="aot_eager")(TOKENS)
    torch.testing.assert_close(logits, expected)
    logits.sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    torch.compiler.reset()


@pytest.mark.parametrize("name", MIXERS)
def test_an_unknown_kind_of_gate_is_explained(name):
    with pytest.raises(UserError, match="gate 'hrad' is not known"):
        model(name, gate="hrad")
    with pytest.raises(UserError, match="beta 'hrad' is not known"):
        build("kda", vocab_size=5, d_model=16, beta="hrad")


@pytest.mark.parametrize("name", MIXERS)
def test_a_printed_mixer_says_that_its_gates_are_hard(name):
    assert ", gate=hard" in str(model(name).blocks[0].mixer)
    assert "hard" not in str(model(name, gate="smooth").blocks[0].mixer)


def test_a_smooth_gate_is_the_default():
    for name in MIXERS:
        assert model_config(name.partition(",")[0]).mixer.gate == "smooth"
