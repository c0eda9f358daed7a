"""A fixed training set: the same sequences for every seed, each once per epoch, in an order of its own."""

from dataclasses import replace

import pytest
import torch
from torch import Generator
from training_internals import batch_length, batch_width, step_width, training_batch

from statetrack.spec import RunSpec, TrainingConfig
from statetrack.tasks import IGNORE, task

SPEC = RunSpec(
    task("s5"), training=TrainingConfig(batch=4, train_lengths=(12, 12), train_samples=20)
).resolved()


def epoch(spec, number, seed=0):
    """The inputs of one epoch, in order, as tuples."""
    per_epoch = spec.training.train_samples // spec.training.batch
    spec = replace(spec, seed=seed)
    batches = [training_batch(spec, per_epoch * number + i, Generator()) for i in range(per_epoch)]
    return [tuple(row) for batch in batches for row in batch.inputs.tolist()]


def test_every_sequence_comes_once_per_epoch():
    first = epoch(SPEC, 0)
    assert len(first) == len(set(first)) == 20
    for number in (1, 2, 7):
        assert sorted(epoch(SPEC, number)) == sorted(first)


def test_every_epoch_and_every_seed_has_an_order_of_its_own():
    orders = {(seed, number): tuple(epoch(SPEC, number, seed)) for seed in range(4) for number in range(6)}
    assert len(set(orders.values())) == 24


def test_every_seed_has_the_same_sequences():
    assert {tuple(sorted(epoch(SPEC, 0, seed))) for seed in range(5)} == {tuple(sorted(epoch(SPEC, 0)))}


def test_the_set_does_not_depend_on_batch_and_generator():
    other = replace(SPEC, training=replace(SPEC.training, batch=5))
    assert sorted(epoch(other, 0)) == sorted(epoch(SPEC, 0))
    batches = [training_batch(SPEC, 3, Generator().manual_seed(i)).inputs for i in range(2)]
    assert torch.equal(*batches)


def test_set_and_order_are_pinned():
    """A run of an older version that is gone on with must find the same data."""
    drawn = SPEC.task.sample(20, (12, 12), Generator().manual_seed(20_241_102))
    for seed, number in ((0, 0), (0, 3), (2, 1)):
        order = torch.randperm(20, generator=Generator().manual_seed(seed * 1_000_003 + number))
        assert epoch(SPEC, number, seed) == [tuple(drawn.inputs[i].tolist()) for i in order]


def test_what_does_not_fill_a_batch_waits_for_the_next_epoch():
    """22 sequences in batches of 4: five batches, two sequences left out, another two the next time."""
    spec = replace(SPEC, training=replace(SPEC.training, train_samples=22))
    seen = [set(epoch(spec, number)) for number in range(4)]
    assert [len(found) for found in seen] == [20] * 4
    assert len(set.union(*seen)) == 22


def test_labels_stay_with_their_sequences():
    then = task("s5")._group.then
    for step in range(5):
        inputs, targets = training_batch(SPEC, step, Generator())
        for tokens, labels in zip(inputs.tolist(), targets.tolist(), strict=True):
            product = 0
            assert (tokens[0], labels[0]) == (120, 120)
            for token, label in zip(tokens[1:], labels[1:], strict=True):
                product = int(then[product, token])
                assert label == product


def test_mixed_lengths_are_padded_and_not_scored():
    spec = replace(SPEC, task=task("parity"), training=replace(SPEC.training, train_lengths=(3, 9)))
    for step in range(5):
        inputs, targets = training_batch(spec, step, Generator())
        assert inputs.shape == targets.shape == (4, 8)
        for tokens, labels in zip(inputs.tolist(), targets.tolist(), strict=True):
            bits = [token - 1 for token in tokens if token]
            assert [label for label in labels if label != IGNORE] == [1 + sum(bits) % 2]
            assert labels[len(bits) - 1] != IGNORE


def test_a_set_larger_than_what_is_drawn_at_once_is_whole():
    """Drawn in pieces of 4,096 that may end at different widths."""
    training = TrainingConfig(batch=4100, train_lengths=(3, 30), train_samples=4100)
    spec = replace(SPEC, task=task("mod-arithmetic-brackets"), training=training).resolved()
    inputs, targets = training_batch(spec, 0, Generator())
    assert len(inputs) == 4100
    assert ((targets != IGNORE).sum(1) == 1).all()
    assert inputs.dtype == targets.dtype == torch.int64
    data = Generator().manual_seed(20_241_102)
    drawn = [spec.task.sample(count, (3, 30), data).inputs for count in (4096, 4)]
    order = torch.randperm(4100, generator=Generator().manual_seed(0))
    assert torch.equal(inputs, torch.cat(drawn)[order])


FRESH = RunSpec(task("s5"), training=TrainingConfig(batch=2, train_lengths=(3, 40))).resolved()


@pytest.mark.parametrize(
    ("length", "width"), [(3, 13), (13, 13), (14, 22), (22, 22), (23, 31), (32, 40), (40, 40)]
)
def test_a_batch_is_padded_to_the_next_quarter_of_the_range(length, width):
    """Lengths 3 to 40 go through the widths 13, 22, 31 and 40."""
    assert batch_width(FRESH.training.train_lengths, length) == width


def test_a_step_has_a_length_of_its_own_that_no_other_step_decides():
    """A resumed run must find the lengths of the run it goes on with: pinned."""
    assert [batch_length(FRESH, step) for step in range(8)] == [25, 11, 14, 6, 29, 33, 12, 4]
    assert [batch_length(replace(FRESH, seed=1), step) for step in range(4)] == [9, 40, 10, 21]


def test_one_length_and_mixed_lengths_need_no_drawing():
    assert {step_width(SPEC, step) for step in range(9)} == {12}
    mixed = replace(FRESH, task=task("parity"))
    assert {step_width(mixed, step) for step in range(9)} == {40}
    fixed = replace(FRESH, training=replace(FRESH.training, train_samples=9))
    assert {step_width(fixed, step) for step in range(9)} == {40}
    assert {step_width(FRESH, step) for step in range(40)} == {13, 22, 31, 40}


def test_fresh_batches_follow_the_generator():
    same, again, other = (
        training_batch(FRESH, 0, Generator().manual_seed(seed)).inputs for seed in (1, 1, 2)
    )
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


def test_fresh_batches_of_a_task_with_one_answer_mix_lengths():
    spec = replace(FRESH, task=task("parity"), training=replace(FRESH.training, batch=200))
    inputs, targets = training_batch(spec, 0, Generator().manual_seed(0))
    assert inputs.shape == (200, 39)
    assert set(((inputs != 0).sum(1) + 1).tolist()) == set(range(3, 41))
    assert ((targets != IGNORE).sum(1) == 1).all()
