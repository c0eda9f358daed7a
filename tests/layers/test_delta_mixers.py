"""KDA and DeltaNet with rotations: their equations written out, and options that do not fit together."""

import math

import pytest
import torch
import torch.nn.functional as F

from statetrack.errors import UserError
from statetrack.layers import DeltaNetConfig, KDAConfig, build


def causal(x, convolution):
    """The depthwise convolution of a sequence (1, T, C) over its last values, then SiLU."""
    taps = convolution.weight[:, 0]
    padded = F.pad(x, (0, 0, taps.shape[1] - 1, 0))
    return F.silu((padded.unfold(1, taps.shape[1], 1) * taps).sum(-1))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("eigenvalues", ["[0,1]", "[-1,1]"])
@torch.no_grad()
def test_kda_follows_the_equations_of_its_paper(eigenvalues, signed):
    torch.manual_seed(0)
    config = KDAConfig(heads=1, eigenvalues=eigenvalues, value_dim=5, gate_rank=3, signed_gate=signed)
    mixer = config.build(6, 1).double()
    for p in mixer.parameters():
        p.add_(0.3 * torch.randn_like(p))
    x = torch.randn(1, 20, 6).double()
    y, _ = mixer(x)
    q, k, v = (
        causal(linear(x), c)[0]
        for linear, c in zip((mixer.to_q, mixer.to_k, mixer.to_v), mixer.convolutions, strict=True)
    )
    steps = F.softplus(mixer.to_decay(x)[0] + mixer.decay_bias)
    a = torch.exp(-mixer.A_log.exp() * steps)
    a = 2 * a - 1 if signed and eigenvalues == "[-1,1]" else a
    beta = torch.sigmoid(mixer.to_beta(x))[0, :, 0] * (1 if eigenvalues == "[0,1]" else 2)
    S = torch.zeros(6, 5).double()
    for t in range(20):
        key, query = (z / (z.square().sum() + 1e-6).sqrt() for z in (k[t], q[t]))
        S = a[t, :, None] * S
        S = S - beta[t] * torch.outer(key, key @ S) + beta[t] * torch.outer(key, v[t])
        o = S.T @ query / math.sqrt(6)
        o = o / (o.square().mean() + 1e-5).sqrt() * mixer.norm.weight
        expected = mixer.to_out(o * torch.sigmoid(mixer.output_gate(x)[0, t]))
        torch.testing.assert_close(y[0, t], expected)


@torch.no_grad()
def test_a_rotating_deltanet_turns_its_state_before_it_reflects():
    torch.manual_seed(0)
    config = DeltaNetConfig(heads=1, eigenvalues="unit-circle", convolution=0, qk_activation="identity")
    mixer = config.build(4, 1).double()
    for p in mixer.parameters():
        p.add_(torch.randn_like(p))
    x = torch.randn(1, 20, 4).double()
    y, state = mixer(x)
    angle = math.pi * torch.tanh(mixer.to_angle(x))[0]
    S = torch.zeros(4, 4).double()
    for t in range(20):
        first, second = S[:2].clone(), S[2:].clone()
        cos, sin = angle[t].cos()[:, None], angle[t].sin()[:, None]
        S = torch.cat([cos * first - sin * second, sin * first + cos * second])
        key, query = (
            z / (z.square().sum() + 1e-6).sqrt() for z in (mixer.to_k(x)[0, t], mixer.to_q(x)[0, t])
        )
        error = F.silu(mixer.to_v(x)[0, t]) - S.T @ key
        S = S + 2 * torch.sigmoid(mixer.to_beta(x))[0, t] * torch.outer(key, error)
        o = S.T @ query / 2
        o = o / (o.square().mean() + 1e-5).sqrt() * mixer.norm.weight
        torch.testing.assert_close(y[0, t], mixer.to_out(o))
    torch.testing.assert_close(state.S[0, 0], S)


def test_the_range_is_shown():
    shown = {name: repr(build(name, vocab_size=3).blocks[0].mixer) for name in ("kda", "deltanet-rotating")}
    assert "eigenvalues=[-1,1], heads=4, K=32, V=32" in shown["kda"]
    assert "eigenvalues=unit-circle" in shown["deltanet-rotating"]
    assert "gated=signed" in repr(build("gated-deltanet-signed", vocab_size=3))
    assert "gated=True" in repr(build("gated-deltanet-signed", vocab_size=3, eigenvalues="[0,1]"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DeltaNetConfig(signed_gate=True), "signed_gate is True without a gate"),
        (DeltaNetConfig(eigenvalues="unit-circle", heads=8), "does not divide 1"),
        (KDAConfig(eigenvalues="unit-circle"), "eigenvalues is 'unit-circle'"),
        (KDAConfig(gate_rank=0), "gate_rank is 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        config.build(8, 1)
