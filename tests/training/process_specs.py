"""The runs that one process and two must agree on."""

import json
import random
from dataclasses import replace

from statetrack.layers import model_config
from statetrack.lm.shards import write_shards
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import Corpus, task

CUT = 8  # the step after which a run is stopped

# Mamba has weights that must not be decayed, and says so by marks that sharding drops: with decay as strong
# as this, a forgotten one shows. Gradients have norms around 1, where clipping begins, so that a wrong scale
# shows too.
SPEC = RunSpec(
    task("parity-dense"),
    model_config("mamba", d_model=8, layers=2),
    TrainingConfig(steps=20, batch=8, train_lengths=(5, 9), log_every=2, weight_decay=10.0),
    EvaluationConfig(eval_lengths=(8, 16), eval_samples=8, eval_every=10),
).resolved()


def file_spec(folder):
    """A run on a file whose sequences have from one to twenty labels, so that ranks count different ones."""
    path, drawn = folder / "sequences.jsonl", random.Random(0)
    if not path.exists():
        lines = []
        for i in range(40):
            bits = [drawn.randrange(2) for _ in range(20 if i % 4 == 0 else 1 + i % 3)]
            lines.append({"inputs": bits, "targets": [sum(bits[: t + 1]) % 2 for t in range(len(bits))]})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    training = replace(SPEC.training, train_lengths=None)
    return RunSpec(task(f"jsonl:{path}"), SPEC.model, training, EvaluationConfig(eval_every=10)).resolved()


def text_spec(folder):
    """A language model with one table for embedding and head, whose documents start from an empty state."""
    path, drawn = folder / "shards", random.Random(1)
    if not path.exists():
        documents = [[drawn.randrange(16) for _ in range(drawn.randrange(2, 30))] for _ in range(40)]
        write_shards(path, {"train": documents[8:], "heldout": documents[:8]}, 17, 16)
    return RunSpec(
        Corpus(str(path), context=12, reset=True),
        model_config("deltanet", d_model=8, heads=2, layers=2, tied=True),
        replace(SPEC.training, steps=8, train_lengths=None),
        EvaluationConfig(eval_lengths=(4, 24), eval_samples=4, eval_batch=2),
    ).resolved()
