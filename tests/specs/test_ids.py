"""Ids stay what they are: those of today's specs, and those of specs whose classes gain fields later."""

import json
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path

import pytest

from statetrack import config
from statetrack.config import added, from_dict, register_kind, run_id, to_dict
from statetrack.errors import UserError
from statetrack.layers import PRESETS, ModelConfig
from statetrack.run import run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import TASKS, Automaton
from statetrack.training import Options

# A spec of every kind as it was before any field was added, with its id. Lines may be added, never changed.
KEPT = [json.loads(line) for line in (Path(__file__).parent / "ids.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("line", KEPT, ids=lambda line: line["name"])
def test_the_id_of_a_kept_spec_is_the_same_for_good(line):
    assert RunSpec.from_dict(line["spec"]).id == line["id"]


def test_a_spec_of_every_kind_is_kept():
    def kinds(node):
        if isinstance(node, dict):
            yield node["kind"]
            for value in node.values():
                yield from kinds(value)

    today = {RunSpec, TrainingConfig, EvaluationConfig, ModelConfig, Automaton}
    today |= {*map(type, TASKS.values())} | {type(preset.mixer) for preset in PRESETS.values()}
    assert {cls.__name__ for cls in today} <= {kind for line in KEPT for kind in kinds(line["spec"])}


def grown(cls, *fields):
    """The class as it would be with more fields, under its own name."""
    names = {"__module__": cls.__module__}
    return make_dataclass(cls.__name__, fields, bases=(cls,), frozen=True, namespace=names)


@pytest.fixture
def kinds(monkeypatch):
    """The table of kinds, for this test only."""
    monkeypatch.setattr(config, "_KINDS", dict(config._KINDS))


def test_an_added_field_at_its_default_moves_no_id_and_another_value_does():
    Grown = grown(TrainingConfig, ("accumulate", int, added(1)))
    spec = RunSpec(training=Grown(steps=7)).resolved()
    assert spec.id == RunSpec(training=TrainingConfig(steps=7)).id
    assert replace(spec, training=replace(spec.training, accumulate=2)).id != spec.id
    assert spec.to_dict()["training"]["accumulate"] == 1


def test_a_field_that_is_not_declared_as_added_moves_the_id():
    Grown = grown(TrainingConfig, ("accumulate", int, field(default=1)))
    assert RunSpec(training=Grown()).id != RunSpec().id


def test_a_whole_part_can_be_added_and_counts_once_it_is_used():
    Part = make_dataclass("Part", [("rate", float, field(default=0.0))], frozen=True)
    Grown = grown(RunSpec, ("part", Part, added(default_factory=Part)))
    assert Grown().id == RunSpec().id
    assert Grown(part=Part(0)).id == RunSpec().id  # 0 and 0.0 are one value
    assert Grown(part=Part(0.5)).id != RunSpec().id


def test_an_added_field_of_an_added_part_is_left_out_at_its_default_too():
    Part = make_dataclass("Part", [("rate", float, field(default=0.0))], frozen=True)
    Later = grown(Part, ("decay", float, added(0.9)))
    first, later = grown(RunSpec, ("part", Part, added(None))), grown(RunSpec, ("part", Later, added(None)))
    assert later(part=Later(0.5)).id == first(part=Part(0.5)).id
    assert later(part=Later(0.5, decay=0.8)).id != first(part=Part(0.5)).id


def test_a_spec_from_before_a_field_is_read_with_its_default(kinds):
    before = RunSpec(training=TrainingConfig(steps=7)).to_dict()
    Grown = grown(TrainingConfig, ("accumulate", int, added(1)))
    register_kind(Grown)
    spec = RunSpec.from_dict(before)
    assert spec.training.accumulate == 1
    assert spec.id == run_id(RunSpec(training=TrainingConfig(steps=7)).resolved())


def test_added_fields_are_keywords_so_that_no_positional_call_moves():
    @dataclass(frozen=True)
    class Base:
        size: int = added(3)

    @dataclass(frozen=True)
    class Derived(Base):
        name: str

    assert Derived("a") == Derived(name="a", size=3)
    with pytest.raises(TypeError, match="either a default or a default_factory"):
        added()


def test_a_part_that_may_be_absent_survives_json(kinds):
    Part = make_dataclass("Part", [("rate", float, field(default=0.0))], frozen=True)
    Whole = make_dataclass(
        "Whole",
        [("part", Part | None, added(None)), ("parts", tuple[Part, ...], added(()))],
        frozen=True,
    )
    register_kind(Part)
    register_kind(Whole)
    for whole in (Whole(), Whole(part=Part(0.5), parts=(Part(1.0), Part(2.0)))):
        assert from_dict(json.loads(json.dumps(to_dict(whole)))) == whole


def test_a_folder_is_refused_for_its_spec_even_where_two_ids_are_the_same(tmp_path, monkeypatch):
    """As they would be if the default of an added field were changed."""
    monkeypatch.setattr("statetrack.spec.run_id", lambda config: "same")
    monkeypatch.chdir(tmp_path)
    short = TrainingConfig(steps=1, batch=2, train_lengths=(4, 4))
    spec = RunSpec(training=short, evaluation=EvaluationConfig((4,), eval_samples=2)).resolved()
    run(spec, options=Options(device="cpu", say=lambda text: None))
    assert (tmp_path / "results/same/done.json").exists()
    with pytest.raises(UserError, match="different spec"):
        run(replace(spec, seed=1), options=Options(device="cpu", say=lambda text: None))
