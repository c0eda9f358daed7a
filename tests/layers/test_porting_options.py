"""Options that users of other libraries bring: each against a loop by hand, or against the other library."""

import pytest
import torch
import torch.nn.functional as F

from statetrack.errors import UserError
from statetrack.layers import DeltaNet, DeltaNetConfig, Mamba, MambaConfig, build, extended_range

OPTIONS = {
    "value heads": {"value_heads": 4},
    "gated value heads": {"value_heads": 6, "gated": True, "output_gate": True, "value_dim": 3},
    "two factors": {"value_heads": 4, "householders": 2},
    "convolution bias": {"conv_bias": True},
    "sigmoid gate": {"output_gate": True, "gate_activation": "sigmoid"},
    "norm eps": {"head_norm_eps": 0.3},
    "no convolution": {"convolution": 0, "value_heads": 4},
}


def delta_net(**options) -> DeltaNet:
    torch.manual_seed(0)
    net = DeltaNet(DeltaNetConfig(heads=2, head_dim=5, **options), d_model=12)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return net


def by_hand(net: DeltaNet, x: torch.Tensor) -> torch.Tensor:
    """A DeltaNet layer written out for one sequence x (T, d_model), head by head and step by step."""
    config, (H, K, V, n) = net.config, (net.heads, net.K, net.V, net.config.householders)
    G = config.value_heads or H

    def filtered(linear, i):
        y = x @ linear.weight.T
        if net.convolutions is None:
            return F.silu(y)
        taps, bias = net.convolutions[i].weight, net.convolutions[i].bias
        return F.silu(F.conv1d(F.pad(y.T, (3, 0)), taps, bias, groups=len(taps)).T)

    q, k, v = (filtered(linear, i) for i, linear in enumerate((net.to_q, net.to_k, net.to_v)))
    beta = net.beta_max * torch.sigmoid(x @ net.to_beta.weight.T)
    outputs = []
    for head in range(G):
        S, group, heard = torch.zeros(K, V), head * H // G, []
        for t in range(len(x)):
            if config.gated:
                step = F.softplus(x[t] @ net.to_decay.weight[head] + net.decay_bias[head])
                S = S * torch.exp(-net.A_log[head].exp() * step)
            for i in range(n):
                key = k[t].view(n, H, K)[i, group]
                key = key / (key.square().sum() + 1e-6).sqrt()
                error = v[t].view(n, G, V)[i, head] - S.T @ key
                S = S + beta[t].view(n, G)[i, head] * torch.outer(key, error)
            query = q[t].view(H, K)[group]
            o = S.T @ (query / (query.square().sum() + 1e-6).sqrt()) * K**-0.5
            heard.append(o / (o.square().mean() + config.head_norm_eps).sqrt() * net.norm.weight)
        outputs.append(torch.stack(heard))
    y = torch.cat(outputs, dim=-1)
    if config.output_gate:
        gate = x @ net.output_gate.weight.T
        y = y * (torch.sigmoid(gate) if config.gate_activation == "sigmoid" else F.silu(gate))
    return y @ net.to_out.weight.T


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_deltanet_is_what_it_says(name):
    net, x = delta_net(**OPTIONS[name]), torch.randn(2, 9, 12)
    y, state = net(x)
    torch.testing.assert_close(y, torch.stack([by_hand(net, row) for row in x]), rtol=1e-4, atol=1e-5)
    assert state.S.shape == (2, net.value_heads, net.K, net.V)
    pieces, state = [], None
    for piece in x.split([4, 1, 4], dim=1):
        y_piece, state = net(piece, state)
        pieces.append(y_piece)
    torch.testing.assert_close(torch.cat(pieces, dim=1), y, rtol=1e-4, atol=1e-5)


def test_the_spectrum_has_a_transition_per_value_head():
    net, x = delta_net(value_heads=4), torch.randn(1, 6, 12)
    spectrum = net.transition_eigenvalues(x)
    assert spectrum.shape == (1, 6, 4, 5)
    assert "value_heads=4" in repr(net)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_heads": 3}, "heads, of which value_heads = 2 does not divide 3"),
        ({"gate_activation": "relu"}, "gate_activation 'relu' is not known"),
    ],
)
def test_deltanet_refuses_what_it_cannot_be(options, message):
    with pytest.raises(UserError, match=message):
        DeltaNet(DeltaNetConfig(heads=2, **options), d_model=12)


@pytest.mark.parametrize(("bias", "conv_bias"), [(True, True), (False, False), (True, False)])
def test_mamba_with_biases_is_that_of_transformers(bias, conv_bias):
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba.modeling_mamba import MambaMixer

    torch.manual_seed(0)
    settings = transformers.MambaConfig(hidden_size=16, state_size=4, use_bias=bias, use_conv_bias=conv_bias)
    theirs = MambaMixer(settings, layer_idx=0)
    ours = Mamba(MambaConfig("[0,1]", d_state=4, bias=bias, conv_bias=conv_bias), d_model=16)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 10, 16)
    torch.testing.assert_close(ours(x)[0], theirs(x), rtol=1e-4, atol=1e-5)


def test_the_initial_step_sizes_of_mamba_follow_its_options():
    torch.manual_seed(0)
    net = Mamba(MambaConfig(expand=64, dt_min=1e-5, dt_max=0.5, dt_init_floor=1e-3, dt_init="constant"), 16)
    steps = F.softplus(net.dt_proj.bias.detach())
    assert 0.9e-3 < float(steps.min()) < 1.1e-3
    assert 0.3 < float(steps.max()) < 0.5
    assert float((steps < 1.1e-3).float().mean()) > 0.3, "the floor holds many"
    assert torch.equal(net.dt_proj.weight, torch.full_like(net.dt_proj.weight, net.dt_rank**-0.5))
    net = Mamba(MambaConfig(expand=64, dt_scale=3.0, dt_rank=4), 16)
    assert 1.4 < net.dt_proj.weight.max().item() < 1.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dt_min": 0.2}, "0 < dt_min <= dt_max"),
        ({"dt_rank": "auto"}, "our default. Use None"),
        ({"dt_init": "zero"}, "dt_init 'zero'"),
        ({"dt_scale": 0.0}, "above 0"),
    ],
)
def test_mamba_refuses_steps_that_are_none(options, message):
    with pytest.raises(UserError, match=message):
        Mamba(MambaConfig(**options), d_model=8)


@pytest.mark.parametrize("name", ["deltanet", "mamba", "diagonal-toy"])
def test_weights_of_another_range_are_loaded_by_an_explicit_act_only(name):
    narrow = build(name, vocab_size=5, d_model=16, eigenvalues="[0,1]")
    wide = build(name, vocab_size=5, d_model=16, eigenvalues="[-1,1]")
    with pytest.raises(UserError, match=r"eigenvalues in \[0,1\], and this one has \[-1,1\]"):
        wide.load_state_dict(narrow.state_dict())
    wide.load_state_dict(dict(narrow.state_dict()))
    tokens = torch.arange(5)[None]
    assert torch.equal(wide(tokens)[0], extended_range(narrow)(tokens)[0])
    build(name, vocab_size=5, d_model=16, eigenvalues="[0,1]").load_state_dict(narrow.state_dict())
    assert set(narrow.state_dict()) == {n for n, _ in narrow.named_parameters()}, "the files stay as they are"
