"""Parity in the paper's form."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from statetrack.tasks import IGNORE, Parity


def sample(batch, lengths, seed=0):
    return Parity().sample(batch, lengths, torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 1000))
def test_only_the_last_bit_is_labelled_and_its_label_is_the_parity(seed):
    for inputs, targets in zip(*(x.tolist() for x in sample(8, (3, 40), seed)), strict=True):
        bits = [token - 1 for token in inputs if token != 0]
        labels = [(i, y) for i, y in enumerate(targets) if y != IGNORE]
        assert labels == [(len(bits) - 1, 1 + sum(bits) % 2)]
        assert inputs[len(bits) :] == [0] * (len(inputs) - len(bits))


def test_worked_example_of_the_docstring():
    inputs, targets = torch.tensor([2, 1, 2, 2, 1]), torch.tensor([IGNORE] * 4 + [2])
    for seed in range(2000):  # draw until the example turns up
        batch = sample(1, (6, 6), seed)
        if torch.equal(batch.inputs[0], inputs):
            assert torch.equal(batch.targets[0], targets)
            return
    raise AssertionError("the example was never drawn")


def test_lengths_are_uniform_and_count_the_answer():
    lengths = (sample(8000, (3, 40)).inputs != 0).sum(1) + 1
    counts = torch.bincount(lengths, minlength=41)[3:]
    assert lengths.min() == 3
    assert lengths.max() == 40
    assert (counts / 8000 - 1 / 38).abs().max() < 0.01


def test_a_batch_is_padded_to_its_own_longest_sequence():
    assert sample(64, (5, 9)).inputs.shape[1] == 8
