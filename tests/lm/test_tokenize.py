"""Tokenising: the same bytes however it was done, whole documents, nothing lost."""

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statetrack.errors import UserError
from statetrack.lm.documents import Document
from statetrack.lm.inputs import Reading, open_inputs
from statetrack.lm.tokenize import TokenizeOptions, tokenize, tokenize_units
from statetrack.lm.tokenize_workers import do_unit, place, split_of
from statetrack.lm.tokenizers import load_tokenizer
from statetrack.tasks.token_shards import TokenShards

QUIET = {"say": lambda text: None}
WORDS = ("state", "tracking", "needs", "negative", "eigenvalues", "12", "é")


def some_documents(count, seed=0):
    chance = random.Random(seed)
    return [Document(" ".join(chance.choices(WORDS, k=chance.randint(1, 9)))) for _ in range(count)]


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def texts_of(folder, split):
    shards, tokenizer = TokenShards.open(folder), load_tokenizer(folder)
    bounds = shards.documents(split)
    ids = [shards.read(split, a, b - a) for a, b in zip(bounds, bounds[1:])]  # noqa: RUF007
    assert all(document[-1] == shards.end_of_document for document in ids)
    return [tokenizer.decode(document[:-1].tolist()) for document in ids]


@settings(max_examples=15)
@given(
    parts=st.lists(
        st.tuples(
            st.text(min_size=1).filter(str.strip), st.sampled_from([None, "train", "heldout", "held-b"])
        ),
        min_size=1,
        max_size=12,
    ),
    shard_bytes=st.integers(1, 30),
)
def test_every_split_holds_its_documents_in_order(tmp_path_factory, parts, shard_bytes):
    folder = tmp_path_factory.mktemp("data")
    documents = [Document(text, split) for text, split in parts]
    report = tokenize(documents, folder, TokenizeOptions(heldout=0.3, shard_bytes=shard_bytes), **QUIET)
    expected: dict[str, list[str]] = {}
    for document in documents:
        if any("\ud800" <= c <= "\udfff" for c in document.text):
            continue
        expected.setdefault(split_of(document, 0.3), []).append(document.text)
    assert {split: texts_of(folder, split) for split in report.splits} == expected
    for split, texts in expected.items():
        assert report.splits[split]["bytes"] == sum(len(text.encode()) for text in texts)
    TokenShards.open(folder).verify()


def test_the_split_depends_on_the_content_or_the_group_alone():
    texts = [f"document {i}" for i in range(2000)]
    held = [text for text in texts if split_of(Document(text), 0.1) == "heldout"]
    assert 150 < len(held) < 250
    assert all(split_of(Document(text, name="elsewhere"), 0.1) == "heldout" for text in held)
    assert len({split_of(Document(text, group="project"), 0.5) for text in texts}) == 1
    assert held == [text for text in texts if place(text) < 0.1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A BPE corpus of several units, made in one go by one process."""
    root = tmp_path_factory.mktemp("whole")
    lines = [json.dumps({"text": document.text}) for document in some_documents(120)]
    (root / "rows.jsonl").write_text("\n".join([*lines[:60], "{bad", *lines[60:]]))
    make(root, root / "out")
    return root


def make(root, out, workers=1, **options):
    options = TokenizeOptions(**({"train_tokenizer": 300, "heldout": 0.1, "shard_bytes": 700} | options))
    opened = open_inputs([str(root / "rows.jsonl")], Reading(), options.shard_bytes)
    return tokenize_units(opened.units, out, options, workers=workers, **QUIET)


def test_several_units_become_several_shards(whole):
    shards = TokenShards.open(whole / "out")
    assert len(shards.splits["train"]) > 5
    assert shards.vocab_size <= 300
    report = json.loads((whole / "out/report.json").read_text())
    assert report["bad"] == {"not JSON": 1}
    assert json.loads((whole / "out/bad_documents.jsonl").read_text())["reason"] == "not JSON"
    assert sum(split["documents"] for split in report["splits"].values()) == 120


def test_any_interruption_ends_with_the_same_bytes(whole, tmp_path):
    """Killed before each unit is recorded: its shards may be there, its record is not."""

    class Killed(BaseException):
        pass

    def dying_after(units):
        def progress(so_far):
            nonlocal units
            units -= 1
            if units == 0:
                raise Killed

        return progress

    options = TokenizeOptions(train_tokenizer=300, heldout=0.1, shard_bytes=700)
    opened = open_inputs([str(whole / "rows.jsonl")], Reading(), options.shard_bytes)
    for units in (1, 2, 5):
        with pytest.raises(Killed):
            tokenize_units(opened.units, tmp_path, options, progress=dying_after(units), **QUIET)
        assert not (tmp_path / "index.json").exists()
    done = sorted((tmp_path / "units").iterdir())
    done[-1].unlink()  # as if killed between the shards and the record
    (tmp_path / ".train-00000.bin.x.partial").write_bytes(b"half")
    before = (tmp_path / "train-00000.bin").stat().st_mtime_ns
    tokenize_units(opened.units, tmp_path, options, **QUIET)
    assert content(tmp_path) == content(whole / "out")
    assert (tmp_path / "train-00000.bin").stat().st_mtime_ns == before  # not done again


@pytest.mark.slow
def test_two_workers_write_the_same_bytes_also_after_a_kill(whole, tmp_path):
    """The command by two processes, killed by SIGKILL once some units are done, then again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "if __name__ == '__main__':\n"
        "    from test_tokenize import make\n"
        f"    make(Path({str(whole)!r}), Path({str(tmp_path / 'out')!r}), workers=2)\n"
    )
    first = subprocess.Popen([sys.executable, str(script)])
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/units/*.json")) and first.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.kill()
    first.wait()
    subprocess.run([sys.executable, str(script)], check=True)
    assert content(tmp_path / "out") == content(whole / "out")


def test_a_finished_folder_says_so_and_stays(whole):
    said, before = [], content(whole / "out")
    options = TokenizeOptions(train_tokenizer=300, heldout=0.1, shard_bytes=700)
    opened = open_inputs([str(whole / "rows.jsonl")], Reading(), options.shard_bytes)
    report = tokenize_units(opened.units, whole / "out", options, say=said.append)
    assert said == [f"{whole / 'out'} is finished already."]
    assert report.splits == json.loads(before["report.json"])["splits"]
    assert content(whole / "out") == before


def test_other_options_in_the_same_folder_are_refused(whole):
    with pytest.raises(UserError, match=r"begun with other options \(heldout 0.1, here 0.2\)"):
        make(whole, whole / "out", heldout=0.2)


def test_inputs_that_changed_before_a_run_goes_on_are_refused(whole, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes((whole / "rows.jsonl").read_bytes())
    make(tmp_path, tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "begun")
    (tmp_path / "begun/index.json").unlink()
    options = TokenizeOptions(train_tokenizer=300, heldout=0.1, shard_bytes=700)
    unit = next(iter(open_inputs([str(tmp_path / "rows.jsonl")], Reading(), 700).units()))
    do_unit(tmp_path / "begun", 0, unit, 0.1)
    os.utime(tmp_path / "rows.jsonl", ns=(1, 1))
    opened = open_inputs([str(tmp_path / "rows.jsonl")], Reading(), options.shard_bytes)
    with pytest.raises(UserError, match="the inputs have changed since this was begun"):
        tokenize_units(opened.units, tmp_path / "begun", options, **QUIET)


def test_a_tokenizer_is_trained_on_training_documents_alone(tmp_path):
    documents = [Document("aaaa bbbb " * 9, "train"), Document("zzqq zzqq " * 9, "heldout")]
    tokenize(documents, tmp_path, TokenizeOptions(train_tokenizer=300), **QUIET)
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer.encode("aaaa bbbb")) == 2
    assert len(tokenizer.encode("zzqq")) == 4


def test_a_given_tokenizer_is_copied_and_recorded(whole, tmp_path):
    options = TokenizeOptions(tokenizer=whole / "out/tokenizer.json")
    tokenize(some_documents(5), tmp_path, options, **QUIET)
    assert (tmp_path / "tokenizer.json").read_bytes() == (whole / "out/tokenizer.json").read_bytes()
    assert TokenShards.open(tmp_path).tokenizer == TokenShards.open(whole / "out").tokenizer


def test_a_full_disk_is_said_and_the_same_command_goes_on(tmp_path):
    """The limit on the size of a file stands for the disk: writing fails in the middle of a shard."""
    documents = [*(Document("x" * 5000) for _ in range(3)), Document("y" * 50_000), Document("z" * 5000)]
    options = TokenizeOptions(shard_bytes=5000, heldout=0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large while writing .*\. Finished parts are kept"):
            tokenize(documents, tmp_path / "cut", options, **QUIET)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    names = {path.name for path in (tmp_path / "cut").iterdir()}
    assert "train-00002.bin" in names
    assert not any(name.startswith("train-00003") or name.endswith(".partial") for name in names)
    tokenize(documents, tmp_path / "cut", options, **QUIET)
    tokenize(documents, tmp_path / "whole", options, **QUIET)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_inputs_without_a_document_leave_no_data(tmp_path):
    with pytest.raises(UserError, match=r"hold no document \(2 empty\)"):
        tokenize([Document(""), Document("  ")], tmp_path, **QUIET)
    tokenize([Document("text")], tmp_path, TokenizeOptions(heldout=0.5), **QUIET)  # the folder is free again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heldout": 1.0}, "heldout is 1.0, expected at least 0 and below 1"),
        ({"tokenizer_sample": 0.0}, "tokenizer_sample is 0.0"),
        ({"shard_bytes": 0}, "shard_bytes is 0"),
        ({"tokenizer": "x.json", "train_tokenizer": 300}, "either a tokenizer or train_tokenizer"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        TokenizeOptions(**options)


def test_documents_that_can_be_read_once_cannot_train_a_tokenizer(tmp_path):
    with pytest.raises(UserError, match="documents are read twice"):
        tokenize(iter(some_documents(3)), tmp_path, TokenizeOptions(train_tokenizer=300), **QUIET)
    tokenize(lambda: iter(some_documents(3)), tmp_path, TokenizeOptions(train_tokenizer=300), **QUIET)


def test_a_split_with_a_name_that_is_no_file_name_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"the split '\.\./up' of 'it', expected letters"):
        tokenize([Document("text", "../up", "it")], tmp_path, **QUIET)
