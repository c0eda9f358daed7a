"""The demo and the runs beside `explain`: what exactly they train, typed by hand."""

from dataclasses import replace

import pytest

from statetrack.automata import DFA, explain
from statetrack.errors import UserError
from statetrack.experiments import demo, verdicts

RANGES = ("[0,1]", "[-1,1]")
SWAPS = "Swaps of five items (S5)"
# panel, model, mixer, task, group elements, width, heads, lr, steps, quick steps
DEMO = [
    ("Parity", "Mamba", "MambaConfig", "S2", "all", 64, None, 3e-3, 300, 260),
    ("Parity", "DeltaNet", "DeltaNetConfig", "S2", "all", 32, 1, 1e-2, 300, 120),
    (SWAPS, "DeltaNet", "DeltaNetConfig", "S5", "swaps", 128, 4, 1e-3, 300, 240),
]


@pytest.mark.parametrize("quick", [False, True])
def test_the_demo_curve_by_curve(quick):
    found = demo.runs(quick)
    assert len(found) == 6
    length = 16 if quick else 32
    for i, (panel, model, mixer, group, inputs, width, heads, lr, *steps) in enumerate(DEMO):
        for run, eigenvalues in zip(found[2 * i : 2 * i + 2], RANGES, strict=True):
            t, e, config = run.spec.training, run.spec.evaluation, run.spec.model
            assert (run.panel, run.model, run.eigenvalues) == (panel, model, eigenvalues)
            assert run.label == f"{model} {eigenvalues}"
            assert (type(config.mixer).__name__, config.mixer.eigenvalues) == (mixer, eigenvalues)
            assert (config.d_model, getattr(config.mixer, "heads", None)) == (width, heads)
            assert config.mixer.convolution == (4 if model == "Mamba" else 0)
            assert (run.spec.task.group, run.spec.task.inputs) == (group, inputs)
            assert (t.lr, t.steps, t.weight_decay, t.log_every) == (lr, steps[quick], 0.01, 10)
            assert (t.train_lengths, t.batch, run.spec.seed) == ((length, length), 64, 0)
            assert (e.eval_samples, e.eval_batch) == (512, 64)


def test_the_demo_measures_four_lengths_per_doubling():
    (lengths,) = {run.spec.evaluation.eval_lengths for run in demo.runs()}
    assert lengths == (
        8,
        10,
        12,
        14,
        16,
        20,
        24,
        28,
        32,
        40,
        48,
        56,
        64,
        80,
        96,
        112,
        128,
        160,
        192,
        224,
        256,
    )
    (quick,) = {run.spec.evaluation.eval_lengths for run in demo.runs(quick=True)}
    assert quick == (4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
    assert (demo.TRAIN_LENGTH, demo.MULTIPLES) == (32, (1, 2, 4, 8))


def planned(dfa, steps=100, length=8):
    return verdicts.runs(explain(dfa), steps, length)


def summary(dfa):
    """Class, model, layers, width, factors, range of every run."""
    return [
        (
            run.verdict.model.name,
            run.model,
            run.spec.model.layers,
            run.spec.model.d_model,
            getattr(run.spec.model.mixer, "householders", None),
            run.spec.model.mixer.eigenvalues,
        )
        for run in planned(dfa)
    ]


DIAGONAL = [
    ("diagonal [0,1]", "Mamba [0,1], 2 layers", 2, 32, None, "[0,1]"),
    ("DeltaNet [0,1]", "DeltaNet [0,1], 2 layers", 2, 64, 1, "[0,1]"),
    ("diagonal [-1,1], 1 layer", "Mamba [-1,1], 1 layer", 1, 32, None, "[-1,1]"),
    ("diagonal [-1,1]", "Mamba [-1,1], 2 layers", 2, 32, None, "[-1,1]"),
    ("diagonal unit circle, 1 layer", "Mamba-3 unit-circle, 1 layer", 1, 32, None, "unit-circle"),
    ("diagonal unit circle", "Mamba-3 unit-circle, 2 layers", 2, 32, None, "unit-circle"),
]
DELTANET = ("DeltaNet [-1,1], 1 layer", "DeltaNet [-1,1], 1 layer", 1, 64, 1, "[-1,1]")


def test_a_language_that_is_settled_for_deltanet_is_trained_with_it():
    """(aaa|b)* counts mod 3 and has a sink: no for one layer of DeltaNet, yes for turns in several layers."""
    assert summary(DFA.from_regex("(aaa|b)*", "ab")) == [*DIAGONAL[:-1], DELTANET, DIAGONAL[-1]]


def test_a_cascade_that_is_not_needed_is_not_trained():
    """(aa|b)* is already within the diagonal class; unknown classes are never trained."""
    assert summary(DFA.from_regex("(aa|b)*", "ab")) == DIAGONAL


def test_a_group_is_trained_with_one_layer():
    one = [(name, model.replace("2 layers", "1 layer"), 1, *rest) for name, model, _, *rest in DIAGONAL[:2]]
    assert summary(DFA.from_group("S5")) == [
        *one,
        DIAGONAL[2],
        DIAGONAL[4],
        DELTANET,
        ("DeltaNet with rotations, 1 layer", "DeltaNet unit-circle, 1 layer", 1, 64, 1, "unit-circle"),
        ("DeltaProduct_4 [-1,1], 1 layer", "DeltaProduct_4, 1 layer", 1, 64, 4, "[-1,1]"),
    ]


@pytest.mark.parametrize(
    ("points", "last"), [(7, "DeltaProduct_6, 1 layer"), (8, "DeltaNet unit-circle, 1 layer")]
)
def test_more_than_six_factors_are_left_out(points, last):
    """All permutations of n points, by a cycle and a swap, take n - 1 factors in one layer."""
    cycle, swap = [*range(1, points), 0], [1, 0, *range(2, points)]
    assert summary(DFA("ab", {"a": cycle, "b": swap}, 0, [0]))[-1][1] == last


def test_runs_are_on_live_words_of_the_minimal_automaton():
    dfa = DFA.from_regex("(aa|b)*", "ab")
    for run in planned(dfa, steps=57, length=6):
        t, e = run.spec.training, run.spec.evaluation
        assert (run.spec.task.words, run.spec.task.dfa) == ("live", dfa.minimal())
        assert (t.steps, t.lr, t.weight_decay, t.log_every) == (57, 3e-3, 0.01, 5)
        assert (t.train_lengths, t.batch) == ((6, 6), 64)
        assert (e.eval_lengths, e.eval_samples, e.eval_batch) == ((6, 12, 24, 48), 512, 128)
    (first, *_) = planned(dfa, steps=3)
    assert first.spec.training.log_every == 1
    assert verdicts.MULTIPLES == (1, 2, 4, 8)


def test_a_measured_class_as_plain_data():
    (run, *_) = planned(DFA.from_regex("(aa|b)*", "ab"))
    measured = verdicts.Measured(run.verdict, run.model, [1.0, 0.5], [0.6, 0.4], "folder", 2.5)
    assert measured.to_dict() == {
        "class": "diagonal [0,1]",
        "answer": "no",
        "model": "Mamba [0,1], 2 layers",
        "accuracy": [1.0, 0.5],
        "guess": [0.6, 0.4],
        "folder": "folder",
        "seconds": 2.5,
    }


@pytest.mark.parametrize("regex", ["[ab]*", "(a|b)*"])
def test_a_single_state_is_nothing_to_train(regex):
    with pytest.raises(UserError, match="single state"):
        planned(DFA.from_regex(regex, "ab"))


def test_where_nothing_is_settled_there_is_nothing_to_train():
    found = explain(DFA.from_regex("(aa|b)*", "ab"))
    unsettled = replace(found, verdicts=[replace(v, answer="unknown") for v in found.verdicts])
    with pytest.raises(UserError, match="no class is both settled and small enough"):
        verdicts.runs(unsettled, 10, 8)
