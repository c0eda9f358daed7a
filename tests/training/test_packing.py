"""Packed training batches hold the sequences of the padded ones."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Generator

from statetrack.layers import model_config
from statetrack.tasks import IGNORE, answer_positions, task
from statetrack.training.packing import Packer
from statetrack.training.state import build_model

LAST = ["parity", "mod-arithmetic", "mod-arithmetic-brackets"]


@pytest.fixture
def packed_spec(small_spec, change):
    def make(name, **changes):
        spec = replace(small_spec, task=task(name))
        return change(spec, train_lengths=(5, 21), batch=64, **changes)

    return make


@pytest.mark.parametrize("name", LAST)
def test_every_sequence_up_to_its_answer_is_there_and_nothing_between(name, packed_spec):
    spec = packed_spec(name)
    batch = spec.task.sample(64, (5, 21), Generator().manual_seed(1))
    packed = Packer(spec)(batch)
    cu, longest = packed.packing.cu_seqlens.long(), packed.packing.max_seqlen
    lengths = answer_positions(batch.targets)[:, 0] + 1
    assert torch.equal(cu[:65].diff(), lengths)
    assert cu[-1] == packed.tokens.shape[1] < batch.inputs.numel()
    assert 0 <= cu.diff().min() <= cu.diff().max() <= longest
    for i, (start, end) in enumerate(itertools.pairwise(cu[:65])):
        assert torch.equal(packed.tokens[0, start:end], batch.inputs[i, : lengths[i]])
        assert packed.at[0, i] == end - 1
    assert torch.equal(packed.targets[0], batch.targets[batch.targets != IGNORE])


def test_sequences_beyond_the_row_do_not_count(packed_spec):
    spec = packed_spec("parity")
    packer = Packer(spec)
    longest = spec.task.fill(torch.full((64,), 21), Generator().manual_seed(1))
    packed = packer(longest)
    inside = packer.rows // 20
    assert inside < 64
    assert (packed.targets[0, :inside] != IGNORE).all()
    assert (packed.targets[0, inside:] == IGNORE).all()
    assert packed.at.max() < packer.rows


@pytest.mark.parametrize(("batch", "rows"), [(16, 320), (64, 1024), (144, 2176), (256, 3584)])
def test_a_row_is_six_deviations_longer_than_the_mean_batch(batch, rows, packed_spec):
    """Here 4 to 20 tokens up to the answer: mean 12, standard deviation sqrt(24). 256 sequences take 3072 +
    6 sqrt(256 * 24) = 3542, and the next multiple of 128 is 3584; 16 take as much as padded ones."""
    spec = packed_spec("parity")
    assert Packer(replace(spec, training=replace(spec.training, batch=batch))).rows == rows


@pytest.mark.parametrize("model", ["deltanet", "mamba", "deltanet-no-conv", "deltaproduct"])
def test_a_model_answers_packed_sequences_as_padded_ones(model, packed_spec):
    spec = replace(packed_spec("mod-arithmetic"), model=model_config(model, d_model=16, layers=2))
    network = build_model(spec)
    batch = spec.task.sample(64, (5, 21), Generator().manual_seed(1))
    packed = Packer(spec)(batch)
    padded, _ = network(batch.inputs, at=answer_positions(batch.targets))
    found, states = network(packed.tokens, at=packed.at, packing=packed.packing)
    torch.testing.assert_close(found[0], padded[:, 0], rtol=1e-4, atol=1e-5)
    assert states == [None, None]
    parameters = list(network.parameters())
    weight = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weight).sum(), parameters)
    expected = torch.autograd.grad((padded[:, 0] * weight[0]).sum(), parameters)
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-5)
