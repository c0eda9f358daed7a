"""How far a tracker stays right beyond its training length: each training option alone, and the recipe.

Beyond the paper. Four group word problems, each with the smallest model of one layer that can represent its
group, trained at length 32 and evaluated at lengths up to 4,096. docs/length.md explains the options.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from statetrack.experiments.fig_s5 import ALL, DECAYING, SWAPS, THREE
from statetrack.experiments.item import (
    NOT_IN_PAPER,
    PRECISION,
    Item,
    LabelledRun,
    NamedModel,
    Scale,
    check_scale,
)
from statetrack.experiments.word_problems import PAPER_TRAINING, PROTOCOL, tiny
from statetrack.layers import model_config
from statetrack.recipes import recipe
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import task

Z60 = "Z60"
TASKS = {SWAPS: "s5-swaps", THREE: "s5-up-to-3", ALL: "s5", Z60: "z60"}
_PLAIN: dict[str, Any] = {"convolution": 0, "qk_activation": "identity"}  # as in the paper's word problems
MODELS = {
    SWAPS: NamedModel("DeltaNet", "DeltaNet", model_config("deltanet-no-conv")),
    # a letter that moves three points, and a rotation, are two reflections
    THREE: NamedModel("DeltaProduct-2", "DeltaProduct-2", model_config("deltaproduct", **_PLAIN)),
    # a permutation of five points is at most four
    ALL: NamedModel(
        "DeltaProduct-4", "DeltaProduct-4", model_config("deltaproduct", householders=4, **_PLAIN)
    ),
    Z60: NamedModel("DeltaProduct-2", "DeltaProduct-2", model_config("deltaproduct", **_PLAIN)),
}
# Goals of the recipe: sequence accuracy 0.99 at these lengths.
GOALS = {SWAPS: 4096, THREE: 2048, ALL: 1024, Z60: 1024}
QUICK = (SWAPS, THREE)  # the others are not learned in so few steps


@dataclass(frozen=True)
class Setting:
    """What a row of the table changes in the base setting."""

    training: Mapping[str, Any] = field(default_factory=dict)
    mixer: Mapping[str, Any] = field(default_factory=dict)


_LONG = recipe("long")
_RECIPE = {**_LONG.training, **_LONG.carrying}
_HARD = {"beta": "hard"}  # none of the models here has a gate
BASE, RECIPE = "base", "recipe long"
SETTINGS = {
    BASE: Setting(),
    "eps 1e-6": Setting({"eps": 1e-6}),
    "hard beta": Setting({}, _HARD),
    "isometry": Setting({"isometry": 0.003}),
    "hard beta, isometry": Setting({"isometry": 0.003}, _HARD),
    "decaying rate": Setting({"schedule": "cosine", "warmup": 0.02, "weight_decay": 0.0}),
    "centred gradient": Setting({"centred_gradient": True}),
    "z-loss": Setting({"z_loss": 1e-4}),
    "label smoothing": Setting({"label_smoothing": 0.1}),
    "noisy states": Setting({"initial_states": "noise"}),
    "carried states": Setting({"initial_states": "carried"}),
    "carried while right": Setting(_LONG.carrying),
    "selection by horizon": Setting({"select": "horizon"}),
    RECIPE: Setting(_RECIPE, _HARD),
    f"{RECIPE}, empty states": Setting(_LONG.training, _HARD),
    f"{RECIPE}, sigmoid beta": Setting(_RECIPE),
}
# The protocol's constant rate and weight decay, at ten times its rate and a sixth of its steps. Full S5 is
# not learned that way at all, so there the base has a rate that decays.
_BASE = replace(PAPER_TRAINING, steps=50_000, lr=1e-3)
BASES = dict.fromkeys(TASKS, _BASE) | {ALL: replace(DECAYING, eps=1e-8)}

PAPER_LENGTHS = tuple(sorted({round(32 * 2 ** (i / 8)) for i in range(8 * 7 + 1)}))
EVALUATION = EvaluationConfig(eval_samples=4000, eval_batch=200, eval_lengths=PAPER_LENGTHS)
_QUICK = replace(PROTOCOL, steps=1000, batch=64, lr=1e-3, log_every=50)
_QUICK_EVALUATION = EvaluationConfig(
    eval_samples=256, eval_batch=64, eval_lengths=tuple(t for t in PAPER_LENGTHS if t <= 2048)
)
_SMOKE = replace(PROTOCOL, steps=2, batch=2, log_every=1)

_ALWAYS = (
    "Not in the paper. Fresh training sequences every step; the test set is fixed by its own seed.",
    'The table shows the "reach": the longest length with sequence accuracy of at least 0.9.',
    "What the recipe was chosen on: rate, schedule and weight decay on the training loss of full S5; eps and "
    "hard beta on the reach of S5 swaps, so swaps is not an untouched test of the recipe; carried states on "
    "the reach of permutations of four items.",
)
DIFFERENCES = {
    "smoke": ("2 steps at width 8: nothing is learned, the machinery is tried.", *_ALWAYS),
    "quick": (
        "Two of the four problems, 1,000 steps of batch 64; lengths up to 2,048, 256 sequences.",
        *_ALWAYS,
    ),
    "paper": (
        PRECISION,
        f"base: {_BASE.steps:,} steps of batch {_BASE.batch} at the constant rate {_BASE.lr:g}; full S5: "
        f"{DECAYING.steps:,} steps with a cosine from {DECAYING.lr:g}, no weight decay.",
        "recipe long has as many steps as the base.",
        *_ALWAYS,
    ),
}


def _spec(panel: str, model: NamedModel, setting: Setting, training: TrainingConfig, seed: int) -> RunSpec:
    config = replace(model.config, mixer=replace(model.config.mixer, **setting.mixer))  # type: ignore[type-var]
    training = replace(training, train_lengths=(32, 32), **setting.training)
    return RunSpec(task(TASKS[panel]), config, training, EVALUATION, seed)


def runs(scale: Scale, seeds: int | None = None) -> list[LabelledRun]:
    """Every setting of four problems, one fewer of full S5, with 3 seeds; at quick scale two problems."""
    check_scale(scale)
    found = []
    for panel, model in MODELS.items():
        if scale == "quick" and panel not in QUICK:
            continue
        for name, setting in SETTINGS.items():
            if panel == ALL and name == "decaying rate":  # the base has one
                continue
            if scale == "smoke" and panel != SWAPS and name not in (BASE, RECIPE):
                continue
            for seed in range(seeds or (1 if scale == "smoke" else 3)):
                found.append(_labelled(scale, panel, model, name, setting, seed))
    return found


def _labelled(
    scale: Scale, panel: str, model: NamedModel, name: str, setting: Setting, seed: int
) -> LabelledRun:
    training = {"smoke": _SMOKE, "quick": _QUICK, "paper": BASES[panel]}[scale]
    if scale == "smoke":
        model = tiny(model)
    spec = _spec(panel, model, setting, training, seed)
    if scale == "quick":
        spec = replace(spec, evaluation=_QUICK_EVALUATION)
    if scale == "smoke":
        short = EvaluationConfig(eval_samples=4, eval_lengths=(4, 8, 16))
        spec = replace(spec, training=replace(spec.training, train_lengths=(8, 8)), evaluation=short)
    label = f"{model.label}, {name}"
    # a setting looks the same in all panels
    return LabelledRun(panel, label, name, spec.resolved(), ours=True)


ITEM = Item(
    name="ours-length",
    what="Ours: what keeps a tracker right far beyond its training length",
    paper_label=NOT_IN_PAPER,
    runs=runs,
    measure="reach",
    figure="curves",
    paper={},
    claims=(),
    differences=DIFFERENCES,
    headline=tuple((panel, f"{MODELS[panel].label}, {RECIPE}") for panel in MODELS),
)
