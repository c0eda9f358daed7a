"""Models and training protocol shared by the group word problems of Sec. 5.2 and App. E.2."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from statetrack.experiments.item import LabelledRun, NamedModel, range_label
from statetrack.layers import model_config
from statetrack.ops.checks import EIGENVALUES
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import Task, WordProblem, task

# AdamW for all models: constant learning rate, no warm-up (App. E.2).
PROTOCOL = TrainingConfig(
    steps=312_500,
    batch=512,
    lr=1e-4,
    schedule="constant",
    warmup=0.0,
    weight_decay=0.01,
    clip=1.0,
    log_every=500,
)
# Not stated in the paper; the kernels its authors used take bfloat16. Recurrences use float32.
PAPER_TRAINING = replace(PROTOCOL, precision="bfloat16")
EVALUATION = EvaluationConfig(eval_samples=40_000, eval_batch=500)


@dataclass(frozen=True)
class Size:
    """The size of the experiment at one scale."""

    training: TrainingConfig
    evaluation: EvaluationConfig
    longest: int  # evaluation length
    seeds: int
    train_length: int = 32  # in tokens; doubled where an element takes several tokens, as in the paper

    def spec(self, problem: str | Task, model: NamedModel, seed: int) -> RunSpec:
        problem = task(problem) if isinstance(problem, str) else problem
        assert isinstance(problem, WordProblem)
        length = self.train_length * (2 if problem.tokens_per_element > 1 else 1)
        lengths = eval_lengths(length, self.longest)
        return RunSpec(
            problem,
            model.config,
            replace(self.training, train_lengths=(length, length)),
            replace(self.evaluation, eval_lengths=lengths),
            seed,
        ).resolved()


def eval_lengths(train_length: int, longest: int) -> tuple[int, ...]:
    """Eight steps inside the training length, steps of at most 10 beyond it, its doublings, and the end."""
    inside = range(max(1, train_length // 8), train_length + 1, max(1, train_length // 8))
    beyond = range(train_length, longest + 1, 10 if longest > 200 else max(1, train_length // 4))
    doublings = (train_length * 2**i for i in range(10))
    return tuple(sorted({*inside, *beyond, *(t for t in doublings if t <= longest), longest}))


# DeltaNet's variants as DeltaNet itself: without short convolutions, and without an activation of q and k.
PLAIN = {"convolution": 0, "qk_activation": "identity"}


def models(layers: Sequence[int] = (1, 5)) -> list[NamedModel]:
    """DeltaNet and Mamba in both ranges, the full-matrix baseline, and ours with one layer each."""
    found = [
        NamedModel(
            range_label(family, eigenvalues, depth),
            family,
            model_config(preset, eigenvalues=eigenvalues, layers=depth),
        )
        for (family, preset), depth, eigenvalues in product(
            (("DeltaNet", "deltanet-no-conv"), ("Mamba", "mamba")), layers, EIGENVALUES
        )
    ]
    found.append(NamedModel("Full matrix (1L)", "Full matrix", model_config("dense-transition")))
    for n, eigenvalues in product((2, 4), EIGENVALUES):
        family = f"DeltaProduct-{n}"
        config = model_config("deltaproduct", householders=n, eigenvalues=eigenvalues, **PLAIN)
        found.append(NamedModel(range_label(family, eigenvalues, 1), family, config, ours=True))
    for eigenvalues in EIGENVALUES:
        config = model_config("gated-deltanet", eigenvalues=eigenvalues, **PLAIN)
        label = range_label("Gated DeltaNet", eigenvalues, 1)
        found.append(NamedModel(label, "Gated DeltaNet", config, ours=True))
    return found


def tiny(model: NamedModel) -> NamedModel:
    """The same model at width 8, for smoke runs."""
    small = {"d_model": 8, "layers": min(2, model.config.layers)}
    mixer = replace(model.config.mixer, size=4) if hasattr(model.config.mixer, "size") else model.config.mixer  # type: ignore[type-var,call-arg]
    return replace(model, config=replace(model.config, mixer=mixer, **small))


def smoke_models(panels: Sequence[str]) -> dict[str, list[NamedModel]]:
    """Every model on the first panel, two of them on the others: all code runs once."""
    small = [tiny(model) for model in models()]
    return {panel: small if i == 0 else small[:2] for i, panel in enumerate(panels)}


def grid(
    panels: Mapping[str, str | Task],
    chosen: dict[str, list[NamedModel]],
    sizes: dict[str, Size],
    seeds: int | None,
) -> list[LabelledRun]:
    """Every model of every panel, every seed. `panels` maps a title to its task, or the name of it."""
    return [
        LabelledRun(title, model.label, model.family, sizes[title].spec(problem, model, seed), model.ours)
        for title, problem in panels.items()
        for model in chosen[title]
        for seed in range(seeds or sizes[title].seeds)
    ]
