"""A run, an unfinished run and an exported folder open as the same model; what cannot be opened says why."""

import json
import resource
import shutil

import pytest
import torch
from trained import bytes_shards, small_spec, trained_run

from statetrack.cli import main
from statetrack.errors import Interrupted, UserError
from statetrack.files import load_tensors, save_tensors
from statetrack.lm.models import open_model
from statetrack.run import load_run, run
from statetrack.training import Options
from statetrack.training.store import read_weights

TOKENS = torch.tensor([[111, 110, 101, 32, 116]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trained_run(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "model"
    main(["lm", "export", str(folder), str(out)])
    return out


@pytest.fixture
def copied(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_opens_as_the_model_it_trained(folder):
    opened = open_model(folder)
    _, expected = load_run(folder)
    assert torch.equal(opened.model(TOKENS)[0], expected(TOKENS)[0])
    assert opened.model.head.weight is opened.model.embedding.weight
    assert not opened.model.training
    assert (opened.context, opened.vocab_size, opened.name) == (32, 264, "run")
    assert opened.tokenizer.encode("one") == [111, 110, 101]


def test_an_exported_folder_opens_as_the_same_model(folder, exported):
    opened, expected = open_model(exported), open_model(folder)
    assert torch.equal(opened.model(TOKENS)[0], expected.model(TOKENS)[0])
    assert (opened.context, opened.vocab_size) == (32, 264)
    assert opened.tokenizer.to_json() == expected.tokenizer.to_json()


def test_marks_on_parameters_survive(folder):
    _, expected = load_run(folder)
    marked = {n for n, p in expected.named_parameters() if getattr(p, "no_weight_decay", False)}
    assert marked
    opened = open_model(folder).model
    assert {n for n, p in opened.named_parameters() if getattr(p, "no_weight_decay", False)} == marked


def test_an_unfinished_run_opens_at_its_newest_checkpoint(tmp_path):
    spec = small_spec(bytes_shards(tmp_path / "data"), log_every=1)

    def stop_at_three(step, row):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, Interrupted)):
        run(spec, tmp_path / "run", Options(device="cpu", checkpoint_seconds=0, progress=stop_at_three))
    newest = max((tmp_path / "run").glob("checkpoint-*.safetensors"))
    opened = open_model(tmp_path / "run")
    stored = load_tensors(newest)[0]["model.embedding.weight"]
    assert torch.equal(opened.model.embedding.weight, stored)
    newest.write_bytes(newest.read_bytes()[:1000])  # damaged: the one before is taken
    before = load_tensors(min((tmp_path / "run").glob("checkpoint-*.safetensors")))[0]
    assert torch.equal(open_model(tmp_path / "run").model.embedding.weight, before["model.embedding.weight"])


def test_sharded_weights_of_transformers_open(exported, tmp_path):
    from statetrack.integrations.huggingface import StateTrackForCausalLM

    model = StateTrackForCausalLM.from_pretrained(exported)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(open_model(tmp_path).model(TOKENS)[0], model(TOKENS).logits)


def test_half_precision_stays(exported, tmp_path):
    from statetrack.integrations.huggingface import StateTrackForCausalLM

    StateTrackForCausalLM.from_pretrained(exported, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert open_model(tmp_path).model(TOKENS)[0].dtype == torch.bfloat16


def test_the_tokenizer_is_found_with_the_data_or_given(copied, tmp_path):
    (copied / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert open_model(copied).tokenizer.name == "bytes"  # from the folder of the training data
    spec = json.loads((copied / "spec.json").read_text())
    spec["task"]["path"] = str(tmp_path / "moved")
    (copied / "spec.json").write_text(json.dumps(spec))
    opened = open_model(copied)  # a model without a tokenizer can still be opened
    with pytest.raises(UserError, match=r"--tokenizer FILE"):
        _ = opened.tokenizer
    assert open_model(copied, tokenizer=tmp_path / "tokenizer.json").tokenizer.name == "bytes"


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(folder, tmp_path):
    import tokenizers

    words = {f"w{i}": i for i in range(300)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="expected at most 264"):
        _ = open_model(folder, tokenizer=tmp_path).tokenizer


def test_missing_folders_and_files_are_named(tmp_path, copied):
    with pytest.raises(UserError, match="is not a folder"):
        open_model(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"neither spec.json nor config.json"):
        open_model(tmp_path / "empty")
    (copied / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has not come far enough"):
        open_model(copied)


def test_damaged_and_foreign_weights_are_refused(copied, tmp_path):
    weights = copied / "model.safetensors"
    tensors = load_tensors(weights)[0]
    save_tensors(weights, tensors | {"norm.weight": torch.ones(17)})
    with pytest.raises(UserError, match=r"do not fit.*norm.weight"):
        open_model(copied)
    save_tensors(weights, {n: x for n, x in tensors.items() if n != "norm.weight"})
    with pytest.raises(UserError, match=r"do not fit.*norm.weight"):
        open_model(copied)
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(UserError, match="cannot be read"):
        open_model(copied)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "'llama'.*statetrack convert"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"backbone": {"kind": "DeltaNetConfig"}}, "not a ModelConfig"),
        ({"backbone": None}, "backbone"),
    ],
)
def test_a_foreign_config_is_refused(exported, tmp_path, change, message):
    shutil.copytree(exported, tmp_path / "model")
    config = json.loads((exported / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        open_model(tmp_path / "model")


def test_a_model_in_01_opens_in_the_wider_range_with_its_weights(folder, copied):
    spec = json.loads((copied / "spec.json").read_text())
    spec["model"]["mixer"]["eigenvalues"] = "[0,1]"
    (copied / "spec.json").write_text(json.dumps(spec))
    narrow, wide = open_model(copied), open_model(copied, "[-1,1]")
    assert open_model(copied, "[0,1]").model.config == narrow.model.config
    assert wide.model.config == open_model(folder).model.config
    assert torch.equal(wide.model(TOKENS)[0], open_model(folder).model(TOKENS)[0])
    assert not wide.model.training
    with pytest.raises(UserError, match="negative half"):
        open_model(folder, "[0,1]")
    with pytest.raises(UserError, match=r"\[0,2\]"):
        open_model(folder, "[0,2]")


def test_a_checkpoint_in_parts_opens(tmp_path):
    spec = small_spec(bytes_shards(tmp_path / "data"), log_every=1)

    def stop_at_three(step, row):
        if step == 3:
            raise KeyboardInterrupt

    options = Options(device="cpu", checkpoint_seconds=0, progress=stop_at_three, checkpoints="sharded")
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        run(spec, tmp_path / "run", options)
    newest = max(path for path in (tmp_path / "run").glob("checkpoint-*") if path.is_dir())
    stored = read_weights(newest)["embedding.weight"]
    assert torch.equal(open_model(tmp_path / "run").model.embedding.weight, stored)


def test_a_run_that_predicts_no_next_token_is_refused(tmp_path):
    from statetrack.layers import model_config
    from statetrack.spec import RunSpec, TrainingConfig
    from statetrack.tasks import task

    spec = RunSpec(task("parity-dense"), model_config("deltanet"), TrainingConfig(steps=1, batch=2))
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_dict()))
    with pytest.raises(UserError, match="load_run"):
        open_model(tmp_path)


def test_export_writes_what_transformers_reads(exported):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import statetrack.integrations.huggingface  # noqa: F401

    names = {path.name for path in exported.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert {"tokenizer_config.json", "modeling_statetrack.py"} <= names
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    batch = tokenizer(["one two", "three four five"], return_tensors="pt", padding=True)
    new = model.generate(**batch, max_new_tokens=8, do_sample=False)
    alone = model.generate(**tokenizer("one two", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    assert torch.equal(new[0][-8:], alone[0][-8:])


@pytest.mark.parametrize("text", ["abc\n\t 123", "größe, 漢字 🙂", "<|endoftext|> is text here", " ", ""])
def test_the_exported_tokenizer_gives_our_ids(exported, text):
    from transformers import AutoTokenizer

    ours, theirs = open_model(exported).tokenizer, AutoTokenizer.from_pretrained(exported)
    assert theirs(text).input_ids == ours.encode(text) == list(text.encode())
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == theirs.pad_token_id == 256


def test_export_does_not_overwrite(folder, exported):
    with pytest.raises(SystemExit) as stopped:
        main(["lm", "export", str(folder), str(exported)])
    assert stopped.value.code == 2


def test_an_export_without_space_for_it_leaves_nothing(folder, tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # as a full disk: config.json fits
    try:
        with pytest.raises(SystemExit) as stopped:
            main(["lm", "export", str(folder), str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert stopped.value.code == 1
    assert "cannot be written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
