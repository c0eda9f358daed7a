"""What `statetrack lm demo` trains: a small DeltaNet in both ranges on the bytes of the standard library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from statetrack.layers import model_config
from statetrack.lm.compare import Difference
from statetrack.lm.measured import Perplexities
from statetrack.ops.checks import EIGENVALUES
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import Corpus

__all__ = ["HELDOUT", "DemoSize", "specs", "summary"]

HELDOUT = 0.1  # part of the files: the demo measures long sequences


@dataclass(frozen=True)
class DemoSize:
    """Model and training of the demo: a few minutes on two cores."""

    steps: int = 1000  # number of updates
    batch: int = 8  # sequences of one step
    context: int = 256  # tokens of a training sequence; evaluated to 8 times as many
    d_model: int = 128  # width of the model
    layers: int = 2  # number of blocks
    heads: int = 2  # number of heads
    lr: float = 3e-3  # largest learning rate
    seed: int = 0  # of initial weights and training data


def specs(data: Path, size: DemoSize) -> list[RunSpec]:
    """One run per eigenvalue range; they differ in nothing else."""
    task = Corpus(str(data), context=size.context)
    training = TrainingConfig(
        size.steps,
        batch=size.batch,
        lr=size.lr,
        weight_decay=0.01,
        log_every=max(1, size.steps // 100),
    )
    evaluation = EvaluationConfig(eval_samples=16, eval_batch=16)
    return [
        RunSpec(
            task,
            model_config(
                "deltanet",
                d_model=size.d_model,
                layers=size.layers,
                heads=size.heads,
                mlp_ratio=2.75,
                tied=True,
                eigenvalues=eigenvalues,
            ),
            training,
            evaluation,
            size.seed,
        ).resolved()
        for eigenvalues in EIGENVALUES
    ]


def summary(measured: Perplexities, differences: Sequence[Difference]) -> str:
    """Which range is better, by how much, and what that does not show; in plain sentences."""
    lines = []
    for d in differences:
        where = {
            (0, measured.layouts[d.split].length): "At all positions",
            (0, measured.models[0].context): "Within the training length",
        }.get((d.low, d.high), "Past the training length")
        perplexities = [math.exp(measured.mean_loss(m, d.split, d.low, d.high)) for m in measured.models[:2]]
        if len(measured.layouts) > 1:
            where = f"{d.split}: {where[0].lower()}{where[1:]}"
        lines.append(
            f"{where}, [0,1] has perplexity {perplexities[0]:.3f} and [-1,1] {perplexities[1]:.3f}: "
            f"{_verdict(d)} ({d.mean:+.4f} nats, 95 % interval {d.lower:+.4f} to {d.upper:+.4f})."
        )
    units = differences[0].units
    lines.append(
        f"The intervals are over {units} held-out documents. Each range was trained once, so they do not "
        "cover what another seed would change; results at this size need not hold for larger models."
    )
    return "\n".join(lines)


def _verdict(difference: Difference) -> str:
    """The better range where the interval excludes 0."""
    if difference.lower <= 0 <= difference.upper:
        return "no difference that these documents show"
    better = "[-1,1]" if difference.mean < 0 else "[0,1]"
    return f"{better} is better by {100 * math.expm1(abs(difference.mean)):.1f} %"
