"""Mixers that take packed sequences give each the outputs and gradients it has alone."""

import itertools

import pytest
import torch

from statetrack.errors import UserError
from statetrack.layers import build
from statetrack.layers.fusion import fused
from statetrack.layers.mixer import Packing

BOUNDS = [0, 5, 5, 6, 13, 13]
CASES = {
    "deltanet": ("deltanet", {"heads": 2}),
    "relu": ("deltanet", {"heads": 2, "qk_activation": "relu"}),
    "no convolution": ("deltanet-no-conv", {"heads": 2}),
    "gated": ("gated-deltanet", {"heads": 2}),
    "two factors": ("deltaproduct", {"heads": 2, "layers": 1}),
    "mamba": ("mamba", {}),
}


def results(net, x, run):
    """run(x), and the gradients of x and of every weight."""
    net.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("choice", [None, False, True], ids=["default", "unfused", "fused"])
@pytest.mark.parametrize("case", CASES)
def test_packed_sequences_come_out_as_if_each_were_alone(case, choice):
    torch.manual_seed(0)
    name, changes = CASES[case]
    net = build(name, vocab_size=5, d_model=16, **changes).blocks[0].mixer
    packing, x = Packing(torch.tensor(BOUNDS), 7), torch.randn(1, BOUNDS[-1], 16)

    def alone(x):
        return torch.cat([net(x[:, a:b])[0] for a, b in itertools.pairwise(BOUNDS) if a < b], dim=1)

    with fused(choice):
        packed = results(net, x, lambda x: net(x, packing=packing)[0])
    for actual, expected in zip(packed, results(net, x, alone), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["deltanet", "mamba"])
def test_a_packing_takes_no_state_and_gives_none(name):
    net = build(name, vocab_size=5, d_model=16).blocks[0].mixer
    packing, x = Packing(torch.tensor(BOUNDS), 7), torch.randn(1, BOUNDS[-1], 16)
    assert net.packs
    assert net(x, packing=packing)[1] is None
    with pytest.raises(UserError, match="no state can come with a packing"):
        net(x, net(x)[1], packing=packing)
