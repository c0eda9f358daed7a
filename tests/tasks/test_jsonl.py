"""Tasks from JSONL files: what is read, what is refused, and that runs know the content, not the place."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Generator

from statetrack.commands.train import read_arguments
from statetrack.errors import UserError
from statetrack.layers import model_config
from statetrack.run import run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.sweep.worker import carry_out
from statetrack.tasks import IGNORE, Jsonl, jsonl, task
from statetrack.training import Options, build_model, evaluate
from statetrack.training.protocols import WHOLE
from statetrack.training.source import WIDTHS, source_of

CPU = torch.device("cpu")
QUIET = {"device": "cpu", "say": lambda text: None}


def write(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def marked(i, length, split=None):
    """A sequence that begins with its number, so that it can be told from others; label 1 at its end."""
    line = {"inputs": [i] * length, "targets": [IGNORE] * (length - 1) + [i % 2]}
    return line if split is None else line | {"split": split}


@pytest.fixture
def path(tmp_path):
    """Twelve training sequences of 1 to 12 tokens, and four of 3 to 6 for testing."""
    lines = [marked(i, i + 1, "train") for i in range(12)]
    return write(tmp_path / "data.jsonl", lines + [marked(i, i + 3, "test") for i in range(4)])


def spec_of(path, **training):
    return RunSpec(
        task(f"jsonl:{path}"),
        model_config("deltanet", d_model=8, heads=2),
        TrainingConfig(**{"steps": 20, "batch": 5, "log_every": 5} | training),
        EvaluationConfig(eval_every=10),
    ).resolved()


@pytest.mark.parametrize("fraction", [-0.01, 1.01, float("nan")])
def test_a_fraction_is_from_0_to_1(fraction, path):
    with pytest.raises(UserError, match=f"test_fraction is {fraction}, expected a number from 0 to 1"):
        Jsonl(str(path), test_fraction=fraction)
    assert [Jsonl(str(path), test_fraction=x).test_fraction for x in (0.0, 1.0)] == [0.0, 1.0]


def test_stored_sequences_are_read_outside_of_cuda_graphs(path):
    assert source_of(spec_of(path), CPU).capturable is False


def test_sizes_and_lengths_come_from_the_file(path):
    spec = spec_of(path)
    assert (spec.task.vocab_size, spec.task.n_classes, spec.task.chance) == (12, 2, 0.5)
    assert spec.training.train_lengths == (1, 12)
    assert spec.evaluation.eval_lengths == (3, 4, 5, 6)
    raised = Jsonl(str(path), vocabulary=20, classes=7)
    assert (raised.vocab_size, raised.n_classes) == (20, 7)
    with pytest.raises(UserError, match="vocabulary and classes are 5 and 2, expected at least 12 and 2"):
        Jsonl(str(path), vocabulary=5).sequences("train")


def test_every_training_sequence_comes_once_per_epoch_in_an_order_of_seed_and_epoch(path):
    def epochs(seed):
        source = source_of(replace(spec_of(path), seed=seed), CPU)
        batches = [source.batch(step, WHOLE, Generator()) for step in range(12)]  # five epochs of twelve
        first = [int(row[0]) for batch in batches for row in batch.inputs]
        return [tuple(first[i : i + 12]) for i in range(0, 60, 12)]

    assert all(sorted(epoch) == list(range(12)) for epoch in epochs(0))
    assert len({*epochs(0), *epochs(1)}) == 10


def test_a_batch_is_the_sequences_padded_to_one_of_a_few_widths_and_the_padding_has_no_label(path):
    source, widths = source_of(spec_of(path), CPU), set()
    for step in range(30):
        batch = source.batch(step, WHOLE, Generator())
        widths.add(batch.inputs.shape[1])
        assert batch.inputs.shape[1] == source.width(step)
        for inputs, targets in zip(*batch, strict=True):
            i = int(inputs[0])
            assert inputs.tolist() == [i] * (i + 1) + [0] * (len(inputs) - i - 1)
            assert targets.tolist() == [IGNORE] * i + [i % 2] + [IGNORE] * (len(inputs) - i - 1)
    assert 1 < len(widths) <= WIDTHS


def test_train_lengths_choose_among_the_sequences(path):
    source = source_of(spec_of(path, train_lengths=(3, 5)), CPU)
    seen = {int(row[0]) for step in range(9) for row in source.batch(step, WHOLE, Generator()).inputs}
    assert seen == {2, 3, 4}
    with pytest.raises(UserError, match="no training sequence has 20 to 30 tokens, expected lengths from 1"):
        source_of(spec_of(path, train_lengths=(20, 30)), CPU)


def test_lines_without_a_split_are_dealt_out_by_their_content(tmp_path):
    lines = [marked(i, 1 + i % 7) for i in range(1000)]
    parts = []
    for name, order in (("a", lines), ("b", lines[::-1])):
        found = task(f"jsonl:{write(tmp_path / name, order)}").sequences("test")
        parts.append({int(found.inputs[start]) for start in found.starts})
    assert parts[0] == parts[1]
    assert 70 < len(parts[0]) < 130
    every = Jsonl(str(tmp_path / "a"), test_fraction=1.0)
    assert len(every.sequences("test").lengths) == 1000
    with pytest.raises(UserError, match="has no train sequences"):
        every.sequences("train")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[1, 2]", "expected an object"),
        ({"inputs": [1]}, "expected an object"),
        ({"inputs": [1, 2], "targets": [1]}, "has 2 inputs and 1 targets"),
        ({"inputs": [], "targets": []}, "at least one whole number"),
        ({"inputs": 3, "targets": [1]}, "at least one whole number"),
        ({"inputs": [-1], "targets": [1]}, "inputs holds -1, expected whole numbers from 0"),
        ({"inputs": [1], "targets": [-1]}, "targets holds -1, expected whole numbers from 0"),
        ({"inputs": [1], "targets": [2**31]}, "targets holds 2147483648"),
        ({"inputs": [True], "targets": [1]}, "inputs holds True"),
        ({"inputs": [1.0], "targets": [1]}, "inputs holds 1.0"),
        ({"inputs": [1], "targets": [IGNORE]}, "has no label"),
        ({"inputs": [1], "targets": [1], "split": "dev"}, "split is 'dev'"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_number(line, words, tmp_path):
    path = write(tmp_path / "bad.jsonl", [marked(1, 3), line, marked(2, 3)])
    with pytest.raises(UserError, match=r"bad\.jsonl, line 2.*") as error:
        task(f"jsonl:{path}")
    assert words in str(error.value)


def test_files_that_cannot_serve_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        task(f"jsonl:{tmp_path / 'none'}")
    with pytest.raises(UserError, match="is empty"):
        task(f"jsonl:{write(tmp_path / 'empty', [])}")
    with pytest.raises(UserError, match=r"every label of .* is 0"):
        task(f"jsonl:{write(tmp_path / 'zeros', [marked(0, 3)])}")
    with pytest.raises(UserError, match="takes no alphabet"):
        task("jsonl:x", alphabet="ab")


def test_a_run_is_named_by_the_content_of_its_file_not_by_its_place(path, tmp_path):
    spec, moved = spec_of(path), tmp_path / "moved.jsonl"
    moved.write_bytes(path.read_bytes())
    assert spec_of(moved) == spec
    assert spec_of(moved).id == spec.id
    assert spec.to_dict()["task"]["path"] == str(path)
    write(moved, [marked(i, 4) for i in range(40)])
    assert spec_of(moved).id != spec.id


def test_a_changed_file_is_refused_with_both_hashes(path):
    spec = spec_of(path)
    before = spec.task.sha256
    write(path, [marked(i, 4) for i in range(40)])
    jsonl._read.cache_clear()  # as in a new process
    with pytest.raises(UserError, match=f"has changed: its SHA-256 is .*, expected {before}") as error:
        run(spec, path.parent / "out", Options(**QUIET))
    assert task(f"jsonl:{path}").sha256 in str(error.value)


def test_a_spec_can_be_read_where_the_file_is_not(path):
    spec = spec_of(path)
    path.unlink()
    jsonl._read.cache_clear()
    assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


class Fixed(torch.nn.Module):
    """Predicts the class that it is asked for at every position."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, tokens, *, at=None):
        return torch.nn.functional.one_hot(torch.full_like(tokens, self.answer), 3).float(), None


def test_accuracy_counts_labels_and_whole_sequences_in_bins_of_length(tmp_path):
    """Test labels by length: 2: (1, 0); 3: (1), (0); 6: (1, 1, 2). Answering 1 gives 4 of 7."""
    lines = [
        {"inputs": [0, 0], "targets": [1, 0]},
        {"inputs": [0, 0, 0], "targets": [IGNORE, IGNORE, 1]},
        {"inputs": [0, 0, 0], "targets": [0, IGNORE, IGNORE]},
        {"inputs": [0] * 6, "targets": [1, IGNORE, 1, IGNORE, 2, IGNORE]},
    ]
    lines = [line | {"split": "test"} for line in lines] + [marked(1, 2, "train")]
    spec = spec_of(write(tmp_path / "counted.jsonl", lines))
    spec = replace(spec, evaluation=EvaluationConfig(eval_lengths=(2, 3, 5, 6), eval_batch=3))
    found = evaluate(Fixed(1), spec, CPU)
    assert found["accuracy"] == {"2-2": 1 / 2, "3-4": 1 / 2, "5-6": pytest.approx(2 / 3)}
    assert found["sequence_accuracy"] == {"2-2": 0.0, "3-4": 1 / 2, "5-6": 0.0}
    # three classes: chance is 1/3; the commonest label, 1, is right four times of seven
    assert found["scaled_accuracy"] == pytest.approx((4 / 7 - 1 / 3) / (2 / 3))
    assert found["majority_scaled_accuracy"] == pytest.approx((4 / 7 - 1 / 3) / (2 / 3))
    assert found["majority_accuracy"] == {"2-2": 1 / 2, "3-4": 1 / 2, "5-6": pytest.approx(2 / 3)}
    assert evaluate(Fixed(0), spec, CPU)["majority_scaled_accuracy"] == found["majority_scaled_accuracy"]
    one = replace(spec, evaluation=replace(spec.evaluation, eval_samples=1))
    assert len(evaluate(Fixed(1), one, CPU)["accuracy"]) == 1


def test_every_label_of_a_bin_counts_the_same_however_many_its_sequence_has(tmp_path):
    """Labels (1) and (0, 0, 1) in one bin: answering 1 is right for 2 of 4, not for (1 + 1/3) / 2."""
    lines = [
        {"inputs": [0] * 3, "targets": [1, IGNORE, IGNORE], "split": "test"},
        {"inputs": [0] * 3, "targets": [0, 0, 1], "split": "test"},
        marked(1, 2, "train"),
    ]
    spec = spec_of(write(tmp_path / "uneven.jsonl", lines))
    spec = replace(spec, evaluation=EvaluationConfig(eval_lengths=(3, 4)))
    assert evaluate(Fixed(1), spec, CPU)["accuracy"] == {"3-4": 1 / 2}


def test_the_file_is_not_read_while_training(path, tmp_path, monkeypatch):
    read = []
    real = type(path).read_bytes
    monkeypatch.setattr(type(path), "read_bytes", lambda self: read.append(self) or real(self))
    spec = spec_of(path)
    run(spec, tmp_path / "out", Options(**QUIET))
    assert read.count(path) == 2  # once for its hash, once for its lines


def test_a_run_on_a_file_resumes_exactly(path, tmp_path):
    class Stop(Exception):
        pass

    def die(step, row):
        if step >= 15:
            raise Stop

    spec = spec_of(path)
    metrics = run(spec, tmp_path / "whole", Options(**QUIET))["metrics"]
    assert list(metrics["accuracy"]) == ["3-3", "4-4", "5-6"]
    with pytest.raises(Stop):
        run(spec, tmp_path / "cut", Options(checkpoint_seconds=0.0, progress=die, **QUIET))
    run(spec, tmp_path / "cut", Options(**QUIET))
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_model_learns_a_file(tmp_path):
    """The label of the last position is its token: held-out sequences are answered."""
    drawn = torch.randint(4, (200, 6), generator=Generator().manual_seed(0)).tolist()
    lines = [{"inputs": row, "targets": [IGNORE] * 5 + [row[-1]]} for row in drawn]
    spec = spec_of(write(tmp_path / "copy.jsonl", lines), steps=100, batch=32, lr=1e-2)
    row = run(spec, tmp_path / "out", Options(**QUIET))["metrics"]
    assert row["scaled_accuracy"] > 0.9
    assert row["majority_scaled_accuracy"] < 0.3


def test_flags_and_sweep_workers_take_files(path, tmp_path):
    arguments = ["--task", f"jsonl:{path}", "--steps", "4", "--batch", "4", "--d-model", "8"]
    _, spec = read_arguments([*arguments, "--test-fraction", "0.2", "--heads", "2"])
    assert spec.task == Jsonl(str(path), test_fraction=0.2)
    assert carry_out(spec.to_dict(), tmp_path / "out", "cpu")[0] == "done"


def test_test_sequences_can_be_sampled_for_diagnostics(path):
    batch = task(f"jsonl:{path}").sample(9, (4, 5), Generator().manual_seed(0))
    assert {int(row[0]) for row in batch.inputs} == {1, 2}
    assert build_model(spec_of(path))(batch.inputs)[0].shape == (9, 5, 2)
