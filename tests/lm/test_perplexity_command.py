"""`statetrack lm perplexity`: from folders of runs to a table, a figure and a file."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from corpora import cycling_documents, small_corpus
from trained import trained_run

from statetrack.cli import main
from statetrack.layers import model_config
from statetrack.lm.candidates import Described, labels
from statetrack.lm.measured import read_perplexities
from statetrack.lm.shards import write_shards
from statetrack.lm.tokenizers import train_bpe
from statetrack.run import run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks.token_shards import TokenShards
from statetrack.training import Options

FLAGS = ["--length", "64", "--bins", "8", "--splits", "heldout", "--window", "24"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Both ranges, two seeds, on one corpus; the folders of the runs and of the data."""
    folder = tmp_path_factory.mktemp("lm")
    corpus = small_corpus(folder / "data")
    training = TrainingConfig(4, batch=4, lr=1e-2, log_every=2)
    evaluation = EvaluationConfig(eval_lengths=(8, 16), eval_samples=2)
    found = []
    for eigenvalues in ("[0,1]", "[-1,1]"):
        model = model_config("deltanet", d_model=16, heads=2, eigenvalues=eigenvalues)
        for seed in (0, 1):
            spec = RunSpec(replace(corpus), model, training, evaluation, seed)
            run(spec, folder / f"{eigenvalues}-{seed}", Options("cpu", say=lambda text: None))
            found.append(str(folder / f"{eigenvalues}-{seed}"))
    return found, str(folder / "data")


def frequency_perplexity(data: str) -> float:
    """Of the tokens that sequences of 64 in the held-out split predict, counted by hand."""
    shards = TokenShards.open(data)
    tokens = shards.read("heldout", 0, shards.tokens("heldout"))
    predicted = tokens[1 : 64 * ((len(tokens) - 1) // 64) + 1]
    shares = [count / len(predicted) for count in Counter(predicted.tolist()).values()]
    return math.exp(-sum(share * math.log(share) for share in shares))


def test_models_are_compared_on_the_same_sequences(runs, tmp_path, capsys):
    models, data = runs
    main(["lm", "perplexity", *models, data, *FLAGS, "--spectrum", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "Loss of DeltaNet [-1,1] minus loss of DeltaNet [0,1]" in printed
    (line,) = (line for line in printed.splitlines() if "(token frequencies alone)" in line)
    assert float(line.split()[-1]) == pytest.approx(frequency_perplexity(data), abs=1e-3)
    assert "Eigenvalues of the transitions, DeltaNet [-1,1], seed 1" in printed
    names = {f"{n}.{k}" for n in ("perplexity", "differences", "spectrum") for k in ("json", "png", "svg")}
    assert {path.name for path in tmp_path.iterdir()} == names
    found = read_perplexities(tmp_path / "perplexity.json")
    assert [(m.label, m.seed, m.context) for m in found.models] == [
        ("DeltaNet [0,1]", 0, 16),
        ("DeltaNet [0,1]", 1, 16),
        ("DeltaNet [-1,1]", 0, 16),
        ("DeltaNet [-1,1]", 1, 16),
    ]
    assert 16 in found.layouts["heldout"].edges
    whole, within, past = json.loads((tmp_path / "differences.json").read_text())
    assert (whole["low"], within["high"], past["low"], past["high"]) == (0, 16, 16, 64)
    assert len(whole["by_seed"]) == 2
    spectrum = json.loads((tmp_path / "spectrum.json").read_text())
    assert all(max(use["negative"]) == 0 for use in spectrum["DeltaNet [0,1], seed 0"])
    assert any(max(use["negative"]) > 0 for use in spectrum["DeltaNet [-1,1], seed 0"])


def test_a_model_that_was_measured_is_not_measured_again(runs, tmp_path, monkeypatch):
    models, data = runs
    (tmp_path / "differences.svg").write_text("of other models")
    main(["lm", "perplexity", models[0], data, *FLAGS, "--out", str(tmp_path)])
    assert not (tmp_path / "differences.svg").exists()
    before = read_perplexities(tmp_path / "perplexity.json").models[0]
    asked = []

    def record(model, *rest):
        asked.append(model)
        return measure(model, *rest)

    from statetrack.lm.measure_models import measure

    monkeypatch.setattr("statetrack.lm.measure_models.measure", record)
    main(["lm", "perplexity", models[0], models[2], data, *FLAGS, "--out", str(tmp_path)])
    after = read_perplexities(tmp_path / "perplexity.json").models
    assert len(asked) == 1
    assert after[0].weights == before.weights != after[1].weights
    with pytest.raises(SystemExit) as stopped:
        main(["lm", "perplexity", models[0], data, *FLAGS, "--rows", "long", "--out", str(tmp_path)])
    assert stopped.value.code == 2


def test_labels_of_the_user_are_kept(runs, tmp_path, capsys):
    models, data = runs
    main(["lm", "perplexity", f"mine={models[0]}", data, *FLAGS, "--out", str(tmp_path)])
    assert "mine" in capsys.readouterr().out


def test_a_figure_is_the_same_every_time(runs, tmp_path):
    models, data = runs
    for name in ("one", "two"):
        main(["lm", "perplexity", models[0], data, *FLAGS, "--out", str(tmp_path / name)])
    for file in ("perplexity.svg", "perplexity.png", "perplexity.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give models and the folder of the data"),
        (["nowhere", "DATA"], "nowhere"),
        (["RUN", "nowhere"], "nowhere"),
        (["RUN", "DATA", "--splits", "other"], "no split 'other'"),
        (["RUN", "DATA", "--splits", "heldout", "--length", "100000"], "no sequence of 100000 tokens"),
        (["RUN", "DATA", "--window", "0"], "window is 0"),
        (["RUN", "WIDE"], "vocabulary of 100 tokens and the model one of 17"),
    ],
)
def test_what_cannot_be_done_is_said(runs, tmp_path, capsys, arguments, message):
    models, data = runs
    write_shards(tmp_path / "wide", {"heldout": cycling_documents(9, 1)}, 100, 16)
    names = {"RUN": models[0], "DATA": data, "WIDE": str(tmp_path / "wide")}
    given = [names.get(argument, argument) for argument in arguments]
    with pytest.raises(SystemExit) as stopped:
        main(
            [
                "lm",
                "perplexity",
                *given,
                "--out",
                str(tmp_path / "out"),
                *([] if "--length" in given else FLAGS[:2]),
            ]
        )
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_data_of_another_tokenizer_are_refused(tmp_path, capsys):
    folder = trained_run(tmp_path)
    texts = ["one two three " * 9] * 40
    other = train_bpe(texts, 260)
    documents = [other.encode(text) for text in texts]
    write_shards(tmp_path / "other", {"heldout": documents}, other.vocab_size, other.end_of_document)
    (tmp_path / "other/tokenizer.json").write_text(other.to_json())
    with pytest.raises(SystemExit) as stopped:
        main(["lm", "perplexity", str(folder), str(tmp_path / "other"), "--length", "64"])
    assert stopped.value.code == 2
    assert "Tokenise the text again" in capsys.readouterr().err


def described(name, family="DeltaNet [-1,1]", kind="a", parameters=10**6, given=""):
    return Described(family, name, name, kind, 0, 0, parameters, "", given)


def test_labels_differ_where_more_than_the_seed_does():
    assert labels([described("x"), described("y")]) == ["DeltaNet [-1,1]"] * 2
    assert labels([described("x"), described("y", kind="b", parameters=340 * 10**6)]) == [
        "DeltaNet 1M [-1,1]",
        "DeltaNet 340M [-1,1]",
    ]
    assert labels([described("x"), described("y", kind="b")]) == [
        "DeltaNet x [-1,1]",
        "DeltaNet y [-1,1]",
    ]
    assert labels([described("x", given="mine"), described("y")]) == ["mine", "DeltaNet [-1,1]"]
