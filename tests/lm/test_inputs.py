"""Inputs: files of every kind give their documents, once, whatever the size of units."""

import gzip
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statetrack.errors import UserError
from statetrack.lm.documents import Bad, Document, loaded_units
from statetrack.lm.inputs import Reading, open_inputs, plan


def documents(inputs, reading=None, unit_bytes=1000, sets=None):
    opened = open_inputs([str(path) for path in inputs], reading or Reading(), unit_bytes, sets)
    found = [document for unit in opened.units() for document in unit.documents()]
    return found, opened


def texts(inputs, *arguments, **options):
    found = documents(inputs, *arguments, **options)[0]
    return [document.text for document in found if isinstance(document, Document)]


def bad(inputs, *arguments, **options):
    found, opened = documents(inputs, *arguments, **options)
    return sorted((x.name, x.reason) for x in [*opened.skipped, *found] if isinstance(x, Bad))


@given(
    lines=st.lists(st.text("ab\n\u2028é", min_size=1).filter(str.strip), max_size=8), size=st.integers(1, 60)
)
def test_every_json_line_is_in_one_unit(tmp_path_factory, lines, size):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_text("".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines))
    assert texts([path], unit_bytes=size) == lines


def test_a_last_line_without_a_line_break_and_blank_lines_are_read(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n\n  \n{"text": "b"}')
    assert texts([path]) == ["a", "b"]


def test_zipped_lines_are_read(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"body": "a"}\n{"body": "b"}\n'))
    assert texts([path], Reading(field="body")) == ["a", "b"]


def test_bad_lines_are_named_by_their_place_and_reason(tmp_path):
    path = tmp_path / "x.jsonl"
    lines = [b'{"text": "good"}', b"{", b'{"text": 5}', b"[]", b'{"text": " "}', b'{"text": "\xff"}']
    lines += [rb'{"text": "\ud800"}', b'{"text": "\0"}']
    path.write_bytes(b"\n".join(lines))
    assert texts([path]) == ["good"]
    reasons = dict(bad([path]))
    assert reasons["x.jsonl@17"] == "not JSON"
    assert sorted(reasons.values()) == [
        "binary",
        "empty",
        "no text in field 'text'",
        "no text in field 'text'",
        "not JSON",
        "not UTF-8",
        "not UTF-8",
    ]


def test_a_truncated_zip_gives_what_it_holds_and_is_named(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    rows = "".join(json.dumps({"text": os.urandom(40).hex()}) + "\n" for _ in range(50))
    path.write_bytes(gzip.compress(rows.encode())[:-700])
    found, _ = documents([path])
    assert isinstance(found[-1], Bad)
    assert len(found) > 2


def test_parquet_is_read_by_row_groups(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    rows = ["one", "two", None, "four", "five"]
    parquet.write_table(pa.table({"text": rows, "n": range(5)}), tmp_path / "x.parquet", row_group_size=2)
    assert texts([tmp_path / "x.parquet"], unit_bytes=1) == ["one", "two", "four", "five"]
    assert len(plan([tmp_path / "x.parquet"], Reading(), 1).units) == 3
    assert bad([tmp_path / "x.parquet"]) == [("x.parquet:1:0", "no text in field 'text'")]
    with pytest.raises(UserError, match="has no column 'body', only text, n"):
        texts([tmp_path / "x.parquet"], Reading(field="body"))
    (tmp_path / "y.parquet").write_bytes(b"no table")
    with pytest.raises(UserError, match="is not a readable parquet file"):
        texts([tmp_path / "y.parquet"])


@pytest.fixture
def project(tmp_path):
    files = {"a/one.py": "1\n", "a/notes.md": "n\n", "b/two.py": "2\n", "b/x.bin": "x", "top.py": "0\n"}
    files |= {
        "__pycache__/c.py": "c",
        ".git/d.py": "d",
        "b/big.py": "x" * 500,
        "b/rows.jsonl": '{"text": "r"}',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "b/binary.py").write_bytes(b"a\0b")
    (tmp_path / "b/latin.py").write_bytes(b"caf\xe9")
    (tmp_path / "a/link.py").symlink_to(tmp_path / "top.py")
    return tmp_path


def test_a_folder_is_read_in_the_order_of_names_by_suffix(project):
    small = Reading(max_file_bytes=100)
    assert texts([project], small) == ["n\n", "1\n", "r", "2\n", "0\n"]
    assert texts([project], small, unit_bytes=1) == ["n\n", "1\n", "r", "2\n", "0\n"]
    assert texts([project], Reading(suffixes=(".md",), max_file_bytes=100)) == ["n\n"]
    assert bad([project], small) == [
        ("a/link.py", "not a regular file"),
        ("b/big.py", "too large"),
        ("b/binary.py", "binary"),
        ("b/latin.py", "not UTF-8"),
    ]


def test_groups_are_the_first_folders_below_an_input(project):
    found, _ = documents([project], Reading(by_folder=True))
    groups = {d.name.partition("@")[0]: d.group for d in found if isinstance(d, Document)}
    assert groups["a/one.py"] == groups["a/notes.md"] == "a"
    assert groups["b/two.py"] == groups["b/rows.jsonl"] == "b"


def test_a_held_out_set_inside_an_input_is_in_no_other_split(project):
    found, _ = documents([project], Reading(max_file_bytes=100), sets={"heldout-a": [project / "a"]})
    splits = [(d.text, d.split) for d in found if isinstance(d, Document)]
    assert splits == [
        ("r", None), ("2\n", None), ("0\n", None), ("n\n", "heldout-a"), ("1\n", "heldout-a")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("separator", "expected"), [(None, ["a\nb\n\nc\n"]), ("", ["a\nb\n", "c\n"]), ("b", ["a\n", "\nc\n"])]
)
def test_a_text_file_is_one_document_or_cut_at_a_line(tmp_path, separator, expected):
    (tmp_path / "x.txt").write_text("a\nb\n\nc\n")
    assert texts([tmp_path / "x.txt"], Reading(separator=separator)) == expected


def test_without_inputs_the_standard_library_is_read_without_tests():
    found, opened = documents([], unit_bytes=10**9)
    names = {document.name for document in found}
    assert {"json/decoder.py", "os.py"} <= names
    assert all(name.endswith(".py") and "test" not in name.split("/")[:-1] for name in names)
    assert opened.bytes is not None
    assert opened.bytes > 5e6


def test_a_missing_input_says_what_was_expected(tmp_path):
    with pytest.raises(UserError, match="nothing does not exist, expected a text file"):
        texts([tmp_path / "nothing"])


@given(sizes=st.lists(st.integers(1, 9), max_size=9), unit=st.integers(1, 20))
def test_documents_in_memory_keep_their_order_in_units(sizes, unit):
    given_documents = [Document("x" * size, name=str(i)) for i, size in enumerate(sizes)]
    units = list(loaded_units(iter(given_documents), unit))
    assert [document for unit in units for document in unit.documents()] == given_documents
    assert all(unit_.size >= unit for unit_ in units[:-1])


def test_the_fingerprint_of_a_unit_changes_with_its_documents(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("one")
    before = plan([path], Reading(), 100).units[0].fingerprint
    assert plan([path], Reading(), 100).units[0].fingerprint == before
    path.write_text("two!")
    assert plan([path], Reading(), 100).units[0].fingerprint != before
    memory = [next(iter(loaded_units([Document(text)], 9))).fingerprint for text in ("a", "a", "b")]
    assert memory[0] == memory[1] != memory[2]
