"""Train a tracker of swaps with both forms of beta, and measure how far beyond length 32 it stays right.

One layer of DeltaNet, `--recipe long --initial-states empty`, 1,000 steps of batch 64; only beta and the
precision of the layers differ. Printed is the accuracy at the last position of 128 sequences of each length.
Finished runs are kept in results/ and not repeated.

    python examples/hard_beta.py                  all eight runs
    python examples/hard_beta.py hard float32 0   beta, precision and seed of one run

Expected output, after about 12 minutes of processor time (the last digits vary with the machine):

    beta     precision  seed      32   1536   2048
    sigmoid  float32       0   1.000  0.664  0.258
    sigmoid  float32       1   1.000  0.828  0.500
    sigmoid  bfloat16      0   1.000  0.641  0.273
    sigmoid  bfloat16      1   1.000  0.812  0.547
    hard     float32       0   1.000  1.000  0.984
    hard     float32       1   1.000  1.000  1.000
    hard     bfloat16      0   1.000  1.000  0.977
    hard     bfloat16      1   1.000  1.000  0.992
"""

import sys
from itertools import product

import statetrack

LENGTHS = (32, 1536, 2048)
RUNS = list(product(("sigmoid", "hard"), ("float32", "bfloat16"), (0, 1)))
given, steps = sys.argv[1:4], int(sys.argv[4]) if len(sys.argv) > 4 else 1000

print("beta     precision  seed " + "".join(f"{length:>7}" for length in LENGTHS))
for beta, precision, seed in RUNS:
    if given and given != [beta, precision, str(seed)]:
        continue
    trained = statetrack.train(
        "s5-swaps",
        "deltanet-no-conv",
        recipe="long",
        initial_states="empty",
        beta=beta,
        precision=precision,
        seed=seed,
        steps=steps,
        eval_lengths=LENGTHS,
        eval_samples=128,
        device="cpu",
        verbose=False,
    )
    accuracy = trained.metrics["accuracy"]
    print(
        f"{beta:<8} {precision:<10} {seed:>4} " + "".join(f"{accuracy[str(t)]:7.3f}" for t in LENGTHS),
        flush=True,
    )
