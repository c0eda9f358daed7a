"""One small layer that stays right for thousands of tokens: full S5, its smaller sets of letters, and Z60.

Beyond the paper, whose models are all wrong on full S5 before length 30. A curriculum of two letters first,
where an answer depends on one transition; then longer words, whose logits are drawn together where answers
are the same. docs/length.md has what each part does, and what it was chosen on.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from statetrack.experiments.fig_s5 import ALL, SWAPS, THREE
from statetrack.experiments.item import NOT_IN_PAPER, Item, LabelledRun, NamedModel, Scale, check_scale
from statetrack.experiments.ours_length import PAPER_LENGTHS, TASKS, Z60
from statetrack.experiments.word_problems import PLAIN, PROTOCOL, tiny
from statetrack.layers import ModelConfig, model_config
from statetrack.recipes import recipe
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import task


@dataclass(frozen=True)
class Tracker:
    """A row: one layer, the length and the number of its training words, and its steps.

    A letter that moves n points is n - 1 reflections of one head; a sum modulo 60 is told by the angles of
    several heads, each modulo a divisor. Trackers with `short_steps` have no MLP, which could remember the
    products of two letters without a state.
    """

    householders: int
    heads: int
    steps: int
    short_steps: int = 0
    length: int = 64
    batch: int = 64
    training: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        sizes = {"householders": self.householders, "heads": self.heads, "d_model": 64, "mlp_ratio": 0}
        return model_config("deltaproduct", beta="hard", **PLAIN, **sizes | self.model)

    @property
    def label(self) -> str:
        return f"DeltaProduct-{self.householders}" if self.householders > 1 else "DeltaNet"


_SMALL = {"d_model": 32, "mlp_ratio": 4.0}
TRACKERS = {
    SWAPS: Tracker(1, 1, 8_000, training={"lr": 1e-2}, model=_SMALL),
    THREE: Tracker(2, 2, 8_000, training={"lr": 5e-3}, model=_SMALL),
    ALL: Tracker(4, 1, 22_000, short_steps=10_000, training={"consistency": 1e-3}, model={"head_dim": 32}),
    Z60: Tracker(2, 4, 20_000, short_steps=12_000, length=128, batch=32),
}

_LONG = recipe("long")
_TRAINING = replace(PROTOCOL, isometry=0.003, consistency=0.01, **_LONG.training, log_every=100)
_SMOKE = replace(_TRAINING, steps=3, batch=2, log_every=1)
EVALUATION = EvaluationConfig(eval_samples=4000, eval_batch=200, eval_lengths=PAPER_LENGTHS)
_QUICK_EVALUATION = replace(EVALUATION, eval_samples=256, eval_batch=64)

_ALWAYS = (
    "Not in the paper. No short convolution, hard betas, isometry 0.003, consistency 0.01 (S5: 0.001), a "
    "cosine from 2e-3 (swaps 1e-2, up to 3 points 5e-3), no weight decay, eps 1e-6.",
    "Full S5 and Z60 have sequences of two letters first, carried on while they are right. All others start "
    "from empty states and have 64 letters (Z60: 128), so longer lengths are extrapolated.",
    'The table shows the "reach": the longest length with sequence accuracy of at least 0.9.',
    "Lengths, heads, rates and numbers of steps were chosen on a CPU with seeds 0 to 2 at these lengths.",
)
DIFFERENCES = {
    "smoke": ("3 steps at width 8: nothing is learned, the machinery is tried.", *_ALWAYS),
    "quick": ("256 test sequences.", *_ALWAYS),
    "paper": ("Twice the steps; 4,000 test sequences.", *_ALWAYS),
}


def _training(scale: Scale, tracker: Tracker) -> TrainingConfig:
    times = 2 if scale == "paper" else 1
    if scale == "smoke":
        base, short_steps, short_batch = replace(_SMOKE, train_lengths=(8, 8)), 1, 4
    else:
        lengths = tracker.length, tracker.length
        base = replace(_TRAINING, steps=times * tracker.steps, train_lengths=lengths, batch=tracker.batch)
        short_steps, short_batch = times * tracker.short_steps, 256
    base = replace(base, **tracker.training)
    if not tracker.short_steps:
        return base
    return replace(base, short_steps=short_steps, short_batch=short_batch, **_LONG.carrying)


def runs(scale: Scale, seeds: int | None = None) -> list[LabelledRun]:
    """Every tracker with 3 seeds."""
    check_scale(scale)
    evaluation = {
        "smoke": EvaluationConfig(eval_samples=4, eval_lengths=(4, 8, 16)),
        "quick": _QUICK_EVALUATION,
        "paper": EVALUATION,
    }[scale]
    found = []
    for panel, tracker in TRACKERS.items():
        model = NamedModel(tracker.label, tracker.label, tracker.config, ours=True)
        config = (tiny(model) if scale == "smoke" else model).config
        for seed in range(seeds or (1 if scale == "smoke" else 3)):
            spec = RunSpec(task(TASKS[panel]), config, _training(scale, tracker), evaluation, seed)
            found.append(LabelledRun(panel, model.label, model.family, spec.resolved(), ours=True))
    return found


ITEM = Item(
    name="ours-trackers",
    what="Ours: one layer that tracks a group for thousands of tokens",
    paper_label=NOT_IN_PAPER,
    runs=runs,
    measure="reach",
    figure="curves",
    paper={},
    claims=(),
    differences=DIFFERENCES,
    headline=tuple((panel, tracker.label) for panel, tracker in TRACKERS.items()),
)
