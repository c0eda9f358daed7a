"""What a row of metrics says: the mean loss since the last row, and the learning rate of its step."""

import json
import math
from dataclasses import replace

import pytest
import torch
from training_internals import learning_rate, make_optimizer, training_batch

from statetrack.layers import model_config
from statetrack.run import run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import IGNORE, task
from statetrack.training import Options, build_model, read_metrics

SPEC = RunSpec(
    task("parity-dense"),
    model_config("deltanet-no-conv", d_model=8, heads=2),
    TrainingConfig(steps=11, batch=4, lr=0.02, train_lengths=(5, 9), log_every=1, warmup=0.2),
    EvaluationConfig(eval_lengths=(8,), eval_samples=4),
)
QUIET = {"say": lambda text: None}


def rows(spec, folder, **options):
    run(spec, folder, Options(**(QUIET | options)))
    return read_metrics(folder / "metrics.jsonl")


def logging(every, eval_every=0):
    """The same training, logged and evaluated at other steps."""
    evaluation = replace(SPEC.evaluation, eval_every=eval_every)
    return replace(SPEC, training=replace(SPEC.training, log_every=every), evaluation=evaluation)


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """The loss of step 1, 2, ..., from a run that logs each of them."""
    found = rows(SPEC, tmp_path_factory.mktemp("each"))
    assert [row["step"] for row in found] == list(range(1, 12))
    return [row["loss"] for row in found]


@pytest.mark.parametrize(
    ("every", "eval_every", "ends"),
    [(3, 0, [3, 6, 9, 11]), (4, 5, [4, 5, 8, 10, 11]), (100, 0, [11]), (5, 5, [5, 10, 11])],
)
def test_a_row_holds_the_mean_loss_of_the_steps_since_the_last(every, eval_every, ends, losses, tmp_path):
    found = rows(logging(every, eval_every), tmp_path)
    assert [row["step"] for row in found] == ends
    start = 0
    for row, end in zip(found, ends, strict=True):
        part = losses[start:end]
        assert row["loss"] == pytest.approx(sum(part) / len(part), rel=1e-9)
        start = end
    evaluated = [row["step"] for row in found if "accuracy" in row]
    assert evaluated == [end for end in ends if end == 11 or (eval_every and end % eval_every == 0)]


@pytest.mark.parametrize("stop", [4, 6])
def test_the_mean_goes_over_a_break_between_two_rows(stop, losses, tmp_path):
    """Killed with a checkpoint in the middle of a row, or right behind one: every loss counts once."""

    class Killed(Exception):
        pass

    def die(step, row):
        if step >= stop:
            raise Killed

    spec = logging(4, 6)
    with pytest.raises(Killed):
        rows(spec, tmp_path, checkpoint_seconds=0.0, progress=die)
    found = rows(spec, tmp_path)
    assert [row["step"] for row in found] == [4, 6, 8, 11]
    for row, part in zip(found, (losses[:4], losses[4:6], losses[6:8], losses[8:]), strict=True):
        assert row["loss"] == pytest.approx(sum(part) / len(part), rel=1e-9)


@pytest.mark.parametrize("name", ["parity-dense", "parity"])
def test_the_first_loss_is_the_cross_entropy_of_the_labels_that_count(name, tmp_path):
    """-log p(label) by a loop over labelled positions, with the initial weights and the first batch."""
    spec = replace(SPEC, task=task(name), training=replace(SPEC.training, steps=1))
    spec = replace(spec, evaluation=EvaluationConfig(eval_lengths=(8, 12), eval_samples=4)).resolved()
    # the stream of the training data is the run's own: pinned, for runs of older versions go on here
    data = torch.Generator().manual_seed(spec.seed * 2_654_435_761 % 2**63 + 1)
    inputs, targets = training_batch(spec, 0, data)
    with torch.no_grad():
        probabilities = build_model(spec)(inputs)[0].double().softmax(-1)
    counted = [
        -math.log(probabilities[b, t, targets[b, t]])
        for b in range(targets.shape[0])
        for t in range(targets.shape[1])
        if targets[b, t] != IGNORE
    ]
    assert len(counted) == (4 if name == "parity" else int((targets != IGNORE).sum()))
    assert rows(spec, tmp_path)[0]["loss"] == pytest.approx(sum(counted) / len(counted), rel=1e-5)


def test_the_rate_of_a_row_is_that_of_its_step(tmp_path):
    """11 steps, 20 % warm-up: two steps up to 0.02, then half a cosine over nine steps towards 1e-6."""
    cosine = [1e-6 + (0.02 - 1e-6) * (1 + math.cos(math.pi * i / 9)) / 2 for i in range(9)]
    assert [row["lr"] for row in rows(SPEC, tmp_path)] == pytest.approx([0.01, 0.02, *cosine], rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"warmup": 0.0}, [1.0, 0.854, 0.5, 0.147]),
        ({"warmup": 0.5}, [0.5, 1.0, 1.0, 0.501]),
        ({"warmup": 1.0}, [0.25, 0.5, 0.75, 1.0]),
        ({"warmup": 0.0, "schedule": "constant"}, [1.0, 1.0, 1.0, 1.0]),
        ({"warmup": 0.5, "schedule": "constant"}, [0.5, 1.0, 1.0, 1.0]),
        ({"warmup": 0.0, "final_lr": 1.0}, [1.0, 1.0, 1.0, 1.0]),
        ({"warmup": 0.0, "final_lr": 0.5}, [1.0, 0.927, 0.75, 0.573]),
    ],
)
def test_schedules_of_four_steps(changes, expected):
    config = TrainingConfig(**({"steps": 4, "lr": 1.0, "final_lr": 1e-3} | changes))
    assert [learning_rate(step, config) for step in range(4)] == pytest.approx(expected, abs=6e-4)


def test_only_matrices_are_decayed():
    """By name, for a model that has every kind of weight: not norms, biases, embeddings, A_log or D."""
    model = build_model(replace(SPEC, model=model_config("mamba", d_model=8, layers=1)))
    optimizer = make_optimizer(
        model, TrainingConfig(weight_decay=0.3, beta1=0.8, beta2=0.7, eps=1e-5, lr=0.5)
    )
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    found = {name: decay[id(p)] for name, p in model.named_parameters()}
    kept = {
        name
        for name in found
        if name.endswith(("norm.weight", ".bias", "A_log", ".D")) or "embedding" in name
    }
    assert {name for name, value in found.items() if value == 0.0} == kept
    assert {value for name, value in found.items() if name not in kept} == {0.3}
    assert {"head.weight", "blocks.0.mixer.in_proj.weight"} <= found.keys() - kept
    assert {"embedding.weight", "blocks.0.mixer.A_log", "blocks.0.mixer.D", "norm.weight"} <= kept
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"], group["lr"].item()) == ((0.8, 0.7), 1e-5, 0.5)


def test_the_last_row_is_the_result(tmp_path):
    """done.json repeats the last row, whatever was logged before."""
    found = rows(logging(4), tmp_path)
    assert json.loads((tmp_path / "done.json").read_text())["metrics"] == found[-1]
