"""The plan of the language-model experiment as code: its runs, and its rule on made-up differences."""

from dataclasses import replace

import pytest

from statetrack.experiments import language_models
from statetrack.experiments.language_models import PAST, WITHIN, answer, kind_of, spikes, verdicts
from statetrack.layers.sizes import count_parameters
from statetrack.lm.compare import Difference
from statetrack.lm.shards import write_shards

BASE = Difference(
    split="heldout-code",
    first="DeltaNet [0,1]",
    second="DeltaNet [-1,1]",
    low=0,
    high=2048,
    mean=-0.03,
    lower=-0.04,
    upper=-0.02,
    by_seed=(-0.025, -0.035),
    spread=(0.004, 0.005),
    units=72,
    tokens=72 * 2048,
)


def difference(mean: float, width: float = 0.005) -> Difference:
    return replace(BASE, mean=mean, lower=mean - width, upper=mean + width, by_seed=(mean, mean))


@pytest.fixture
def planned(tmp_path):
    write_shards(tmp_path / "data", {"train": [[1, 2, 3]], "heldout": [[1]]}, 32_000, 0)
    return language_models.runs(str(tmp_path / "data"))


def test_the_plan_has_eight_runs_of_150_million_tokens(planned):
    assert len({run.id for run in planned}) == 8
    assert {r.spec.training.steps * r.spec.training.batch * r.spec.task.context for r in planned} == {
        150_011_904
    }
    assert count_parameters(planned[0].spec.model) == 55_031_808


def test_the_runs_of_a_pair_differ_in_the_range_alone(planned):
    for first, second in zip(planned[::2], planned[1::2], strict=True):
        model = replace(first.spec.model, mixer=replace(first.spec.model.mixer, eigenvalues="[-1,1]"))
        assert first.eigenvalues == "[0,1]"
        assert replace(first.spec, model=model) == second.spec


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "lower"),
        ({"mean": 0.03, "lower": 0.02, "upper": 0.04, "by_seed": (0.025, 0.035)}, "higher"),
        ({"upper": 0.001}, "undecided"),  # the interval holds 0
        ({"by_seed": (-0.061, 0.001)}, "undecided"),  # the seeds disagree
        ({"spread": (0.001, 0.031)}, "undecided"),  # seeds differ by more than the ranges
        ({"mean": 0.0, "lower": -0.009, "upper": 0.009, "by_seed": (-0.001, 0.001)}, "equal"),
        ({"mean": -0.006, "lower": -0.008, "upper": -0.004, "by_seed": (-0.006, -0.006)}, "lower"),
        ({"by_seed": (-0.03,)}, "lower"),
        ({"by_seed": (-0.015,), "mean": -0.015, "lower": -0.02, "upper": -0.01}, "undecided"),  # one seed
    ],
)
def test_a_difference_is_judged_by_interval_seeds_and_spread(changes, kind):
    assert kind_of(replace(BASE, **changes)) == kind


def test_a_spike_stands_above_the_losses_before_it_and_after_the_warm_up():
    rows = [{"step": i, "loss": 3.0} for i in range(1, 31)]
    rows[4]["loss"], rows[20]["loss"], rows[25]["loss"] = 9.0, 3.31, 3.29
    assert spikes(rows, warmup_steps=2) == 1
    assert spikes(rows, warmup_steps=25) == 0


def everything(mixture: float, code: float, math: float, recall: float) -> dict:
    within = {"mixture": mixture, "code": code, "math": math, "recall": recall, "prose": -0.03}
    found = {("DeltaNet", f"heldout-{name}", WITHIN): difference(d) for name, d in within.items()}
    return found | {
        ("DeltaNet", f"heldout-{name}", PAST): difference(within[name]) for name in ("code", "math")
    }


def test_the_papers_findings_make_the_answer_yes():
    found = verdicts(everything(0.012, -0.03, -0.03, 0.02), difference(-0.05), [("DeltaNet, seed 0", 1, 1)])
    assert {v.name: v.answer for v in found if v.name != "B"} == dict.fromkeys(
        ("S", "V", "C", "M", "CL", "ML", "R", "P", "X"), "yes"
    )
    assert answer(found) == "yes, as in the paper"


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((0.012, 0.03, 0.03, 0.02), "no"),
        ((0.012, 0.03, -0.03, 0.02), "in part"),
        ((0.05, -0.03, -0.03, 0.02), "in part"),  # validation clearly worse
        ((0.012, 0.004, 0.03, 0.02), "no"),  # code equal
    ],
)
def test_other_outcomes_make_other_answers(losses, expected):
    assert answer(verdicts(everything(*losses), None, [])) == expected


def test_a_wide_interval_on_code_leaves_the_answer_open():
    found = everything(0.012, 0.03, 0.03, 0.02)
    found["DeltaNet", "heldout-code", WITHIN] = difference(0.004, width=0.02)
    assert answer(verdicts(found, None, [])) == "undecided"


def test_a_run_that_diverges_or_spikes_more_is_less_stable():
    def stable(pairs):
        return verdicts({}, None, pairs)[0].answer

    assert stable([("DeltaNet, seed 0", 0, None)]) == "no"
    assert stable([("DeltaNet, seed 0", 1, 1), ("DeltaNet, seed 1", 0, 1)]) == "no"
    assert stable([("DeltaNet, seed 0", 2, 1)]) == "yes"
    assert stable([]) == "not measured"


def test_mamba_is_judged_on_code_and_mathematics_together():
    def mamba(code, math):
        pair = {("Mamba", "heldout-code", WITHIN): code, ("Mamba", "heldout-math", WITHIN): math}
        return verdicts({k: difference(d) for k, d in pair.items()}, None, [])[-1].answer

    assert mamba(0.03, 0.04) == "yes"
    assert mamba(-0.03, -0.04) == "no"
    assert mamba(0.03, -0.04) == "undecided"
    assert verdicts({}, None, [])[-1].answer == "not measured"
