"""Mixers that take packed sequences give each the outputs, gradients and states it has alone."""

import itertools

import pytest
import torch

from statetrack.errors import UserError
from statetrack.layers import DeltaNetConfig, build
from statetrack.layers.baselines import DiagonalToyConfig
from statetrack.layers.fusion import fused
from statetrack.layers.mixer import Packing

BOUNDS = [0, 5, 5, 6, 13, 13]
CASES = {
    "deltanet": ("deltanet", {"heads": 2}),
    "relu": ("deltanet", {"heads": 2, "qk_activation": "relu"}),
    "no convolution": ("deltanet-no-conv", {"heads": 2}),
    "gated": ("gated-deltanet", {"heads": 2}),
    "two factors": ("deltaproduct", {"heads": 2, "layers": 1}),
    "signed gate": ("gated-deltanet-signed", {"heads": 2}),
    "rotating": ("deltanet-rotating", {"heads": 2}),
    "kda": ("kda", {"heads": 2}),
    "mamba": ("mamba", {}),
    "mamba2": ("mamba2", {"heads": 2, "groups": 2, "d_state": 4}),
    "mamba3": ("mamba3", {"heads": 2, "groups": 2, "d_state": 4}),
    "gla": ("gla", {"heads": 2}),
    "hgrn2": ("hgrn2", {"heads": 2}),
    "mlstm": ("mlstm", {"heads": 2}),
    "signed mlstm": ("mlstm", {"heads": 2, "eigenvalues": "[-1,1]"}),
    "mlstm without normaliser": ("mlstm", {"heads": 2, "normaliser": False}),
    "slstm": ("slstm", {"heads": 2}),
    "slstm without convolution": ("slstm", {"heads": 2, "convolution": 0}),
    "attention": ("transformer", {"heads": 2}),
    "attention in a window": ("transformer", {"heads": 2, "window": 3, "qkv_bias": True}),
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


MODELS = CASES | {"hybrid": ("deltanet", {"attention_every": 2})}
LENGTHS = [5, 1, 2, 9, 3]  # a single token, and shorter than the convolution


def split(tokens, lengths=LENGTHS):
    return tokens.split(lengths, dim=1)


def packing_of(lengths):
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    return Packing(bounds, max(lengths))


@pytest.mark.parametrize("choice", [None, False, True], ids=["default", "unfused", "fused"])
@pytest.mark.parametrize("case", MODELS)
def test_decoding_goes_on_from_a_packed_prefill_as_from_each_sequence_alone(case, choice):
    torch.manual_seed(0)
    name, changes = MODELS[case]
    model = build(name, vocab_size=7, d_model=16, **{"layers": 2} | changes)
    prompts = torch.randint(7, (1, sum(LENGTHS)))
    following = torch.randint(7, (len(LENGTHS), 4))
    with fused(choice), torch.no_grad():
        logits, states = model(prompts, packing=packing_of(LENGTHS), packed_states=True)
        decoded = []
        for t in (slice(0, 1), slice(1, 2), slice(2, 4)):
            y, states = model(following[:, t], states)
            decoded.append(y)
        decoded = torch.cat(decoded, dim=1)
        for i, (prompt, found) in enumerate(zip(split(prompts), split(logits), strict=True)):
            expected, _ = model(torch.cat([prompt, following[i : i + 1]], dim=1))
            torch.testing.assert_close(found, expected[:, : -following.shape[1]], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(decoded[i], expected[0, -following.shape[1] :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choice", [None, False, True], ids=["default", "unfused", "fused"])
@pytest.mark.parametrize("case", MODELS)
def test_packed_sequences_go_on_from_the_states_of_packed_sequences(case, choice):
    """Prefill in pieces: the second row holds the rest of each sequence, of one of them nothing."""
    torch.manual_seed(0)
    name, changes = MODELS[case]
    model = build(name, vocab_size=7, d_model=16, **{"layers": 2} | changes)
    more = [2, 6, 0, 1, 4]
    first, second = (torch.randint(7, (1, sum(lengths))) for lengths in (LENGTHS, more))
    last = torch.randint(7, (len(LENGTHS), 1))
    with fused(choice), torch.no_grad():
        _, states = model(first, packing=packing_of(LENGTHS), packed_states=True)
        logits, states = model(second, states, packing=packing_of(more), packed_states=True)
        decoded, _ = model(last, states)
        pieces = zip(split(first), split(second, more), split(logits, more), strict=True)
        for i, (start, rest, found) in enumerate(pieces):
            expected, _ = model(torch.cat([start, rest, last[i : i + 1]], dim=1))
            torch.testing.assert_close(found, expected[:, LENGTHS[i] : -1], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(decoded[i], expected[0, -1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", MODELS)
def test_a_packing_gives_states_only_where_asked(case):
    name, changes = MODELS[case]
    model = build(name, vocab_size=7, d_model=16, **{"layers": 2} | changes)
    tokens = torch.zeros(1, sum(LENGTHS), dtype=torch.long)
    assert model.packs
    assert set(model(tokens, packing=packing_of(LENGTHS))[1]) == {None}
    with pytest.raises(UserError, match="packed_states is set without a packing"):
        model(tokens, packed_states=True)


def test_attention_refuses_states_of_another_number_of_sequences():
    model = build("transformer", vocab_size=7, d_model=16)
    _, states = model(torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(UserError, match="the state is of 2 sequences, expected one of 5"):
        model(torch.zeros(1, sum(LENGTHS), dtype=torch.long), states, packing=packing_of(LENGTHS))


def test_a_model_that_cannot_pack_names_the_mixers_that_cannot():
    mixers = DeltaNetConfig(), DiagonalToyConfig()
    model = build("deltanet", vocab_size=7, d_model=16, layers=2, mixers=mixers)
    assert not model.packs
    with pytest.raises(UserError, match="Model: DiagonalToy cannot take packed sequences"):
        model(torch.zeros(1, 4, dtype=torch.long), packing=packing_of([1, 3]))
