"""Token shards read as one stream, and damage to them is found."""

import itertools
import json

import numpy as np
import pytest
from corpora import VOCABULARY, small_shards
from hypothesis import given
from hypothesis import strategies as st

from statetrack.errors import UserError
from statetrack.lm.shards import write_shards
from statetrack.tasks.token_shards import TokenShards

END = 9
some_documents = st.lists(st.lists(st.integers(0, 8), max_size=5), min_size=1, max_size=12)


@given(documents=some_documents, per_shard=st.integers(1, 5), data=st.data())
def test_reading_across_shard_borders_gives_the_stream(tmp_path_factory, documents, per_shard, data):
    shards = write_shards(
        tmp_path_factory.mktemp("shards"), {"train": documents}, 10, END, documents_per_shard=per_shard
    )
    stream = [token for document in documents for token in [*document, END]]
    start = data.draw(st.integers(0, len(stream)))
    count = data.draw(st.integers(0, len(stream) - start))
    assert shards.tokens("train") == len(stream)
    assert shards.read("train", start, count).tolist() == stream[start : start + count]
    assert len(shards.splits["train"]) == -(-len(documents) // per_shard)


@given(documents=some_documents, per_shard=st.integers(1, 5))
def test_document_starts_cut_the_stream_into_the_documents(tmp_path_factory, documents, per_shard):
    shards = write_shards(
        tmp_path_factory.mktemp("shards"), {"train": documents}, 10, END, documents_per_shard=per_shard
    )
    bounds = shards.documents("train")
    cut = [shards.read("train", a, b - a).tolist() for a, b in itertools.pairwise(bounds)]
    assert cut == [[*document, END] for document in documents]


@pytest.mark.parametrize("vocabulary", [2**16, 2**16 + 1])
def test_the_largest_token_survives(tmp_path, vocabulary):
    shards = write_shards(tmp_path, {"train": [[vocabulary - 2]]}, vocabulary, vocabulary - 1)
    assert shards.read("train", 0, 2).tolist() == [vocabulary - 2, vocabulary - 1]


def test_whole_shards_verify(tmp_path):
    small_shards(tmp_path).verify()


def test_a_range_outside_the_stream_is_refused(tmp_path):
    shards = small_shards(tmp_path)
    with pytest.raises(UserError, match="expected a range inside 0 to"):
        shards.read("train", shards.tokens("train"), 1)
    with pytest.raises(UserError, match="no split 'test', only train, heldout"):
        shards.read("test", 0, 1)


@pytest.mark.parametrize("file", ["train-00001.bin", "train-00001.offsets.npy"])
def test_a_missing_file_is_named(tmp_path, file):
    small_shards(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(UserError, match=f"{file} cannot be read"):
        TokenShards.open(tmp_path)


def test_a_truncated_shard_is_found_when_opened(tmp_path):
    small_shards(tmp_path)
    path = tmp_path / "heldout-00000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"heldout-00000\.bin has \d+ bytes, expected"):
        TokenShards.open(tmp_path)


@pytest.mark.parametrize("file", ["train-00002.bin", "heldout-00001.offsets.npy"])
def test_a_flipped_bit_is_found_by_verify(tmp_path, file):
    small_shards(tmp_path)
    raw = bytearray((tmp_path / file).read_bytes())
    raw[-1] ^= 1
    (tmp_path / file).write_bytes(raw)
    with pytest.raises(UserError, match=f"{file} is damaged: its SHA-256"):
        TokenShards.open(tmp_path).verify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "statetrack token shards, version 9"}, "version 9', expected 'statetrack token shards"),
        ({"dtype": "int8"}, "dtype is missing or not as expected"),
        ({"vocab_size": "17"}, "vocab_size is missing or not as expected"),
        ({"splits": {"train": [{"file": "../train.bin"}]}}, "splits is missing or not as expected"),
        ({"splits": {"train": []}}, "splits is missing or not as expected"),
    ],
)
def test_an_index_of_another_format_is_refused(tmp_path, change, message):
    small_shards(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text()) | change
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        TokenShards.open(tmp_path)


def test_a_file_outside_the_folder_is_never_named(tmp_path):
    small_shards(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    index["splits"]["train"][0]["file"] = "../train-00000.bin"
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="splits is missing or not as expected"):
        TokenShards.open(tmp_path)


def test_a_folder_without_an_index_says_how_to_make_one(tmp_path):
    with pytest.raises(UserError, match="Expected a folder that `statetrack lm tokenize"):
        TokenShards.open(tmp_path)


def test_tokens_outside_the_vocabulary_are_not_written(tmp_path):
    with pytest.raises(UserError, match="expected from 0 to 9"):
        write_shards(tmp_path, {"train": [[10]]}, 10, 9)
    assert not (tmp_path / "index.json").exists()


def test_tokens_keep_their_type_in_memory(tmp_path):
    assert small_shards(tmp_path).read("train", 3, 4).dtype == np.uint16
    assert small_shards(tmp_path).vocab_size == VOCABULARY
