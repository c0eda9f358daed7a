"""The items: how many runs each scale has, and the protocol values of the paper, pinned."""

from dataclasses import fields

import pytest

from statetrack.errors import UserError
from statetrack.experiments import (
    fig_parity,
    fig_s5,
    fig_z60,
    ours_gates,
    ours_length,
    ours_trackers,
    tab_chomsky,
)
from statetrack.experiments.item import SCALES, LabelledRun
from statetrack.experiments.order import Order
from statetrack.experiments.registry import ITEMS, item

PAPER_RUNS = {"fig-parity": 24, "tab-chomsky": 624, "fig-chomsky-length": 624, "fig-s5": 291, "fig-z60": 30}
PAPER_RUNS |= {"ours-length": 189, "ours-trackers": 12}
PAPER_RUNS |= {"ours-gates": 84, "ours-gates-arithmetic": 336}


@pytest.fixture(scope="module")
def paper():
    return {name: of.runs("paper") for name, of in ITEMS.items()}


@pytest.mark.parametrize("name", PAPER_RUNS)
def test_paper_scale_has_every_run_of_the_item_once(name, paper):
    assert len(paper[name]) == PAPER_RUNS[name]
    assert len({run.id for run in paper[name]}) == PAPER_RUNS[name]


@pytest.mark.parametrize("name", PAPER_RUNS)
def test_published_numbers_and_orderings_belong_to_runs(name, paper):
    keys = {(run.panel, run.label) for run in paper[name]}
    assert set(ITEMS[name].paper) <= keys
    keys |= {(run.panel, run.label) for run in ITEMS[name].runs("quick")}  # Z3 is there only
    assert {(c.panel, side) for c in ITEMS[name].claims for side in (c.better, c.worse)} <= keys


def test_runs_survive_json_with_their_id(paper):
    for runs in paper.values():
        for run in runs[::29]:
            assert LabelledRun.from_dict(run.to_dict()).id == run.id


@pytest.mark.parametrize("name", ITEMS)
@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_says_what_differs_from_the_paper(name, scale):
    assert ITEMS[name].differences[scale]


def test_gates_have_every_mixer_in_each_of_its_ranges(paper):
    """All runs are ours; DeltaNet and Mamba-3 also have the unit circle."""
    for name, panels in (("ours-gates", 3), ("ours-gates-arithmetic", 1)):
        assert all(run.ours for run in paper[name])
        cells = {(run.panel, run.label) for run in paper[name]}
        assert len(cells) == panels * sum(len(mixer.ranges) for mixer in ours_gates.MIXERS)
        assert {run.label for run in paper[name] if "unit-circle" in run.label} == {
            "Mamba-3 unit-circle",
            "DeltaNet unit-circle",
        }
    for run in paper["ours-gates"]:
        assert run.eigenvalues == run.label.split()[-1]
        assert (run.spec.model.layers, run.spec.training.steps) == (1, 312_500)


def test_quick_gates_are_parity_z3_and_swaps_at_eight_times_the_trained_length():
    runs = ITEMS["ours-gates"].runs("quick")
    assert {(run.panel, run.spec.task.group) for run in runs} == {
        ("Parity", "S2"),
        ("Z3", "Z3"),
        ("S5 swaps", "S5"),
    }
    for run in runs:
        assert run.spec.evaluation.eval_lengths[-1] == 8 * run.spec.training.train_lengths[1]


def test_gates_expect_what_the_theory_says_one_layer_can_track():
    claims = ITEMS["ours-gates"].claims
    labels = {run.label for run in ITEMS["ours-gates"].runs("quick") if run.eigenvalues != "[0,1]"}
    assert {claim.better for claim in claims if claim.panel == "Parity"} == labels
    delta = {label for label in labels if label.startswith(("Delta", "Gated", "KDA"))}
    assert {claim.better for claim in claims if claim.panel == "S5 swaps"} == delta
    for panel in ("Z3", "Z60"):  # what has rotations, two reflections, or one and signs per channel
        assert {claim.better for claim in claims if claim.panel == panel} == {
            "Mamba-3 unit-circle",
            "DeltaNet unit-circle",
            "DeltaProduct-2 [-1,1]",
            "KDA, signed gate [-1,1]",
        }
    assert all(claim.worse.endswith("[0,1]") for claim in claims)


def test_quick_gates_have_hard_gates_and_betas_and_isometry_beyond_the_unit_interval():
    for run in ITEMS["ours-gates"].runs("quick"):
        mixer, delta = run.spec.model.mixer, hasattr(run.spec.model.mixer, "beta")
        assert getattr(mixer, "beta", "hard") == "hard"
        assert getattr(mixer, "gate", "hard") == "hard"
        assert run.spec.training.isometry == (0.003 if delta and run.eigenvalues != "[0,1]" else 0)
        assert getattr(mixer, "convolution", 0) <= 1


def test_word_problems_are_trained_as_in_appendix_e2(paper):
    protocol = [run for run in paper["fig-s5"] if run.label != fig_s5.DECAYING_LABEL]
    for run in protocol + paper["fig-z60"]:
        t, e = run.spec.training, run.spec.evaluation
        assert t.eps == (1e-6 if run.label.endswith("eps 1e-6") else 1e-8)
        assert (t.steps, t.batch, t.lr, t.weight_decay, t.clip) == (312_500, 512, 1e-4, 0.01, 1.0)
        assert (t.schedule, t.warmup, t.precision) == ("constant", 0.0, "bfloat16")
        k = run.spec.task.tokens_per_element
        assert t.train_lengths == ((64, 64) if k > 1 else (32, 32))
        assert (e.eval_samples, e.eval_lengths[-1]) == (40_000, 500)
        assert run.spec.model.d_model == 128


def test_word_problem_models_are_those_of_the_paper_and_ours():
    runs = [run for run in fig_s5.runs("paper") if run.panel == fig_s5.SWAPS and run.spec.seed == 0]
    theirs = {run.label for run in runs if not run.ours and run.spec.training.eps == 1e-8}
    assert {f"{label}, eps 1e-6" for label in theirs} == {r.label for r in runs if not r.ours} - theirs
    ranged = {f"{m} {r} ({n}L)" for m in ("DeltaNet", "Mamba") for r in ("[0,1]", "[-1,1]") for n in (1, 5)}
    assert theirs == ranged | {"Full matrix (1L)"}
    assert {run.spec.model.mixer.householders for run in runs if "DeltaProduct" in run.label} == {2, 4}
    deltanets = [run for run in runs if run.family == "DeltaNet"]
    assert all(run.spec.model.mixer.convolution == 0 and run.spec.model.mlp_ratio == 4 for run in deltanets)
    assert all(run.spec.model.mixer.heads == 4 for run in deltanets)


def test_only_one_row_leaves_the_protocol_and_it_is_ours(paper):
    runs = [run for run in paper["fig-s5"] if run.label == fig_s5.DECAYING_LABEL]
    assert {(run.panel, run.ours, run.spec.seed) for run in runs} == {(fig_s5.ALL, True, s) for s in range(3)}
    t = runs[0].spec.training
    assert (t.steps, t.lr, t.schedule, t.warmup, t.weight_decay) == (60_000, 2e-3, "cosine", 0.02, 0.0)


def test_seeds_of_the_paper():
    assert {run.spec.seed for run in fig_s5.runs("paper")} == {0, 1, 2}
    assert {run.spec.seed for run in fig_z60.runs("paper")} == {0}
    assert {run.spec.seed for run in tab_chomsky.runs("paper")} == {0, 1, 2}
    assert {run.spec.seed for run in fig_parity.runs("paper", seeds=5)} == set(range(5))


def test_a_row_of_the_length_table_changes_one_option_of_the_base_and_the_recipe_several(paper):
    by_cell = {(run.panel, run.label.split(", ", 1)[1], run.spec.seed): run for run in paper["ours-length"]}
    options = {"eps", "centred_gradient", "z_loss", "label_smoothing", "initial_states", "select", "beta"}
    options |= {"isometry"}
    carried = {"initial_states", "carried_batches"}
    decay = {"schedule", "warmup", "weight_decay"}
    for (panel, name, seed), run in by_cell.items():
        base = by_cell[panel, "base", seed].spec
        changed = _changed(base.training, run.spec.training) | _changed(
            base.model.mixer, run.spec.model.mixer
        )
        if name == "decaying rate":
            assert changed == decay
        elif name.startswith("recipe"):
            lr = set() if panel == ours_length.ALL else {"lr"} | decay
            expected = {"eps", "beta"} | lr | carried
            other = {
                "recipe long": set(),
                "recipe long, empty states": carried,
                "recipe long, sigmoid beta": {"beta"},
            }
            assert changed == expected ^ other[name]
        elif name == "hard beta, isometry":
            assert changed == {"beta", "isometry"}
        elif name == "carried while right":
            assert changed == carried
        else:
            assert len(changed & options) == len(changed) == (name != "base")
        assert run.ours
        assert run.spec.training.train_lengths == (32, 32)
        assert ours_length.GOALS[panel] in run.spec.evaluation.eval_lengths
        assert run.spec.evaluation.eval_lengths[-1] == 4096


def _changed(a, b):
    return {field.name for field in fields(a) if getattr(a, field.name) != getattr(b, field.name)}


def test_the_goals_of_the_recipe_are_run_first():
    of = ITEMS["ours-length"]
    everything = of.runs("paper")
    first = sorted(everything, key=Order(of, everything).key())[:13]
    goals = [ours_length.SWAPS, ours_length.THREE, ours_length.ALL, ours_length.Z60]
    assert [run.panel for run in first[:12]] == [panel for panel in goals for _ in range(3)]
    assert {run.label.split(", ", 1)[1] for run in first[:12]} == {"recipe long"}
    assert first[12].label == "DeltaNet, base"


def test_trackers_are_one_layer_with_as_many_reflections_as_a_letter_needs(paper):
    runs = paper["ours-trackers"]
    assert {(run.panel, run.spec.seed) for run in runs} == {
        (panel, seed) for panel in ours_trackers.TRACKERS for seed in range(3)
    }
    for run in runs:
        model, mixer = run.spec.model, run.spec.model.mixer
        assert (model.layers, mixer.convolution, mixer.qk_activation) == (1, 0, "identity")
        assert (mixer.beta, mixer.eigenvalues) == ("hard", "[-1,1]")
        # two reflections are a rotation; a permutation of five points is at most four reflections
        assert mixer.householders == (4 if run.panel == fig_s5.ALL else 1 if run.panel == fig_s5.SWAPS else 2)
        assert {ours_length.GOALS[run.panel], 4096} <= set(run.spec.evaluation.eval_lengths)
        assert run.spec.evaluation.eval_samples == 4000


def test_trackers_are_trained_on_words_far_shorter_than_their_goals(paper):
    for run in paper["ours-trackers"]:
        t = run.spec.training
        assert t.train_lengths == ((128, 128) if run.panel == ours_length.Z60 else (64, 64))
        assert 8 * t.train_lengths[1] <= ours_length.GOALS[run.panel]
        assert t.consistency == (1e-3 if run.panel == fig_s5.ALL else 1e-2)
        assert (t.schedule, t.weight_decay, t.eps, t.isometry) == ("cosine", 0.0, 1e-6, 0.003)


def test_trackers_of_many_letters_begin_with_two_at_a_time_and_have_no_mlp(paper):
    """Only these short sequences are carried on."""
    for run in paper["ours-trackers"]:
        t, curriculum = run.spec.training, run.panel in (fig_s5.ALL, ours_length.Z60)
        assert (t.short_steps > 0) == curriculum == (run.spec.model.mlp_ratio == 0)
        assert t.initial_states == ("carried-right" if curriculum else "empty")
        assert (t.short_length, t.short_batch) == (2, 256 if curriculum else 0)
        assert t.short_steps < t.steps


def test_trackers_at_quick_scale_have_half_the_steps():
    scales = (ITEMS["ours-trackers"].runs(scale) for scale in ("quick", "paper"))
    for quick, paper in zip(*scales, strict=True):
        changed = _changed(quick.spec.training, paper.spec.training)
        assert changed in ({"steps"}, {"steps", "short_steps"})
        assert 2 * quick.spec.training.steps == paper.spec.training.steps
        assert 2 * quick.spec.training.short_steps == paper.spec.training.short_steps


def test_formal_languages_are_trained_as_in_appendix_e1(paper):
    for run in paper["tab-chomsky"]:
        t, e = run.spec.training, run.spec.evaluation
        arithmetic = run.panel != tab_chomsky.PARITY
        assert (t.steps, t.weight_decay, t.schedule, t.warmup, t.final_lr) == (
            100_000,
            0.1,
            "cosine",
            0.1,
            1e-6,
        )
        assert (t.beta1, t.beta2, t.eps) == (0.9, 0.999, 1e-8)
        assert t.batch == (512 if run.family == "mLSTM" else 1024)
        xlstm = run.family in ("mLSTM", "sLSTM")
        assert t.clip == (1.0 if arithmetic and not xlstm else 0.0)
        assert run.spec.model.layers == (3 if arithmetic else 2)
        assert run.spec.model.d_model == (64 if xlstm and arithmetic else 128)
        assert (e.eval_samples, e.eval_lengths[0], e.eval_lengths[-1]) == (8192, 40, 256)
        if xlstm:
            assert run.spec.model.mixer.heads == (1 if arithmetic else 4)
            assert (run.spec.model.mixer.bias_init == "standard") == arithmetic
    assert {run.spec.training.lr for run in paper["tab-chomsky"]} == {1e-2, 1e-3, 5e-4, 1e-4}
    assert all(
        run.spec.training.train_lengths[1] == 40 for run in paper["tab-chomsky"] if run.panel == "Parity"
    )


def test_the_two_chomsky_items_share_their_runs():
    ids = [{run.id for run in ITEMS[name].runs("quick")} for name in ("tab-chomsky", "fig-chomsky-length")]
    assert ids[0] == ids[1]


def test_published_values_of_table_3():
    best = {key: value.best for key, value in tab_chomsky.PAPER.items()}
    assert best["Parity", "DeltaNet [-1,1]"] == 1.000
    assert best[tab_chomsky.PLAIN, "DeltaNet [-1,1]"] == 0.971
    assert best[tab_chomsky.BRACKETS, "Mamba [0,1]"] == 0.123
    assert best[tab_chomsky.NO_MULT, "sLSTM"] is None
    assert tab_chomsky.PAPER[tab_chomsky.NO_MULT, "sLSTM"].median == 0.153


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="Did you mean 'fig-parity'"):
        item("fig-party")
    with pytest.raises(UserError, match="Did you mean 'quick'"):
        fig_parity.runs("quik")
