"""The fused path of the layers, as a GPU takes it: here it runs in Triton's interpreter."""

import pytest
import torch

from statetrack.layers import build
from statetrack.layers.fusion import fused, joined_product
from statetrack.ops.cross_entropy import cross_entropy

CASES = {
    "no convolution": ("deltanet-no-conv", {}),
    "convolution": ("deltanet", {}),
    "convolution, relu": ("deltanet", {"qk_activation": "relu"}),
    "gates": ("gated-deltanet", {}),
    "gates, no convolution": ("gated-deltanet", {"convolution": 0}),
    "two factors": ("deltaproduct", {"convolution": 0, "layers": 2}),
    "no convolution, silu": ("deltanet-no-conv", {"qk_activation": "silu"}),
    "convolution, identity": ("deltanet", {"qk_activation": "identity"}),
    "no residual": ("deltanet-no-conv", {"residual": False}),
    "layer norm": ("deltanet-no-conv", {"norm": "layer"}),
    "attention": ("transformer", {"layers": 2}),
    "mamba": ("mamba", {"layers": 2}),
    "padded products": ("deltanet-no-conv", {"mlp_ratio": 1.3}),  # an MLP 31 wide
}


def small(name, changes):
    torch.manual_seed(0)
    heads = {} if name == "mamba" else {"heads": 2}
    return build(name, vocab_size=11, d_model=24, **({"mlp_ratio": 2.0} | heads | changes))


def results(name, changes):
    """Logits, and the gradient of every weight."""
    net = small(name, changes)
    tokens, targets = torch.randint(11, (2, 2, 9))
    targets[0, :3] = -100
    logits, _ = net(tokens)
    cross_entropy(logits, targets).backward()
    return {"logits": logits.detach()} | {key: p.grad for key, p in net.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_the_fused_path_computes_what_the_plain_path_computes(case, monkeypatch):
    expected = results(*CASES[case])
    if case != "mamba":  # a scan takes the interpreter a minute
        monkeypatch.setenv("STATETRACK_BACKEND", "triton")
    with fused(True):
        actual = results(*CASES[case])
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            actual[key], value, rtol=1e-3, atol=1e-5, msg=lambda text, key=key: key + text
        )


@pytest.mark.parametrize("case", ["convolution", "gates", "no convolution", "mamba"])
@pytest.mark.parametrize("first", [2, 5])
def test_the_fused_path_continues_from_a_state(case, first):
    net, tokens = small(*CASES[case]), torch.randint(11, (2, 9))
    with torch.no_grad(), fused(True):
        whole, _ = net(tokens)
        begun, state = net(tokens[:, :first])
        rest, _ = net(tokens[:, first:], state)
    torch.testing.assert_close(torch.cat([begun, rest], dim=1), whole, rtol=1e-4, atol=1e-5)


def test_the_head_in_half_precision_is_padded_to_aligned_rows():
    net = build("deltanet", vocab_size=21, d_model=32).half()
    x = torch.randn(2, 5, 32).half()
    plain = net._read_out(x)
    with fused(True):
        padded = net._read_out(x)
    assert (padded.shape, padded.stride(1)) == (plain.shape, 24)
    torch.testing.assert_close(padded, plain)


def test_joined_products_are_the_products_and_rows_stay_aligned():
    linears = [torch.nn.Linear(16, n, bias=False) for n in (5, 3, 9)]
    x = torch.randn(4, 16)
    y = joined_product(x, linears)
    assert y.shape == (4, 24)
    torch.testing.assert_close(y[:, :17], torch.cat([linear(x) for linear in linears], dim=-1))
