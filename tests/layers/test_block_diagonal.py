"""The fused paths of mLSTM and sLSTM are the same functions as their modules, called one by one."""

import pytest
import torch

from statetrack.layers import build
from statetrack.layers.block_diagonal import WIDEST, dense_products, may_be_dense
from statetrack.layers.fusion import fused
from statetrack.layers.headwise import HeadwiseLinear


def headwise(width, blocks, seed):
    torch.manual_seed(seed)
    linear = HeadwiseLinear(width, blocks)
    torch.nn.init.normal_(linear.weight)
    return linear.double()


@pytest.mark.parametrize(("width", "blocks"), [(8, 2), (16, 4), (12, 1)])
def test_dense_products_are_the_block_diagonal_maps_side_by_side(width, blocks):
    first, second, third = (headwise(width, blocks, seed) for seed in range(3))
    x, y = (torch.randn(2, 5, width, dtype=torch.float64, requires_grad=True) for _ in range(2))
    leaves = [x, y, *(m.weight for m in (first, second, third))]
    found = []
    for dense in (False, True):
        if dense:
            joined = dense_products((x, y), ((first, second), (third,)))
        else:
            joined = torch.cat([first(x), second(x), third(y)], dim=-1)
        found.append([joined, *torch.autograd.grad(joined.sin().sum(), leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_maps_are_dense_where_fusion_is_on_and_zeros_are_cheap():
    narrow, wide = HeadwiseLinear(8, 2), HeadwiseLinear(2 * WIDEST, 2)
    x = torch.zeros(1, 8)
    assert not may_be_dense(x, narrow)
    with fused(True):
        assert may_be_dense(x, narrow)
        assert not may_be_dense(torch.zeros(1, 2 * WIDEST), wide)
        narrow.register_forward_hook(lambda *_: None)
        assert not may_be_dense(x, narrow)


def outcome(model, tokens, choice):
    model.zero_grad()
    with fused(choice):
        logits, states = model(tokens)
        logits.sin().sum().backward()
    return [logits.detach(), *states[0].cell, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(("name", "heads"), [("mlstm", 1), ("mlstm", 2), ("slstm", 1), ("slstm", 2)])
def test_fused_layers_are_the_same_function_with_the_same_gradients(name, heads):
    torch.manual_seed(0)
    model = build(name, vocab_size=7, d_model=16, heads=heads, layers=2).double()
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    tokens = torch.randint(7, (3, 9))
    for a, b in zip(outcome(model, tokens, True), outcome(model, tokens, False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("name", "heads"), [("mlstm", 2), ("slstm", 2)])
def test_the_triton_kernels_make_the_same_layers(name, heads, monkeypatch):
    torch.manual_seed(0)
    model = build(name, vocab_size=7, d_model=16, heads=heads, layers=2)
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    tokens = torch.randint(7, (3, 9))
    expected = outcome(model.double(), tokens, False)
    monkeypatch.setenv("STATETRACK_BACKEND", "triton")
    for a, b in zip(outcome(model.float(), tokens, True), expected, strict=True):
        assert (a - b).norm() <= 3e-4 * b.norm() + 1e-5


@pytest.mark.parametrize("name", ["mlstm", "slstm"])
def test_under_autocast_fused_layers_round_as_linear_maps_do(name):
    torch.manual_seed(0)
    model = build(name, vocab_size=7, d_model=32, heads=2, layers=2)
    tokens = torch.randint(7, (3, 9))
    exact = outcome(model, tokens, False)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = outcome(model, tokens, True)
    for a, b in zip(rounded, exact, strict=True):
        assert a.dtype in (torch.float32, torch.bfloat16)
        assert (a.float() - b).norm() <= 0.05 * b.norm() + 1e-3


@pytest.mark.parametrize(
    ("name", "heads"), [("mlstm", 1), ("mlstm", 2), ("slstm", 1), ("slstm", 2), ("transformer", 2)]
)
def test_the_triton_kernels_take_what_autocast_gives_them(name, heads, monkeypatch):
    """In float16, which Triton's interpreter can compute with; results are wanted at `at`."""
    torch.manual_seed(0)
    model = build(name, vocab_size=7, d_model=32, heads=heads, layers=2)
    for p in model.parameters():
        p.data.add_(0.05 * torch.randn_like(p))
    tokens, at = torch.randint(7, (3, 9)), torch.tensor([[8], [5], [2]])
    found = []
    for backend, half in (("auto", False), ("triton", True)):
        monkeypatch.setenv("STATETRACK_BACKEND", backend)
        model.zero_grad()
        with fused(half), torch.autocast("cpu", torch.float16, enabled=half):
            logits, _ = model(tokens, at=at)
        (logits.float() * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
        found.append([logits.detach().float(), *(p.grad.clone() for p in model.parameters())])
    for expected, actual in zip(*found, strict=True):
        assert (actual - expected).norm() <= 0.03 * expected.norm() + 1e-6
