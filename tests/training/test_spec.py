"""Specs: JSON and back, ids, and what is refused."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

from statetrack.errors import UserError
from statetrack.layers import PRESETS, model_config
from statetrack.spec import RunSpec, TrainingConfig
from statetrack.tasks import TASKS, task
from statetrack.training.loop import resolve_device
from statetrack.training.optimizer import decayed_names, learning_rate, make_optimizer
from statetrack.training.state import build_model


@pytest.mark.parametrize("name", TASKS)
def test_every_task_survives_json(name):
    spec = RunSpec(task=task(name)).resolved()
    assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_json(name):
    spec = RunSpec(model=model_config(name)).resolved()
    assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_every_task_and_preset_has_its_own_id():
    specs = [RunSpec(task=t, model=m) for t in dict.fromkeys(TASKS.values()) for m in PRESETS.values()]
    assert len({spec.id for spec in specs}) == len(specs)


def test_defaults_written_out_do_not_change_the_id():
    spec = RunSpec()
    assert spec.id == spec.resolved().id
    assert replace(spec, seed=1).id != spec.id


def test_initial_weights_depend_on_the_seed_alone():
    spec = RunSpec().resolved()
    torch.manual_seed(123)
    first = build_model(spec)
    torch.rand(5)
    second = build_model(spec)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def broken(**changes):
    """A spec as a dict, with nested fields replaced: training__lr=..."""
    data = RunSpec().to_dict()
    for path, value in changes.items():
        *parents, name = path.split("__")
        node = data
        for parent in parents:
            node = node[parent]
        node[name] = value
    return data


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sead": 3}, "Did you mean 'seed'"),
        ({"kind": "RunSpc"}, "Did you mean 'RunSpec'"),
        ({"training__steps": 0}, "steps is 0, expected at least 1"),
        ({"training__steps": 1.5}, "spec.training.steps is 1.5, expected int"),
        ({"training__steps": True}, "expected int"),
        ({"training__lr": -1.0}, "lr is -1.0"),
        ({"training__lr": float("nan")}, "lr is nan"),
        ({"training__warmup": 2.0}, "from 0 to 1"),
        ({"training__train_lengths": [9, 5]}, "train_lengths is 9 5"),
        ({"training__train_lengths": [5]}, "expected 2 values"),
        ({"training__schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"evaluation__eval_lengths": [64, 32]}, "rising lengths"),
        ({"evaluation__eval_lengths": []}, "eval_lengths is empty"),
        ({"training__lr": float("inf")}, "lr is inf, expected at least 0, and a finite number"),
        ({"evaluation__eval_lengths": [-1, 32]}, "rising lengths"),
        ({"evaluation__eval_samples": 0}, "eval_samples is 0"),
        ({"model__mixer__heads": 3}, "heads = 3 does not divide 128"),
        ({"model__mixer__eigenvalues": "[0,2]"}, "eigenvalues"),
        ({"model__mixer": 3}, "expected MixerConfig"),
        ({"kind": []}, "is not known"),
        ({"training__steps": {"kind": "Parity"}}, "is a Parity, expected int"),
        ({"task": {"kind": "TrainingConfig"}}, "expected Task"),
        ({"model__mixer": {"kind": "Parity"}}, "expected MixerConfig"),
        ({"task": {"kind": "Automaton"}}, "Automaton needs"),
        ({"task__group": ";"}, "has no generators"),
        ({"seed": -1}, "seed is -1"),
        ({"training__train_samples": 3}, "at least batch = 64"),
        ({"model__mixer__kind": "os.system"}, "is not known"),
        ({"task": "parity"}, "expected Task"),
    ],
)
def test_wrong_specs_are_refused_with_the_field_named(changes, message):
    with pytest.raises(UserError, match=message):
        RunSpec.from_dict(broken(**changes))


@pytest.mark.parametrize(
    ("text", "message"), [(None, "does not exist"), ("{", "not a readable JSON"), ("[]", "kind")]
)
def test_files_that_are_no_specs_are_refused(text, message, tmp_path):
    path = tmp_path / "spec.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        RunSpec.load(path)


def test_learning_rate_warms_up_then_falls_to_its_end():
    config = TrainingConfig(steps=100, lr=1.0, warmup=0.1, final_lr=0.01)
    rates = [learning_rate(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.01, abs=1e-3)
    assert learning_rate(99, replace(config, schedule="constant")) == 1.0


def test_short_sequences_and_what_follows_have_a_schedule_each():
    config = TrainingConfig(steps=50, short_steps=20, lr=1.0, warmup=0.1, final_lr=0.01)
    rates = [learning_rate(step, config) for step in range(50)]
    short, rest = replace(config, steps=20, short_steps=0), replace(config, steps=30, short_steps=0)
    assert rates[:20] == [learning_rate(step, short) for step in range(20)]
    assert rates[20:] == [learning_rate(step, rest) for step in range(30)]
    assert [learning_rate(s, replace(short, short_steps=60)) for s in range(20)] == rates[:20]


@pytest.mark.parametrize("name", PRESETS)
def test_norms_biases_embeddings_and_decay_rates_are_not_decayed(name):
    model = build_model(RunSpec(model=model_config(name, layers=1)).resolved())
    optimizer = make_optimizer(model, TrainingConfig(), decayed_names(model))
    decayed, kept = (group["params"] for group in optimizer.param_groups)
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(p)].rsplit(".", 1)[-1] for p in decayed} == {"weight"}
    assert not [names[id(p)] for p in decayed if "embedding" in names[id(p)] or "norm" in names[id(p)]]
    assert not [names[id(p)] for p in kept if names[id(p)].endswith("head.weight")]


@pytest.mark.parametrize("name", PRESETS)
def test_matrices_are_decayed_but_for_embeddings_and_those_that_drive_a_recurrence(name):
    """By name, in the model's order within each group: checkpoints number the moments in that order."""
    model = build_model(RunSpec(model=model_config(name, layers=2)).resolved())
    extra = {
        "mamba": ["mixer.A_log"],
        "mamba3": ["mixer.B_bias", "mixer.C_bias"],
        "slstm": ["mixer.recurrent", "mixer.bias"],
    }.get(name, [])
    spared = {"embedding.weight", *(f"blocks.{i}.{end}" for i in range(2) for end in extra)}
    named = dict(model.named_parameters())
    assert spared <= named.keys()
    decayed = [p for n, p in named.items() if p.ndim >= 2 and n not in spared]
    kept = [p for n, p in named.items() if p.ndim < 2 or n in spared]
    groups = make_optimizer(model, TrainingConfig(), decayed_names(model)).param_groups
    assert [[id(p) for p in group["params"]] for group in groups] == [
        [id(p) for p in group] for group in (decayed, kept)
    ]
    assert [group["weight_decay"] for group in groups] == [TrainingConfig.weight_decay, 0.0]


def test_an_absent_device_is_refused():
    with pytest.raises(UserError, match="expected auto, cpu or cuda"):
        resolve_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no usable CUDA GPU"):
            resolve_device("cuda")
