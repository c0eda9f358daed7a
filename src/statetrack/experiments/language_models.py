"""Section 5.3 at a small size: DeltaNet and Mamba as language models in both ranges, and the decision rule.

The rule was written down before any run, in docs/results/language-models/PLAN.md; `verdicts` is that rule as
code. Differences are losses with [-1,1] minus losses with [0,1], in nats per token, so negative is better.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from statetrack.experiments.item import LabelledRun, range_label
from statetrack.layers import model_config
from statetrack.lm.compare import Difference
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import Corpus

__all__ = ["MODELS", "RANGES", "Verdict", "answer", "kind_of", "runs", "spikes", "verdicts"]

MODELS = {"DeltaNet": "deltanet-60m", "Mamba": "mamba-60m"}  # 55.0M and 57.1M parameters
RANGES = ("[0,1]", "[-1,1]")
SEEDS = 2
CONTEXT, LENGTH = 2_048, 16_384  # of training and of held-out sequences
WITHIN, PAST = (0, CONTEXT), (CONTEXT, LENGTH)
TRAINING = TrainingConfig(
    steps=2_289,  # 150,011,904 tokens
    batch=32,
    lr=1e-3,
    warmup=0.05,
    final_lr=1e-4,
    weight_decay=0.1,
    beta2=0.95,
    precision="bfloat16",
    log_every=20,
)
# a third of the way, two thirds, and the end: the training loss itself is one of unseen text
EVALUATION = EvaluationConfig(eval_samples=32, eval_batch=32, eval_every=763)

EQUAL = 0.01  # nats: 1 % of perplexity
SLIGHT = 0.02
ONE_SEED = 0.02  # smallest difference that counts where the spread between seeds is not known
SPIKE, BEFORE = 0.3, 10  # nats above the median of this many logged losses
SPECTRUM_PIECES = 16  # of the training length, of every set: where eigenvalues are looked at
UNUSED = 0.01  # of the eigenvalues: below it, the negative half is hardly used

Kind = Literal["lower", "higher", "equal", "undecided"]
Answer = Literal["yes", "no", "undecided", "not measured"]


def runs(
    data: str,
    *,
    models: Mapping[str, str] = MODELS,
    seeds: int = SEEDS,
    context: int = CONTEXT,
    training: TrainingConfig = TRAINING,
    evaluation: EvaluationConfig = EVALUATION,
) -> list[LabelledRun]:
    """Every run on the shards in the folder `data`, in the order of the plan: 8 by default.

    `models` are presets by name. Both ranges of a seed come together: the last pairs can be left out.
    """
    task = Corpus(data, context=context)
    return [
        LabelledRun(
            "language model",
            range_label(name, eigenvalues),
            name,
            RunSpec(task, model_config(preset, eigenvalues=eigenvalues), training, evaluation, seed),
        )
        for name, preset in models.items()
        for seed in range(seeds)
        for eigenvalues in RANGES
    ]


@dataclass(frozen=True)
class Verdict:
    """What the rule says about one claim of the paper."""

    name: str  # its letter in the plan
    claim: str
    answer: Answer
    because: str


def kind_of(difference: Difference) -> Kind:
    """Whether the loss with [-1,1] is lower, higher or equal, by the rule of the plan."""
    d = difference
    least = max(d.spread) if len(d.by_seed) > 1 else ONE_SEED
    one_sign = all(x < 0 for x in d.by_seed) or all(x > 0 for x in d.by_seed)
    if one_sign and abs(d.mean) >= least and (d.upper < 0 or d.lower > 0):
        return "lower" if d.mean < 0 else "higher"
    if d.lower >= -EQUAL and d.upper <= EQUAL:
        return "equal"
    return "undecided"


def spikes(rows: Sequence[Mapping[str, float]], warmup_steps: float) -> int:
    """How many logged training losses after the warm-up are far above those before them."""
    losses = [row["loss"] for row in rows]
    return sum(
        row["step"] > warmup_steps and row["loss"] > median(losses[i - BEFORE : i]) + SPIKE
        for i, row in enumerate(rows)
        if i >= BEFORE
    )


Differences = Mapping[tuple[str, str, tuple[int, int]], Difference]  # by model, split and positions
RULES: tuple[tuple[str, str, str, tuple[int, int], Kind], ...] = (
    ("C", "DeltaNet [-1,1] is better on code", "heldout-code", WITHIN, "lower"),
    ("M", "DeltaNet [-1,1] is better on mathematics", "heldout-math", WITHIN, "lower"),
    ("CL", "the same on code past the training length", "heldout-code", PAST, "lower"),
    ("ML", "the same on mathematics past the training length", "heldout-math", PAST, "lower"),
    ("R", "DeltaNet [-1,1] is slightly worse on recall", "heldout-recall", WITHIN, "higher"),
    ("P", "DeltaNet [-1,1] is slightly better on other text", "heldout-prose", WITHIN, "lower"),
)


def verdicts(
    differences: Differences, contrast: Difference | None, stability: Sequence[tuple[str, int, int | None]]
) -> list[Verdict]:
    """The rule of the plan, claim by claim.

    `contrast` is that of claim X. `stability` has one entry per pair of runs: its name, the spikes with
    [0,1], and those with [-1,1], None if that run diverged.
    """
    found = [_stable(stability), _validation(differences.get(("DeltaNet", "heldout-mixture", WITHIN)))]
    for name, claim, split, positions, wanted in RULES:
        found.append(_simple(name, claim, differences.get(("DeltaNet", split, positions)), wanted))
    found.append(_simple("X", "the gain goes with state tracking, not with memory", contrast, "lower"))
    return [*found, _mamba(differences)]


def answer(found: Sequence[Verdict]) -> str:
    """The answer to the paper's question, from the verdicts on validation, code and mathematics."""
    by = {verdict.name: verdict.answer for verdict in found}
    if by["C"] == by["M"] == by["V"] == "yes":
        return "yes, as in the paper"
    if by["C"] == by["M"] == "no":
        return "no"
    if "yes" in (by["C"], by["M"]):
        return "in part"
    return "undecided"


def in_words(d: Difference) -> str:
    """A difference with its interval, in nats and in per cent of perplexity."""
    size = f"; smaller than {EQUAL:.0%}" if abs(d.mean) < EQUAL and kind_of(d) in ("lower", "higher") else ""
    return f"d = {d.mean:+.4f} ({d.lower:+.4f} to {d.upper:+.4f}), {kind_of(d)}{size}"


def _simple(name: str, claim: str, d: Difference | None, wanted: Kind) -> Verdict:
    if d is None:
        return Verdict(name, claim, "not measured", "no pair of finished runs")
    kind = kind_of(d)
    said: Answer = "yes" if kind == wanted else "undecided" if kind == "undecided" else "no"
    return Verdict(name, claim, said, in_words(d))


def _validation(d: Difference | None) -> Verdict:
    claim = "validation loss with [-1,1] is comparable, slightly worse"
    if d is None:
        return Verdict("V", claim, "not measured", "no pair of finished runs")
    kind = kind_of(d)
    holds = kind == "equal" or (kind == "higher" and d.mean < SLIGHT)
    said: Answer = "yes" if holds else "undecided" if kind == "undecided" else "no"
    return Verdict("V", claim, said, in_words(d))


def _stable(pairs: Sequence[tuple[str, int, int | None]]) -> Verdict:
    claim = "training with [-1,1] is as stable"
    if not pairs:
        return Verdict("S", claim, "not measured", "no pair of runs")
    bad = [name for name, before, after in pairs if after is None or after > before]
    ends = ["diverged" if after is None else f"{after} spikes" for _, _, after in pairs]
    counts = "; ".join(
        f"{name}: {before} spikes with [0,1], {end} with [-1,1]"
        for (name, before, _), end in zip(pairs, ends, strict=True)
    )
    return Verdict("S", claim, "no" if bad else "yes", counts)


def _mamba(differences: Differences) -> Verdict:
    claim = "Mamba [-1,1] is worse on code and mathematics"
    both = [differences.get(("Mamba", f"heldout-{domain}", WITHIN)) for domain in ("code", "math")]
    present = [d for d in both if d is not None]
    if len(present) < 2:
        return Verdict("B", claim, "not measured", "no pair of finished runs")
    kinds = [kind_of(d) for d in present]
    said: Answer = "undecided"
    if kinds == ["higher", "higher"]:
        said = "yes"
    elif all(kind in ("lower", "equal") for kind in kinds):
        said = "no"
    return Verdict("B", claim, said, "code " + "; mathematics ".join(map(in_words, present)))
