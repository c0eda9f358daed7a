"""statetrack lm tokenize: what it prints, and what it refuses."""

import io
import json

import pytest

from statetrack.cli import main
from statetrack.commands.progress import bytes_bar
from statetrack.lm.tokenizers import load_tokenizer
from statetrack.tasks import task
from statetrack.tasks.token_shards import TokenShards


def lm_tokenize(*arguments):
    main(["lm", "tokenize", *map(str, arguments)])


@pytest.fixture
def texts(tmp_path):
    for folder in ("code", "prose"):
        (tmp_path / folder).mkdir()
        for i in range(30):
            (tmp_path / folder / f"{i:02}.txt").write_text(f"{folder} number {i}\n")
    (tmp_path / "code/empty.txt").write_text("")
    return tmp_path


def test_folders_become_a_corpus_with_named_held_out_sets(texts, capsys):
    out = texts / "out"
    lm_tokenize(
        texts / "code", "--heldout-set", f"heldout-prose={texts / 'prose'}", "--heldout", 0.2, "--out", out
    )
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["train", "heldout", "heldout-prose", "1", f"{out}:"]
    assert printed[2].split()[1:5] == [
        "30",
        "documents",
        str(sum(len(f"prose number {i}\n") + 1 for i in range(30))),
        "tokens",
    ]
    assert printed[3] == f"1 not read: 1 empty; see {out / 'bad_documents.jsonl'}"
    assert task(f"corpus:{out}").vocab_size == 257
    assert list(TokenShards.open(out).splits) == ["train", "heldout", "heldout-prose"]


def test_the_same_command_again_says_that_it_is_finished(texts, capsys):
    command = [texts / "code", "--out", texts / "out", "--heldout", 0.2]
    lm_tokenize(*command)
    first = capsys.readouterr().out
    lm_tokenize(*command)
    assert capsys.readouterr().out == f"{texts / 'out'} is finished already.\n{first}"


def test_a_tokenizer_is_trained_and_then_taken_for_other_data(texts, capsys):
    lm_tokenize(texts / "code", "--train-tokenizer", 270, "--out", texts / "a")
    lm_tokenize(texts / "prose", "--tokenizer", texts / "a/tokenizer.json", "--out", texts / "b")
    assert load_tokenizer(texts / "a").to_json() == load_tokenizer(texts / "b").to_json()
    assert "Training a tokenizer of 270 tokens" in capsys.readouterr().out


def test_inputs_may_follow_the_options(texts, capsys):
    lm_tokenize("--heldout", 0.2, "--out", texts / "out", texts / "code", texts / "prose")
    assert capsys.readouterr().out.startswith("train")
    assert TokenShards.open(texts / "out").documents("train").size > 31, "both folders were read"


def test_checksums_are_compared_on_demand(texts, capsys):
    lm_tokenize(texts / "code", "--out", texts / "out")
    lm_tokenize("--check", texts / "out")
    assert "all checksums match" in capsys.readouterr().out
    path = next((texts / "out").glob("train-*.bin"))
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(SystemExit) as end:
        lm_tokenize("--check", texts / "out")
    assert end.value.code == 2
    assert "is damaged" in capsys.readouterr().err


def test_a_corpus_without_held_out_text_is_pointed_out(texts, capsys):
    lm_tokenize(texts / "code", "--heldout", 0, "--out", texts / "out")
    assert "No held-out document" in capsys.readouterr().out


def test_whole_folders_are_held_out_together(texts):
    for i in range(20):
        (texts / f"all/{i}").mkdir(parents=True)
        for j in range(3):
            (texts / f"all/{i}/{j}.py").write_text(f"project {i}, file {j}")
    lm_tokenize(texts / "all", "--heldout-by", "folder", "--heldout", 0.3, "--out", texts / "out")
    shards, tokenizer = TokenShards.open(texts / "out"), load_tokenizer(texts / "out")
    projects = {}
    for split in shards.splits:
        text = tokenizer.decode(shards.read(split, 0, shards.tokens(split)).tolist())
        projects[split] = {part.split(",")[0] for part in text.split("project ")[1:]}
    assert projects["train"].isdisjoint(projects["heldout"])
    assert len(projects["train"]) + len(projects["heldout"]) == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist, expected a text file"),
        (["--heldout-set", "prose"], "--heldout-set is 'prose', expected NAME=PATH"),
        (["--heldout-set", "train=."], "--heldout-set is 'train=.', expected NAME=PATH"),
        (["--workers", "0"], "workers is 0, expected at least 1"),
        (["--max-file-mb", "nan"], "max_file_mb is nan, expected a number above 0"),
        (["--shard-mb", "inf"], "shard_mb is inf, expected a number above 0"),
        (["hf:x", "--heldout-by", "folder"], "a dataset of the hub has none"),
    ],
)
def test_mistakes_end_with_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        lm_tokenize(*arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_dataset_of_the_hub_without_network_is_a_clear_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as end:
        lm_tokenize("hf:statetrack/none:small:train", "--out", tmp_path)
    assert end.value.code == 2
    assert "This needs network access to the Hugging Face hub" in capsys.readouterr().err


def test_a_dataset_on_disk_is_streamed_by_its_name(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    rows = "".join(json.dumps({"body": f"row {i}"}) + "\n" for i in range(9))
    (tmp_path / "data/train.jsonl").write_text(rows)
    lm_tokenize(f"hf:{tmp_path / 'data'}", "--field", "body", "--heldout", 0.2, "--out", tmp_path / "out")
    shards = TokenShards.open(tmp_path / "out")
    assert sum(len(shards.documents(split)) - 1 for split in shards.splits) == 9


def test_progress_in_a_file_is_a_line_now_and_then(monkeypatch):
    clock = iter(range(0, 100, 3))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    with bytes_bar("tokenizing", 4_000_000, stream) as bar:
        for done in (1_000_000, 2_000_000, 3_000_000):
            bar(done, "5 tokens")
    assert stream.getvalue().splitlines() == ["tokenizing  2 of 4 MB  5 tokens"]
