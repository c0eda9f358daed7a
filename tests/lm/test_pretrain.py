"""statetrack lm pretrain: specs from presets, files, the paper and other runs; and the command itself."""

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from corpora import END, VOCABULARY, cycling_documents, small_shards

from statetrack import cli
from statetrack.commands.lm.pretrain import read_arguments
from statetrack.config import from_dict
from statetrack.errors import UserError
from statetrack.files import load_tensors
from statetrack.layers import count_parameters
from statetrack.lm.embedded import cache_folder, embedded_corpus
from statetrack.lm.shards import write_shards
from statetrack.lm.specs import PAPER, paper_spec
from statetrack.lm.tokenizers import BytesTokenizer
from statetrack.run import load_run, run
from statetrack.spec import RunSpec
from statetrack.training import Options, build_model
from statetrack.training.loop import check_options
from statetrack.training.optimizer import learning_rate
from statetrack.training.ranks import Ranks
from statetrack.training.state import new_state

TINY = ["--d-model", "8", "--heads", "2", "--layers", "1", "--context", "16", "--batch", "2", "--steps", "4"]
TINY += ["--log-every", "2", "--eval-samples", "2", "--device", "cpu"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    small_shards(folder)
    (folder / "tokenizer.json").write_text(BytesTokenizer().to_json())
    return str(folder)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """The folder of a tiny run in [0,1]."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    _, spec = read_arguments(["deltanet-10m", "--data", data, *TINY, "--eigenvalues", "[0,1]"])
    run(spec, folder, Options(say=lambda text: None))
    return folder


PARAMETERS = {"deltanet-340m": 374_362_112, "deltanet-1.3b": 1_365_677_056, "mamba-370m": 371_516_416}
# Sec. 5.3 and App. E.3: GPUs, rows of a step, steps, warm-up, micro-batches
PUBLISHED = {
    "deltanet-340m": (16, 256, 200_000, 250, 1),
    "deltanet-1.3b": (32, 960, 50_000, 500, 5),
    "mamba-370m": (16, 256, 200_000, 250, 1),
}


@pytest.mark.parametrize("eigenvalues", ["[0,1]", "[-1,1]"])
@pytest.mark.parametrize("name", PAPER)
def test_the_papers_runs_have_its_sizes_batches_and_schedule(name, eigenvalues, data):
    gpus, batch, steps, warmup, micro_batches = PUBLISHED[name]
    _, spec = read_arguments([f"paper:{name}", "--data", data, "--eigenvalues", eigenvalues])
    assert spec == paper_spec(name, eigenvalues, data) == RunSpec.from_dict(spec.to_dict())
    assert count_parameters(spec.model, spec.task.vocab_size) == PARAMETERS[name]
    assert spec.model.mixer.eigenvalues == eigenvalues
    training = spec.training
    assert (training.batch * spec.task.context, training.steps) == (batch * 2048, steps)
    assert (training.lr, training.weight_decay, training.clip, training.precision) == (
        3e-4,
        0.01,
        1.0,
        "bfloat16",
    )
    # linear to the full rate at the last step of the warm-up, then down
    rates = [learning_rate(step, training) for step in (0, warmup - 1, warmup, steps - 1)]
    assert rates == pytest.approx([3e-4 / warmup, 3e-4, 3e-4, 1e-6], rel=1e-3)
    assert learning_rate(warmup + 1, training) < 3e-4
    several = Ranks()
    several.size = gpus
    check_options(spec, Options("cpu", ranks=several, micro_batches=micro_batches))
    assert batch % (gpus * micro_batches) == 0
    assert PAPER[name].accumulation == micro_batches


def test_a_preset_has_the_papers_optimiser_and_the_data_of_the_folder(data):
    options, spec = read_arguments(["deltanet-60m", "--data", data, "--steps", "7"])
    assert (spec.task.path, spec.task.context, spec.task.vocab_size) == (data, 2048, VOCABULARY)
    assert (spec.training.lr, spec.training.weight_decay, spec.training.clip) == (3e-4, 0.01, 1.0)
    assert (spec.training.steps, spec.training.train_lengths) == (7, (2048, 2048))
    assert (options.spike, options.checkpoints, options.parallel) == (1.0, None, None)


def test_a_spec_file_gives_the_defaults_and_the_lengths_follow_the_context(data, tmp_path):
    _, spec = read_arguments(["mamba-10m", "--data", data, "--lr", "1e-3", "--seed", "5"])
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec.to_dict()))
    _, same = read_arguments([str(file)])
    assert same == spec
    _, changed = read_arguments([str(file), "--context", "64", "--attention-every", "4"])
    assert changed.training.train_lengths == (64, 64)
    assert changed.evaluation.eval_lengths == (8, 16, 32, 64)
    assert (changed.training.lr, changed.seed) == (1e-3, 5)


def test_a_spec_file_runs_on_other_data_with_no_more_tokens_than_its_vocabulary(data, tmp_path):
    _, spec = read_arguments(["deltanet-10m", "--data", data])
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_dict()))
    write_shards(tmp_path / "other", {"train": [[0, 1]], "heldout": [[1]]}, VOCABULARY - 1, END - 1)
    _, moved = read_arguments([str(tmp_path / "spec.json"), "--data", str(tmp_path / "other")])
    assert moved.task.vocab_size == VOCABULARY
    assert moved.task.sha256 != spec.task.sha256
    write_shards(tmp_path / "larger", {"train": [[0, 1]], "heldout": [[1]]}, VOCABULARY + 9, END)
    with pytest.raises(UserError, match="vocabulary is 17, expected at least 26"):
        read_arguments([str(tmp_path / "spec.json"), "--data", str(tmp_path / "larger")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a spec, a preset or paper:NAME"),
        (["deltanet-61m"], "Did you mean 'deltanet-60m'"),
        (["paper:deltanet-350m"], "Did you mean 'deltanet-340m'"),
        (["missing.json"], "missing.json is not a readable JSON file"),
        (["deltanet-10m", "--data", "nowhere"], "nowhere/index.json cannot be read"),
        (["deltanet-10m", "--extend", "somewhere"], "a run brings its own model"),
    ],
)
def test_what_names_no_model_or_data_is_refused(arguments, message, data):
    given = arguments if "--data" in arguments else [*arguments, "--data", data]
    with pytest.raises(UserError) as refused:
        read_arguments(given)
    assert message in str(refused.value)


def test_data_that_cannot_be_trained_on_leave_no_folder(tmp_path, capsys):
    write_shards(tmp_path / "data", {"train": [[1, 2] * 30]}, vocab_size=257, end_of_document=256)
    arguments = ["--data", str(tmp_path / "data"), *TINY, "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["lm", "pretrain", "deltanet-10m", *arguments])
    assert stopped.value.code == 2
    assert "no held-out split" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_run_is_refused_by_what_decides_the_result(finished, data, tmp_path):
    """Where the data are does not."""
    shutil.copytree(data, tmp_path / "moved")
    arguments = [str(finished / "spec.json"), "--data", str(tmp_path / "moved"), "--device", "cpu"]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["lm", "pretrain", *arguments, "--seed", "1", "--out", str(finished)])
    assert stopped.value.code == 2
    cli.main(["lm", "pretrain", *arguments, "--out", str(finished)])


def test_an_extended_run_starts_from_the_weights_and_names_them_by_content(finished, data, tmp_path):
    _, spec = read_arguments(["--extend", str(finished)])
    before, _ = load_run(finished)
    assert (before.model.mixer.eigenvalues, spec.model.mixer.eigenvalues) == ("[0,1]", "[-1,1]")
    assert len(spec.initial) == 64
    weights = load_tensors(finished / "model.safetensors")[0]
    state = new_state(spec, CPU)
    for name, weight in state.model.state_dict().items():
        assert torch.equal(weight, weights[name])
    assert not torch.equal(build_model(spec).embedding.weight, weights["embedding.weight"])
    # the place does not count, the content does
    assert replace(spec, initial_path="elsewhere").id == spec.id
    assert replace(spec, initial="", initial_path="").id != spec.id
    run(spec, tmp_path / "run", Options(say=lambda text: None))
    assert RunSpec.load(tmp_path / "run/spec.json") == spec


def test_an_extended_run_can_keep_the_function_instead(finished, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--extend", str(finished), "--keep", "function"]
    _, spec = read_arguments(arguments)
    assert read_arguments(arguments)[1].id == spec.id
    _, plain = read_arguments(["--extend", str(finished)])
    assert plain.initial != spec.initial
    _, model = load_run(finished)
    tokens = torch.arange(16)[None]
    expected = model(tokens)[0]
    errors = [(new_state(each, CPU).model(tokens)[0] - expected).norm().item() for each in (spec, plain)]
    assert errors[0] < errors[1]


def test_what_cannot_be_extended_is_refused(finished, tmp_path):
    _, spec = read_arguments(["--extend", str(finished)])
    wider = replace(spec, model=replace(spec.model, d_model=16)).resolved()
    with pytest.raises(UserError, match=r"embedding.weight is \(17, 8\) in .*, expected \(17, 16\)"):
        new_state(wider, CPU)
    with pytest.raises(UserError, match=r"has the SHA-256 .*, expected 00: the run was set up with other"):
        new_state(replace(spec, initial="00"), CPU)
    with pytest.raises(UserError, match="Did you mean 'weights'"):
        read_arguments(["--extend", str(finished), "--keep", "weight"])
    with pytest.raises(UserError, match="cannot be read: No such file"):
        new_state(replace(spec, initial_path="gone"), CPU)
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_dict()))
    with pytest.raises(UserError, match=r"has the range \[-1,1\], expected \[0,1\]"):
        read_arguments(["--extend", str(tmp_path)])


def test_an_extended_run_needs_data_of_its_tokenizer(finished, tmp_path):
    shards = {"train": cycling_documents(20, 0), "heldout": cycling_documents(3, 1)}
    write_shards(tmp_path / "other", shards, VOCABULARY, END)
    other = json.loads(BytesTokenizer().to_json())
    other["model"]["vocab"]["xy"] = 257
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="was trained with bytes"):
        read_arguments(["--extend", str(finished), "--data", str(tmp_path / "other")])


def test_the_tokenizer_goes_into_the_run_and_another_is_refused(finished, data):
    assert (finished / "tokenizer.json").read_text() == BytesTokenizer().to_json()
    spec = RunSpec.load(finished / "spec.json")
    (finished / "done.json").rename(finished / "kept")
    (finished / "tokenizer.json").write_text("{}")
    try:
        with pytest.raises(UserError, match="the run was started with another tokenizer"):
            run(spec, finished, Options(say=lambda text: None))
    finally:
        (finished / "kept").rename(finished / "done.json")
        (finished / "tokenizer.json").write_text(BytesTokenizer().to_json())


def test_activation_checkpointing_changes_no_loss(data, tmp_path):
    _, spec = read_arguments(["deltanet-10m", "--data", data, *TINY])
    rows = []
    for name, recompute in (("kept", False), ("again", True)):
        how = Options(activation_checkpointing=recompute, say=lambda text: None)
        rows.append(run(spec, tmp_path / name, how)["metrics"])
    assert rows[0] == rows[1]


def test_without_data_the_corpus_is_the_standard_library(tmp_path, monkeypatch, capsys):
    """A library of two files stands for it, to save time."""
    for name in ("first", "second"):
        (tmp_path / f"lib/{name}.py").parent.mkdir(exist_ok=True)
        (tmp_path / f"lib/{name}.py").write_text(f"print('{name}')\n" * 9)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = []
    folder = embedded_corpus(say=said.append)
    assert folder == cache_folder()
    assert "Tokenising the standard library" in said[0]
    shutil.rmtree(folder)
    cli.main(["lm", "pretrain", "deltanet-10m", "--context", "16", "--print-spec"])
    printed = capsys.readouterr()
    assert "Tokenising the standard library" in printed.err
    spec = from_dict(json.loads(printed.out))
    assert (spec.task.path, spec.task.vocab_size) == (str(folder), 257)


def test_the_command_trains_prints_and_logs(data, tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["lm", "pretrain", "mamba-10m", "--data", data, *TINY[:2], *TINY[4:], "--out", str(out)]
    cli.main([*arguments, "--log", "tensorboard"])
    printed = capsys.readouterr().out
    assert printed.count(" tokens/s ") == 2
    assert "heldout" in printed
    assert f"{out}: " in printed
    assert list((out / "tensorboard").iterdir())
    cli.main([*arguments, "--print-spec"])
    assert RunSpec.from_dict(json.loads(capsys.readouterr().out)).id == RunSpec.load(out / "spec.json").id


def test_help_needs_neither_model_nor_data(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["lm", "pretrain", "--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    for flag in ("--context", "--eigenvalues", "--micro-batches", "--spike", "--weight-decay"):
        assert flag in printed


@pytest.mark.slow
def test_the_command_is_one_of_torchruns_processes(data, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "1", "RANK": "0"}
    command = [
        sys.executable,
        "-m",
        "statetrack.cli",
        "lm",
        "pretrain",
        "deltanet-10m",
        "--data",
        data,
        *TINY,
    ]
    ran = subprocess.run(
        [*command, "--parallel", "fsdp", "--micro-batches", "2", "--checkpoint-seconds", "0"],
        env=os.environ | places | {"LOCAL_RANK": "0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    (folder,) = (tmp_path / "results").iterdir()
    assert load_run(folder)[0].task.path == data
