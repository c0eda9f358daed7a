"""Batches with padding: every row has the outputs, gradients and states that it has alone."""

import inspect

import pytest
import torch

from statetrack.errors import UserError
from statetrack.layers import Model, ModelConfig, build
from statetrack.layers.mixer import Mixer, Packing
from statetrack.layers.presets import PRESETS

SMALL = {
    "mamba2": {"heads": 2, "d_state": 4},
    "mamba3": {"heads": 2, "d_state": 4},
    "dense-transition": {"size": 3},
    "diagonal-toy": {},
    "mamba": {},
}
OPTIONS = {name: SMALL.get(name, {"heads": 2}) for name in PRESETS}
LENGTHS, T = (3, 7, 1, 5), 7


def mixer(name: str) -> Mixer:
    torch.manual_seed(0)
    return build(name, vocab_size=5, d_model=8, **OPTIONS[name]).blocks[0].mixer


def model(name: str) -> Model:
    torch.manual_seed(0)
    if name == "hybrid":
        return build("deltanet", vocab_size=6, d_model=8, layers=2, heads=2, attention_every=2)
    return build(name, vocab_size=6, d_model=8, layers=2, **OPTIONS[name])


def padded(rows: list[torch.Tensor], side: str, filler: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (n, ...) as a batch (B, T, ...), and its mask; what stands at padding is of no account."""
    x, mask = (
        torch.full((len(rows), T, *rows[0].shape[1:]), filler).to(rows[0].dtype),
        torch.zeros(len(rows), T),
    )
    for i, row in enumerate(rows):
        at = slice(T - len(row), None) if side == "left" else slice(0, len(row))
        x[i, at], mask[i, at] = row, 1
    return x, mask


@pytest.mark.parametrize("name", PRESETS)
def test_every_mixer_takes_a_mask(name):
    assert "attention_mask" in inspect.signature(mixer(name).forward).parameters


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", PRESETS)
def test_padding_changes_no_row_and_decoding_goes_on_from_it(name, side):
    net = mixer(name)
    rows = [torch.randn(n, 8) for n in LENGTHS]
    x, mask = padded(rows, side, 9.0)
    x.requires_grad_()
    y, state = net(x, attention_mask=mask)
    next_y, _ = net(torch.ones(len(rows), 1, 8), state)
    assert torch.equal(y[mask == 0], torch.zeros(12, 8))
    for i, row in enumerate(rows):
        alone, last = net(row[None])
        torch.testing.assert_close(y[i, mask[i] == 1], alone[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(next_y[i], net(torch.ones(1, 1, 8), last)[0][0], rtol=1e-4, atol=1e-5)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(dx[mask == 0], torch.zeros(12, 8))
    assert dx[mask == 1].abs().sum() > 0


@pytest.mark.parametrize("name", PRESETS)
def test_a_padded_piece_goes_on_from_a_padded_piece(name):
    """Both pieces are padded, on either side, and the state in between is that of a batch."""
    net = mixer(name)
    first, second = ([torch.randn(n, 8) for n in lengths] for lengths in (LENGTHS, (4, 2, 7, 6)))
    x, mask = padded(first, "left", 9.0)
    _, state = net(x, attention_mask=mask)
    x, mask = padded(second, "right", 9.0)
    y, _ = net(x, state, attention_mask=mask)
    for i, (start, rest) in enumerate(zip(first, second, strict=True)):
        alone, _ = net(torch.cat([start, rest])[None])
        torch.testing.assert_close(y[i, mask[i] == 1], alone[0, len(start) :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in PRESETS if mixer(name).packs])
def test_a_batch_of_padding_alone_gives_zeros_and_leaves_the_state_as_it_is(name):
    net = mixer(name)
    _, state = net(torch.randn(2, 3, 8))
    mask, x = torch.zeros(2, 4), torch.randn(2, 4, 8)
    y, after = net(x, state, attention_mask=mask)
    assert torch.equal(y, torch.zeros(2, 4, 8))
    following = torch.randn(2, 1, 8)
    torch.testing.assert_close(net(following, after)[0], net(following, state)[0])
    y, empty = net(x, attention_mask=mask)
    assert torch.equal(y, torch.zeros(2, 4, 8))
    torch.testing.assert_close(net(following, empty)[0], net(following)[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [*PRESETS, "hybrid"])
def test_a_model_gives_every_row_the_logits_and_the_loss_that_it_has_alone(name, side):
    net = model(name)
    rows = [torch.randint(6, (n,)) for n in LENGTHS]
    tokens, mask = padded(rows, side, 0.0)
    logits, states = net(tokens, attention_mask=mask)
    assert torch.equal(logits[mask == 0], torch.zeros(12, 6))
    following, _ = net(torch.ones(len(rows), 1, dtype=torch.long), states)
    total, targets = 0.0, tokens.flip(1)
    for i, row in enumerate(rows):
        alone, _ = net(torch.cat([row, torch.ones(1, dtype=torch.long)])[None])
        torch.testing.assert_close(logits[i, mask[i] == 1], alone[0, :-1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(following[i], alone[0, -1:], rtol=1e-4, atol=1e-5)
        total = total + net(row[None], targets=targets[i, mask[i] == 1][None])[0]
    torch.testing.assert_close(net(tokens, attention_mask=mask, targets=targets)[0], total)
    hidden, _ = net(tokens, attention_mask=mask, read_out=False)
    torch.testing.assert_close(net.head(hidden), logits)
    at = torch.tensor([[6, 0], [3, 5], [6, 6], [4, 1]])
    torch.testing.assert_close(
        net(tokens, attention_mask=mask, at=at)[0], logits.gather(1, at[..., None].expand(-1, -1, 6))
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_a_mask_without_padding_changes_nothing(dtype):
    net, tokens = model("deltanet"), torch.randint(6, (2, 5))
    assert torch.equal(net(tokens, attention_mask=torch.ones(2, 5, dtype=dtype))[0], net(tokens)[0])


def test_masks_that_do_not_fit_are_refused():
    net, x = mixer("deltanet"), torch.zeros(2, 3, 8)
    with pytest.raises(UserError, match=r"attention_mask has shape \(2, 4\), expected \(batch, time\)"):
        net(x, attention_mask=torch.ones(2, 4))
    with pytest.raises(UserError, match="either attention_mask or packing"):
        net(x[:1], attention_mask=torch.ones(1, 3), packing=Packing(torch.tensor([0, 3]), 3))
    whole, tokens = model("deltanet"), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(UserError, match=r"Model: attention_mask has shape \(2, 4\)"):
        whole(tokens, attention_mask=torch.ones(2, 4))
    with pytest.raises(UserError, match="either attention_mask or packing"):
        whole(tokens[:1], attention_mask=torch.ones(1, 3), packing=Packing(torch.tensor([0, 3]), 3))
    with pytest.raises(UserError, match="row 1 of attention_mask is all padding"):
        whole(tokens, attention_mask=torch.tensor([[1, 1, 1], [0, 0, 0]]))


def test_a_mixer_of_another_package_without_a_mask_is_padded_by_the_model():
    """The model asks nothing of its mixers but `forward(x, state)`."""
    from dataclasses import dataclass

    from torch import nn

    class Sum(nn.Module):
        def forward(self, x, state=None):
            y = x.cumsum(1) + (0 if state is None else state)
            return y, y[:, -1:]

    @dataclass(frozen=True)
    class SumConfig:
        def build(self, d_model, layers):
            return Sum()

    net = Model(ModelConfig(SumConfig(), d_model=8), 6, 6)
    tokens, mask = torch.randint(6, (2, 4)), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    torch.testing.assert_close(net(tokens, attention_mask=mask)[0][:1, 2:], net(tokens[:1, 2:])[0])
