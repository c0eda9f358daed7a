"""Specs of language models: defaults for pretraining, and the three runs of Sec. 5.3, ready to launch.

The paper names no betas, eps or final learning rate: we take PyTorch's betas (0.9, 0.999) and eps 1e-8, and a
cosine that ends at 1e-6 as in the paper's other experiments. Its "gradient clipping set to auto" is a norm of
1 in the trainer that the authors used.
"""

from dataclasses import dataclass, replace
from typing import Literal

from statetrack.layers import model_config
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import Corpus

CONTEXT = 2048
# AdamW, learning rate, decay, schedule and clipping of Sec. 5.3; warm-up of 250 of 10,000 steps
TRAINING = TrainingConfig(
    steps=10_000, batch=16, lr=3e-4, warmup=0.025, weight_decay=0.01, clip=1.0, log_every=20
)
EVALUATION = EvaluationConfig(eval_samples=64, eval_batch=8, eval_every=1000)


@dataclass(frozen=True)
class PaperRun:
    """One of the paper's language models and how it was trained."""

    model: str  # preset
    vocabulary: int
    gpus: int
    rows: int  # of 2,048 tokens, on one GPU in one forward pass
    accumulation: int  # forward passes of a step
    steps: int
    warmup: int  # steps

    @property
    def batch(self) -> int:
        """Rows of one step."""
        return self.gpus * self.rows * self.accumulation

    @property
    def training(self) -> TrainingConfig:
        """On `gpus` processes with `--micro-batches` set to `accumulation`."""
        return replace(
            TRAINING,
            steps=self.steps,
            batch=self.batch,
            warmup=self.warmup / self.steps,
            precision="bfloat16",
        )


PAPER = {
    "deltanet-340m": PaperRun("deltanet-340m", 32_000, 16, 16, 1, 200_000, 250),
    "deltanet-1.3b": PaperRun("deltanet-1.3b", 32_000, 32, 6, 5, 50_000, 500),
    "mamba-370m": PaperRun("mamba-370m", 50_280, 16, 16, 1, 200_000, 250),
}


def paper_spec(name: str, eigenvalues: Literal["[0,1]", "[-1,1]"], data: str) -> RunSpec:
    """The paper's run `name` in a range, on the token shards in `data`.

        paper_spec("deltanet-340m", "[-1,1]", "fineweb-100b")

    The data may have fewer tokens than the vocabulary of the published model (32,000, of Mamba 50,280).
    """
    run = PAPER[name]
    return RunSpec(
        Corpus(data, context=CONTEXT, vocabulary=run.vocabulary),
        model_config(run.model, eigenvalues=eigenvalues),
        run.training,
        EVALUATION,
    ).resolved()


__all__ = ["CONTEXT", "EVALUATION", "PAPER", "TRAINING", "PaperRun", "paper_spec"]
