"""All 120 permutations of five items in one layer: DeltaProduct-4 by a curriculum on one CPU core.

    python examples/full_s5.py             seeds 0, 1 and 2; a second call goes on where the first stopped
    python examples/full_s5.py 1           one seed

From scratch such a layer learns which permutations are even, and little more. Here it first learns the 31
letters that move at most three items, then all 120 in sequences of two and of four letters, each stage from
the weights of the one before. A hard beta at its bound has no gradient, and letters with the wrong number of
reflections would stay so; these stages have sigmoid ones, and the last stage makes them hard. Sequences go on
from batch to batch while their answers are right (docs/length.md), which makes up for short batches.
"""

import sys
from typing import Any

import statetrack

SAME: dict[str, Any] = {
    "mixer": "deltaproduct",
    "householders": 4,
    "convolution": 0,
    "qk_activation": "identity",
    "d_model": 64,
    "heads": 2,
    "recipe": "long",
    "eval_samples": 256,
    "device": "cpu",
    "verbose": False,
}
SHORT: dict[str, Any] = {"beta": "sigmoid", "carried_batches": 32, "eval_lengths": (8, 32, 128)}
STAGES: dict[str, dict[str, Any]] = {
    "1-three-items": SHORT | {"task": "s5-up-to-3", "lr": 5e-3, "steps": 4_000, "batch": 64},
    "2-two-letters": SHORT | {"task": "s5", "train_lengths": (2, 2), "steps": 30_000, "batch": 256},
    "3-four-letters": SHORT | {"task": "s5", "train_lengths": (4, 4), "steps": 12_000, "batch": 128},
    "4-long": {
        "task": "s5",
        "steps": 20_000,
        "batch": 64,
        "isometry": 0.003,
        "carried_batches": 128,
        "eval_lengths": (32, 256, 512, 1024, 2048),
    },
}

seeds = sys.argv[1:2] or ["0", "1", "2"]
shorter: dict[str, Any] = {"steps": int(sys.argv[2])} if len(sys.argv) > 2 else {}
for seed in seeds:
    initial = None
    for name, options in STAGES.items():
        out = f"results/full-s5/{seed}/{name}"
        trained = statetrack.train(**SAME | options | shorter, seed=int(seed), out=out, initial=initial)
        initial = trained.folder
        lengths = trained.metrics["sequence_accuracy"].items()
        right = "  ".join(f"{length}: {share:.3f}" for length, share in lengths)
        print(f"seed {seed}  {name:14} {trained.done['seconds']:5.0f} s  {right}", flush=True)
