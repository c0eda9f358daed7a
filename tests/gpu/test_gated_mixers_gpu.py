"""Mamba-3 and the signed mLSTM on a GPU, in float32 and under autocast, against float64 on the CPU."""

import copy

import pytest
import torch

from statetrack.layers import Mamba3Config, MLSTMConfig
from statetrack.layers.mixer import Packing

pytestmark = pytest.mark.gpu
CONFIGS = {
    "mamba3 unit-circle": Mamba3Config(d_state=32, groups=2),
    "mamba3 [-1,1]": Mamba3Config(d_state=32, eigenvalues="[-1,1]"),
    "mlstm [-1,1]": MLSTMConfig(eigenvalues="[-1,1]"),
    "mlstm [-1,1] without normaliser": MLSTMConfig(eigenvalues="[-1,1]", normaliser=False),
}


def results(mixer, x, **options):
    """Outputs, and the gradients of x and of every weight."""
    x = x.detach().clone().requires_grad_()
    y, _ = mixer(x, **options)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=torch.float64).view_as(y)
    gradients = torch.autograd.grad((y.double() * weights).sum(), [x, *mixer.parameters()])
    return [g.double().cpu() for g in (y, *gradients)]


def pairs(name, tolerance, autocast=False, **options):
    torch.manual_seed(0)
    exact = CONFIGS[name].build(64, 1).double()
    mixer = copy.deepcopy(exact).float().cuda()
    x = torch.randn(1 if options else 3, 200, 64, dtype=torch.float64)
    expected = results(exact, x, **options)
    moved = {key: value._replace(cu_seqlens=value.cu_seqlens.cuda()) for key, value in options.items()}
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        actual = results(mixer, x.float().cuda(), **moved)
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).norm() < tolerance * e.norm() + 1e-12


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_and_gradients_are_those_of_float64(name):
    pairs(name, 1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_autocast_changes_them_by_the_rounding_of_bfloat16(name):
    pairs(name, 0.1, autocast=True)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("mamba3")])
def test_packed_sequences_are_those_of_float64(name):
    pairs(name, 1e-4, packing=Packing(torch.tensor([0, 70, 70, 71, 200]), 129))


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_one_by_one_equal_one_pass(name):
    torch.manual_seed(0)
    mixer = CONFIGS[name].build(64, 1).cuda()
    x = torch.randn(2, 20, 64, device="cuda")
    whole, state, parts = mixer(x)[0], None, []
    for t in range(20):
        y, state = mixer(x[:, t : t + 1], state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-3, atol=1e-4)
