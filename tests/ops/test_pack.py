"""Packing: the kernels give what PyTorch gives."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops.pack import pack

IGNORE = -100


def padded(B, W, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(1, 9, (B, W), generator=generator)
    last = torch.randint(W, (B, 1), generator=generator)
    targets = torch.full((B, W), IGNORE).scatter(1, last, torch.randint(5, (B, 1), generator=generator))
    return inputs, targets, last[:, 0] + 1


@pytest.mark.parametrize(("B", "W"), [(1, 1), (3, 7), (9, 20), (6, 33)])
@pytest.mark.parametrize("room", [0.6, 1.0, 1.7])
def test_triton_matches_the_reference(B, W, room):
    inputs, targets, lengths = padded(B, W)
    rows = max(1, int(lengths.sum() * room))
    expected = pack(inputs, targets, IGNORE, rows, backend="reference")
    found = pack(inputs, targets, IGNORE, rows, backend="triton")
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_sequence_ends_with_its_first_target_and_without_one_after_a_step(dtype):
    inputs, targets, _ = padded(4, 7)
    targets[1], targets[2, 3:] = IGNORE, 2
    given = inputs, targets.to(dtype), IGNORE, 20
    for x, y in zip(pack(*given, backend="triton"), pack(*given, backend="reference"), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def test_every_row_belongs_to_a_sequence_no_longer_than_the_longest():
    inputs, targets, lengths = padded(9, 20)
    tokens, bounds, at, answers = pack(inputs, targets, IGNORE, 300)
    assert bounds[0] == 0
    assert bounds[-1] == 300
    assert torch.equal(bounds[:10].diff().long(), lengths)
    assert 0 <= bounds.diff().min() <= bounds.diff().max() <= 20
    assert torch.equal(at, lengths.cumsum(0) - 1)
    assert torch.equal(answers, targets[targets != IGNORE])
    assert (tokens[lengths.sum() :] == 0).all()


def test_wrong_shapes_are_explained():
    with pytest.raises(UserError, match="expected the same \\(batch, time\\)"):
        pack(torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, 5, dtype=torch.long), IGNORE, 9)
