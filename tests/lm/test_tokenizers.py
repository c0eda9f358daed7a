"""Tokenizers: bytes and files give back their text, and no text ends a document."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statetrack.errors import UserError
from statetrack.lm import tokenizers as ours
from statetrack.lm.tokenizers import (
    END,
    BytesTokenizer,
    FileTokenizer,
    bytes_json,
    check_same_tokenizer,
    load_tokenizer,
    tokenizer_sha256,
    train_bpe,
)

TEXTS = ["def f(x):\n    return x + 12345\n" * 20, "naïve café 日本 <|endoftext|> \t\n" * 20]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 300)


@given(text=texts)
def test_bytes_give_back_any_text(text):
    tokenizer = BytesTokenizer()
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.end_of_document]) == text
    assert tokenizer.encode_documents([text])[0].tolist() == tokenizer.encode(text)


@given(text=texts)
def test_the_file_of_bytes_is_read_by_the_library_with_the_same_tokens(text):
    library = FileTokenizer(bytes_json(), "bytes")
    assert (library.vocab_size, library.end_of_document) == (257, 256)
    assert library.encode(text) == BytesTokenizer().encode(text)


@given(text=texts)
def test_a_trained_bpe_gives_back_any_text_and_splits_digits(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text
    assert len(bpe.encode("12345")) == 5
    assert len(bpe.encode(TEXTS[0])) < 0.6 * len(TEXTS[0])


def test_training_twice_gives_the_same_file(bpe):
    assert train_bpe(TEXTS, 300).to_json() == bpe.to_json()
    assert train_bpe(TEXTS[:1], 300).to_json() != bpe.to_json()


def test_a_special_token_in_a_text_is_text(bpe):
    tokens = bpe.encode(f"a{END}b")
    assert bpe.end_of_document not in tokens
    assert bpe.decode(tokens) == f"a{END}b"


def test_an_end_of_document_token_that_is_a_word_is_left_out_of_texts():
    tokenizer = FileTokenizer(train_bpe(TEXTS, 300).to_json(), "words", end_of_document="x")
    assert tokenizer.encode("x") == []
    assert tokenizer.decode(tokenizer.encode("x + y")) == " + y"


def test_a_file_without_an_end_of_document_token_gets_one_that_lasts(tmp_path):
    content = json.loads(bytes_json())
    content["added_tokens"] = []
    tokenizer = FileTokenizer(json.dumps(content), "plain")
    assert (tokenizer.end_of_document, tokenizer.vocab_size) == (256, 257)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    assert load_tokenizer(tmp_path).end_of_document == 256


def test_an_unknown_end_of_document_token_is_refused():
    with pytest.raises(UserError, match="has no token '<end>'"):
        FileTokenizer(bytes_json(), "bytes", end_of_document="<end>")


def test_long_texts_are_cut_at_lines_and_lose_nothing(bpe, monkeypatch):
    monkeypatch.setattr(ours, "PIECE", 50)
    text = "one line\n" * 40 + "x" * 200
    pieces = list(ours._pieces(text))
    assert "".join(pieces) == text
    assert all(len(piece) <= 50 for piece in pieces)
    assert sum(piece.endswith("\n") for piece in pieces) == 8
    assert bpe.decode(bpe.encode(text)) == text


def test_loading_tells_bytes_from_other_files(tmp_path, bpe):
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(bytes_json()), indent=2))
    assert isinstance(load_tokenizer(tmp_path), BytesTokenizer)
    (tmp_path / "tokenizer.json").write_text(bpe.to_json())
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("café") == bpe.encode("café")


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not JSON"), ("{}", "is not a file of the `tokenizers` library")]
)
def test_what_is_no_tokenizer_is_refused(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read: No such file"):
        load_tokenizer(tmp_path)


def test_data_of_another_tokenizer_than_the_model_are_refused(tmp_path, bpe):
    for name, content in (("data", bytes_json()), ("same", bytes_json()), ("model", bpe.to_json())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(content)
    check_same_tokenizer(tmp_path / "data", tmp_path / "same")
    with pytest.raises(
        UserError, match=r"was tokenised by bytes \(257 tokens, .* trained with tokenizer.json"
    ):
        check_same_tokenizer(tmp_path / "data", tmp_path / "model")
    assert tokenizer_sha256(bpe) != tokenizer_sha256(BytesTokenizer())


def test_a_bpe_smaller_than_the_bytes_is_refused():
    with pytest.raises(UserError, match="--train-tokenizer is 256, expected at least 257"):
        train_bpe(TEXTS, 256)
