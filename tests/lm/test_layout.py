"""Sequences of equal length from documents, and their cells."""

import numpy as np
import pytest

from statetrack.errors import UserError
from statetrack.lm.layout import bin_edges, layout_of

DOCUMENTS = np.array([0, 3, 10, 11, 25])  # of 3, 7, 1 and 14 tokens


def test_concatenated_sequences_predict_every_token_but_the_first_once():
    layout = layout_of(DOCUMENTS, bin_edges(8, 2))
    assert layout.starts.tolist() == [0, 8, 16]
    assert layout.tokens.sum() == 24


def test_cells_end_at_documents_and_at_bins():
    """The second sequence predicts tokens 9 to 16: one of document 1, one of 2, six of 3."""
    layout = layout_of(DOCUMENTS, bin_edges(8, 2))
    cells = layout.cells_of(1)
    assert layout.document[cells].tolist() == [1, 2, 3, 3]
    assert layout.bin[cells].tolist() == [0, 0, 0, 1]
    assert layout.position[cells].tolist() == [0, 1, 2, 4]
    assert layout.tokens[cells].tolist() == [1, 1, 2, 4]


def test_long_sequences_are_the_beginnings_of_documents_that_have_a_token_more():
    assert layout_of(DOCUMENTS, bin_edges(6, 1), "long").starts.tolist() == [3, 11]
    assert layout_of(DOCUMENTS, bin_edges(7, 1), "long").starts.tolist() == [11]


def test_fewer_sequences_are_spread_over_the_split():
    documents = np.array([0, 1001])
    assert layout_of(documents, bin_edges(10, 1), most=4).starts.tolist() == [0, 250, 500, 750]
    assert len(layout_of(documents, bin_edges(10, 1), most=500).starts) == 100


def test_bins_end_at_the_training_lengths():
    assert bin_edges(100, 4, contexts=(30, 50, 200)).tolist() == [0, 25, 30, 50, 75, 100]
    assert bin_edges(3, 10).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("rows", ["concatenated", "long"])
def test_a_split_that_is_too_short_is_refused_with_its_size(rows):
    with pytest.raises(UserError, match=r"no sequence of 30 tokens.* 25 tokens, its longest document 14"):
        layout_of(DOCUMENTS, bin_edges(30, 1), rows)


@pytest.mark.parametrize("piece", [1, 3, 5, 8])
def test_pieces_add_up_to_the_sums_of_cells(piece):
    layout = layout_of(DOCUMENTS, bin_edges(8, 2))
    losses, sums = np.random.default_rng(0).random((3, 8)), np.zeros(len(layout.tokens))
    for i in range(3):
        for position in range(0, 8, piece):
            layout.add(sums, i, position, losses[i, position : position + piece])
    for cell, (i, first, n) in enumerate(zip(layout.sequence, layout.position, layout.tokens, strict=True)):
        assert sums[cell] == pytest.approx(losses[i, first : first + n].sum())


def test_a_negative_number_of_sequences_is_refused():
    with pytest.raises(UserError, match="sequences is -1, expected 0"):
        layout_of(DOCUMENTS, bin_edges(8, 1), most=-1)
