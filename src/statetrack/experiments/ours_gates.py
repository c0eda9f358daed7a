"""Ours: what every mixer tracks in every range of eigenvalues: parity, cyclic groups, S5, modular arithmetic.

The paper leaves GLA, Mamba-2 and mLSTM in [0,1] (App. E.4). Here each of them, and each mixer after it, is
trained in all its ranges. Theory says: parity by every range but [0,1]; Z3 and Z60 by rotations in one layer
(two reflections make one, or one and flipped channels); S5 by no stack of diagonal layers (docs/theory.md).
To add a mixer, add a line to `MIXERS`.
"""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from statetrack.experiments import tab_chomsky, word_problems
from statetrack.experiments.item import (
    NOT_IN_PAPER,
    PRECISION,
    Claim,
    Item,
    LabelledRun,
    NamedModel,
    Scale,
    check_scale,
    range_label,
)
from statetrack.experiments.word_problems import Size
from statetrack.layers import DeltaNetConfig, KDAConfig, model_config
from statetrack.ops.checks import EIGENVALUES
from statetrack.spec import RunSpec
from statetrack.tasks import WordProblem, task

PARITY, Z3, Z60, SWAPS = "Parity", "Z3", "Z60", "S5 swaps"
ARITHMETIC = "Mod. arithmetic w/o brackets"
PANELS = {PARITY: "parity-dense", Z60: "z60", SWAPS: "s5-swaps"}
# 600 steps are too few for Z60. Z3 is the smallest group that a sign cannot count.
QUICK_PANELS = {PARITY: "parity-dense", Z3: WordProblem("Z3"), SWAPS: "s5-swaps"}


@dataclass(frozen=True)
class GatedMixer:
    """A row of the tables: a preset in all its ranges. `quick` are its options at width 32."""

    family: str
    preset: str
    ranges: tuple[str, ...] = EIGENVALUES
    quick: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def models(self, **changes: Any) -> list[NamedModel]:
        return [
            NamedModel(
                range_label(self.family, eigenvalues),
                self.family,
                model_config(self.preset, eigenvalues=eigenvalues, **self.options | changes),
                ours=True,
            )
            for eigenvalues in self.ranges
        ]


DISC = (*EIGENVALUES, "unit-circle")
# Short convolutions are shortcuts over a few tokens, which training finds before it finds the sign, and the
# word problems of the paper are without them. Several heads are shortcuts too, where each has many gates.
NO_CONVOLUTION = {"convolution": 0}
_GATES = {"gate": "hard"}  # docs/length.md
_DELTA = {"heads": 1, "beta": "hard", **_GATES}
_NARROW = {"convolution": 1, **_GATES}
MIXERS = (
    GatedMixer("GLA", "gla", quick={"heads": 1, **_GATES}),
    GatedMixer("HGRN2", "hgrn2", quick={"heads": 1, **_GATES}),
    GatedMixer("Mamba-2", "mamba2", quick={"d_state": 16, **_NARROW}),
    GatedMixer("Mamba-3", "mamba3", DISC, quick={"d_state": 16, "rotated": 1, **_GATES}),
    GatedMixer("mLSTM", "mlstm", quick=_NARROW),
    GatedMixer("mLSTM, no normaliser", "mlstm", quick=_NARROW, options={"normaliser": False}),
    GatedMixer("Mamba", "mamba", quick={"convolution": 1}),  # its kernels have no hard gates
    GatedMixer("DeltaNet", "deltanet-no-conv", DISC, quick=_DELTA),
    GatedMixer("DeltaProduct-2", "deltaproduct", quick=_DELTA, options=word_problems.PLAIN),
    GatedMixer("Gated DeltaNet", "gated-deltanet", quick=_DELTA, options=word_problems.PLAIN),
    GatedMixer(
        "Gated DeltaNet, signed gate", "gated-deltanet-signed", quick=_DELTA, options=word_problems.PLAIN
    ),
    GatedMixer("KDA", "kda", quick=_DELTA, options=NO_CONVOLUTION),
    GatedMixer("KDA, signed gate", "kda", quick=_DELTA, options={**NO_CONVOLUTION, "signed_gate": True}),
)

SIZES = {
    "smoke": Size(
        replace(word_problems.PROTOCOL, steps=2, batch=2, log_every=1),
        replace(word_problems.EVALUATION, eval_samples=4),
        longest=16,
        seeds=1,
        train_length=8,
    ),
    "quick": Size(
        replace(
            word_problems.PROTOCOL, steps=600, batch=64, lr=1e-2, schedule="cosine", warmup=0.1, log_every=20
        ),
        replace(word_problems.EVALUATION, eval_samples=512, eval_batch=64),
        longest=256,
        seeds=3,  # one seed says little: whether a solution is exact beyond the trained length varies with it
    ),
    "paper": Size(word_problems.PAPER_TRAINING, word_problems.EVALUATION, longest=500, seeds=1),
}
QUICK_WIDTH, LAYERS = 32, 1
# Short words let training find the sign, long ones bring the gate near to -1.
QUICK_LENGTHS = (2, 32)
# Of the delta rules beyond [0,1]; there it would forbid them to write, since beta = 0 loses nothing.
QUICK_ISOMETRY = 0.003


def _has_reflections(mixer: Any) -> bool:
    return isinstance(mixer, DeltaNetConfig | KDAConfig)


def _can_track(panel: str, mixer: GatedMixer, eigenvalues: str) -> bool:
    """Whether one layer can, by docs/theory.md; none does in [0,1]."""
    config: Any = model_config(mixer.preset, **mixer.options).mixer
    if panel == PARITY:
        return True
    if panel == SWAPS:  # no diagonal one
        return _has_reflections(config)
    # a reflection and a flipped channel are two reflections
    flips = isinstance(config, KDAConfig) and config.signed_gate
    return eigenvalues == "unit-circle" or getattr(config, "householders", 1) > 1 or flips


CLAIMS = tuple(
    Claim(panel, range_label(mixer.family, signed), range_label(mixer.family, "[0,1]"))
    for panel, mixer in product((PARITY, Z3, Z60, SWAPS), MIXERS)
    for signed in mixer.ranges
    if signed != "[0,1]" and _can_track(panel, mixer, signed)
)
_ALWAYS = ("Not in the paper, except DeltaNet and Mamba on S5, Z60 and arithmetic; one layer.",)
DIFFERENCES = {
    "smoke": ("2 steps at width 8: nothing is learned, the machinery is tried.", *_ALWAYS),
    "quick": (
        "Parity, Z3 and S5 by swaps: 600 steps of batch 64 on 2 to 32 tokens at lr 1e-2, width 32. No short "
        "convolutions; hard gates and betas, but for Mamba; isometry 0.003 for delta rules beyond [0,1].",
        *_ALWAYS,
    ),
    "paper": ("The protocol of the group word problems of App. E.2, one seed.", PRECISION, *_ALWAYS),
}
ARITHMETIC_DIFFERENCES = {
    "smoke": DIFFERENCES["smoke"],
    "quick": (
        "900 steps of batch 64 at lr 3e-3, width 32, on lengths 3 to 20: enough to try it, not to learn it.",
        *_ALWAYS,
    ),
    "paper": ("The protocol of Table 3 (App. E.1) with three layers, four rates and three seeds.", PRECISION),
}


def models(scale: Scale, layers: int = LAYERS) -> list[NamedModel]:
    """Every mixer in each of its ranges."""
    if scale == "paper":
        return [model for mixer in MIXERS for model in mixer.models(layers=layers)]
    width = 8 if scale == "smoke" else QUICK_WIDTH
    return [m for mixer in MIXERS for m in mixer.models(d_model=width, layers=LAYERS, **mixer.quick)]


def runs(scale: Scale, seeds: int | None = None) -> list[LabelledRun]:
    """Every mixer and range on parity, Z60 and S5 by swaps; at quick scale with Z3 in the place of Z60."""
    check_scale(scale)
    panels = QUICK_PANELS if scale == "quick" else PANELS
    everything = models(scale)
    chosen = {p: everything if scale != "smoke" or p == PARITY else everything[:2] for p in panels}
    found = word_problems.grid(panels, chosen, dict.fromkeys(panels, SIZES[scale]), seeds)
    return [_quick(run) for run in found] if scale == "quick" else found


def _quick(run: LabelledRun) -> LabelledRun:
    training = replace(run.spec.training, train_lengths=QUICK_LENGTHS)
    mixer: Any = run.spec.model.mixer
    if _has_reflections(mixer) and mixer.eigenvalues != "[0,1]":
        training = replace(training, isometry=QUICK_ISOMETRY)
    return replace(run, spec=replace(run.spec, training=training))


def arithmetic_runs(scale: Scale, seeds: int | None = None) -> list[LabelledRun]:
    """Every mixer and range on modular arithmetic without brackets, in the protocol of Table 3."""
    check_scale(scale)
    size = tab_chomsky.SIZES[scale]
    steps = tab_chomsky.QUICK_STEPS[1] if scale == "quick" else size.training.steps
    return [
        LabelledRun(
            ARITHMETIC,
            model.label,
            model.family,
            RunSpec(
                task("mod-arithmetic"),
                model.config,
                replace(size.training, steps=steps, lr=lr, clip=1.0),
                size.evaluation,
                seed,
            ).resolved(),
            ours=True,
        )
        for model in models(scale, layers=size.layers[1])
        for lr, seed in product(size.rates, range(seeds or size.seeds))
    ]


ITEM = Item(
    name="ours-gates",
    what="Ours: every mixer in every range of eigenvalues on parity, cyclic groups and S5",
    paper_label=NOT_IN_PAPER,
    runs=runs,
    measure="reach",
    figure="curves",
    paper={},
    claims=CLAIMS,
    differences=DIFFERENCES,
)
ARITHMETIC_ITEM = Item(
    name="ours-gates-arithmetic",
    what="Ours: every mixer in every range of eigenvalues on modular arithmetic without brackets",
    paper_label=NOT_IN_PAPER,
    runs=arithmetic_runs,
    measure="scaled accuracy",
    figure="dots",
    paper={},
    claims=(),
    differences=ARITHMETIC_DIFFERENCES,
)
