"""Group word problems in one small layer: first on two letters, then on 32. Minutes on one CPU core.

    python examples/short_then_long.py                   S5, up to three items, swaps, and Z60
    python examples/short_then_long.py s5 1              one of them with one seed; a second call goes on

Trained on 32 letters at once such a layer learns little: at best which permutations are even. On two letters
it learns them all, if nothing else in the network can remember 120 x 120 products: it has no MLP. Sequences
go on from batch to batch while their answers are right, so they become long although a batch is not
(docs/length.md). The second stage starts from the weights of the first, and makes the reflections exact.
"""

import sys
from typing import Any

import statetrack

SAME: dict[str, Any] = {
    "mixer": "deltaproduct",
    "recipe": "long",
    "isometry": 0.003,
    "convolution": 0,
    "qk_activation": "identity",
    "mlp_ratio": 0,
    "d_model": 64,
    "eval_lengths": (32, 256, 512, 1024, 2048, 4096),
    "eval_samples": 256,
    "device": "cpu",
    "verbose": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "s5": {"householders": 4, "heads": 1, "head_dim": 32},
    "s5-up-to-3": {"householders": 2, "heads": 1, "head_dim": 32},
    "s5-swaps": {"householders": 1, "heads": 1, "head_dim": 32},
    "z60": {"householders": 2, "heads": 4},
}
STEPS = {"s5": (20_000, 30_000), "z60": (20_000, 30_000)}  # of both stages; else 10,000 and 25,000
STAGES: dict[str, dict[str, Any]] = {
    "1-short": {"train_lengths": (2, 2), "batch": 256, "carried_batches": 64},
    "2-long": {"train_lengths": (32, 32), "batch": 64, "carried_batches": 128},
}

tasks, seeds = sys.argv[1:2] or list(MODELS), sys.argv[2:3] or ["0", "1", "2"]
for task, seed in ((task, seed) for task in tasks for seed in seeds):
    initial, steps = None, STEPS.get(task, (10_000, 25_000)) if len(sys.argv) < 4 else (int(sys.argv[3]),) * 2
    for (stage, options), n in zip(STAGES.items(), steps, strict=True):
        out = f"results/short-then-long/{task}-{seed}-{stage}"
        named: Any = {"task": task, "seed": int(seed), "steps": n, "out": out}
        trained = statetrack.train(**SAME | MODELS[task] | options | named, initial=initial)
        initial = trained.folder
        lengths = trained.metrics["sequence_accuracy"].items()
        right = "  ".join(f"{length}: {share:.3f}" for length, share in lengths)
        print(f"{task} {seed}  {stage}  {trained.done['seconds']:4.0f} s  {right}", flush=True)
