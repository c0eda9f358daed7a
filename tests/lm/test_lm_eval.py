"""lm-evaluation-harness on our models, offline: by `statetrack lm eval`, and plain on an exported folder."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from trained import trained_run

from statetrack.cli import main
from statetrack.errors import UserError
from statetrack.integrations.lm_eval import AVERAGE, COLUMNS, PAPER, PAPER_TASKS, evaluate, paper_table
from statetrack.lm.models import open_model

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # the harness and what it imports warn of their own affairs

CHOICES = [
    {"text": "one two", "choices": [" three", " qqqqq"], "label": 0},
    {"text": "six", "choices": [" zzz", " seven"], "label": 1},
    {"text": "ei", "choices": ["ght", "xxx"], "label": 0},
]
DOCUMENTS = [{"page": "one two three four"}, {"page": "five six seven"}]
TASKS = {
    "small_choice": """
task: small_choice
dataset_path: json
dataset_kwargs: {data_files: {test: CHOICES}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
target_delimiter: ""
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "small_perplexity": """
task: small_perplexity
dataset_path: json
dataset_kwargs: {data_files: {test: DOCUMENTS}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list: [{metric: byte_perplexity}]
""",
    "small_text": """
task: small_text
dataset_path: json
dataset_kwargs: {data_files: {test: CHOICES}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trained_run(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    for name, rows in (("CHOICES", CHOICES), ("DOCUMENTS", DOCUMENTS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        for data in ("CHOICES", "DOCUMENTS"):
            text = text.replace(data, str(folder / f"{data}.jsonl"))
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def local_caches(tmp_path_factory, monkeypatch):
    """Data sets that the harness makes of local files go to a folder of the test."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def log_likelihood(model, text: str, continuation: str) -> float:
    tokens = torch.tensor([list((text + continuation).encode())])
    losses = F.cross_entropy(model(tokens)[0][0, :-1], tokens[0, 1:], reduction="none")
    return -float(losses[-len(continuation) :].sum())


def test_the_command_gives_what_the_model_gives_by_hand(folder, tasks, tmp_path, capsys):
    names = ["--tasks", *TASKS]
    out = tmp_path / "eval.json"
    main(["lm", "eval", str(folder), *names, "--include-path", str(tasks), "--out", str(out)])
    result = json.loads(out.read_text())
    opened = open_model(folder)
    model, tokenizer = opened.model, opened.tokenizer

    best = [
        max(range(2), key=lambda i, row=row: log_likelihood(model, row["text"], row["choices"][i]))
        for row in CHOICES
    ]
    accuracy = sum(b == row["label"] for b, row in zip(best, CHOICES, strict=True)) / len(CHOICES)
    assert result["tasks"]["small_choice"]["acc"] == pytest.approx(accuracy)

    total, length = 0.0, 0
    for row in DOCUMENTS:  # each from the end-of-document token on
        tokens = torch.tensor([[tokenizer.end_of_document, *row["page"].encode()]])
        total += float(F.cross_entropy(model(tokens)[0][0, :-1], tokens[0, 1:], reduction="sum"))
        length += len(row["page"])
    perplexity = result["tasks"]["small_perplexity"]["byte_perplexity"]
    assert perplexity == pytest.approx(math.exp(total / length), 1e-4)

    assert "exact_match" in result["tasks"]["small_text"]
    assert result["samples"] == {"small_choice": 3, "small_perplexity": 2, "small_text": 3}
    assert (result["max_length"], result["limit"], result["model"]) == (32, None, "run")
    printed = capsys.readouterr().out
    assert "small_choice (3 documents)" in printed
    # two choices each, and the first is right twice of three times
    assert result["baselines"] == {"small_choice": {"chance": 0.5, "majority": pytest.approx(2 / 3)}}
    assert f"acc                     {accuracy:>12.4f}  (chance 0.5000, majority 0.6667)" in printed
    assert f"See {out}" in printed


def test_some_of_the_documents_are_said_to_be_some(folder, tasks, tmp_path, capsys):
    out = tmp_path / "eval.json"
    arguments = ["--tasks", "small_choice", "--include-path", str(tasks), "--limit", "2", "--out", str(out)]
    main(["lm", "eval", str(folder), *arguments])
    assert json.loads(out.read_text())["samples"] == {"small_choice": 2}
    assert "Only the first 2 documents" in capsys.readouterr().out


@pytest.mark.slow  # imports transformers and the harness once more
def test_the_plain_harness_evaluates_an_exported_folder(folder, tasks, tmp_path):
    """`lm_eval --model hf` in a process of its own, which knows nothing of statetrack."""
    main(["lm", "export", str(folder), str(tmp_path / "model")])
    model = f"pretrained={tmp_path / 'model'},trust_remote_code=True"
    # the command reads thousands of tasks first, which takes long; this is what it does after that
    code = (
        "import sys, json, lm_eval\n"
        "from lm_eval.tasks import TaskManager\n"
        "manager = TaskManager(include_path=sys.argv[2], include_defaults=False)\n"
        "found = lm_eval.simple_evaluate(model='hf', model_args=sys.argv[1], device='cpu', batch_size=2,\n"
        "    tasks=sys.argv[3:], task_manager=manager, bootstrap_iters=0, log_samples=False)\n"
        "print(json.dumps({name: found['results'][name] for name in sys.argv[3:]}, default=str))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, model, str(tasks), *TASKS],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = evaluate(open_model(folder), list(TASKS), include_path=tasks, batch_size=2)["tasks"]
    for task, metric in (
        ("small_choice", "acc"),
        ("small_perplexity", "byte_perplexity"),
        ("small_text", "exact_match"),
    ):
        assert theirs[task][f"{metric},none"] == pytest.approx(ours[task][metric])


def test_the_tasks_of_the_paper_are_the_harness_s_own():
    """Names and metrics, from the harness's files."""
    import lm_eval.tasks

    from statetrack.integrations.lm_eval import FOLDERS, _all_names, _task_manager

    root = Path(lm_eval.tasks.__file__).parent
    assert {*PAPER_TASKS} <= _all_names(_task_manager(PAPER_TASKS, None))
    for column in COLUMNS.values():
        files = (root / FOLDERS.get(column.task, column.task)).rglob("*")
        sources = [file.read_text() for file in files if file.suffix in (".yaml", ".py")]
        assert any(column.metric in source for source in sources), column


def test_without_network_the_error_says_what_to_do(folder, monkeypatch):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"piqa.*--include-path"):
        evaluate(open_model(folder), ["piqa"])


def test_an_answer_longer_than_a_context_is_explained(folder, tasks):
    with pytest.raises(UserError, match="an answer in a task has more tokens than a context, 2"):
        evaluate(open_model(folder), ["small_choice"], include_path=tasks, max_length=2)


def test_wrong_names_and_folders_are_explained(folder, tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        evaluate(open_model(folder), ["paper"], include_path=tmp_path / "nowhere")
    with pytest.raises(UserError, match="no task was named"):
        evaluate(open_model(folder), [])


def test_our_column_stands_beside_the_paper_s():
    measured = {"lambada_openai": {"acc": 0.25, "perplexity": 123.4}, "piqa": {"acc": 0.5}}
    header, ours, *theirs = paper_table({"model": "mine", "tasks": measured})
    row = dict(zip(header, ours, strict=True))
    known = [row[name] for name in ("model", "LMB. ppl", "LMB. acc", "PIQA acc")]
    assert known == ["mine", "123.40", "25.00", "50.00"]
    assert row["Wiki. ppl"] == row[AVERAGE] == "-"
    assert [line[0] for line in theirs] == [f"{name} (paper)" for name in PAPER]


@pytest.mark.parametrize(
    ("model", "average"),
    [
        ("DeltaNet 340M [0,1]", 46.1),
        ("DeltaNet 340M [-1,1]", 45.8),
        ("Mamba 370M [0,1]", 47.3),
        ("Mamba 370M [-1,1]", 48.2),
        ("DeltaNet 1.3B [0,1]", 53.1),
        ("DeltaNet 1.3B [-1,1]", 52.4),
    ],
)
def test_the_paper_s_numbers_have_the_paper_s_averages(model, average):
    """tab:lm_harness prints the averages too: a number copied wrongly would change one."""
    table = paper_table({"model": "mine", "tasks": {}})
    row = next(dict(zip(table[0], line, strict=True)) for line in table if line[0] == f"{model} (paper)")
    assert float(row[AVERAGE]) == pytest.approx(average, abs=0.051)
