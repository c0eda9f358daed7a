"""Train every mixer with negative eigenvalues on parity, with smooth and with hard gates and betas.

The models, lengths and steps of `statetrack reproduce ours-gates --scale quick`: one layer of width 32, 600
steps on words of 2 to 32 bits. Printed is the accuracy at bit 256 with seeds 0, 1 and 2; guessing gives 0.5.
"isometry" is hard gates and betas with `--isometry 0.003`, for delta rules. Finished runs are kept in
results/ and not repeated.

    python examples/hard_gates.py                 all 108 runs
    python examples/hard_gates.py KDA             the rows whose name contains KDA

Expected output, after about 6 minutes of processor time (the last digits vary with the machine):

                                        smooth              hard                isometry
    GLA [-1,1]                          0.975 0.980 0.996   0.949 1.000 1.000
    HGRN2 [-1,1]                        0.742 1.000 0.895   1.000 1.000 1.000
    Mamba-2 [-1,1]                      1.000 1.000 1.000   1.000 1.000 1.000
    Mamba-3 [-1,1]                      1.000 0.758 1.000   1.000 1.000 1.000
    Mamba-3 unit-circle                 0.533 0.543 0.535   1.000 1.000 1.000
    mLSTM [-1,1]                        0.957 1.000 1.000   0.998 1.000 1.000
    mLSTM, no normaliser [-1,1]         1.000 1.000 0.627   1.000 1.000 1.000
    Mamba [-1,1]                        0.676 1.000 1.000
    DeltaNet [-1,1]                     0.465 0.486 0.994   1.000 0.795 1.000   1.000 1.000 1.000
    DeltaNet unit-circle                0.703 0.922 0.570   1.000 0.998 1.000   1.000 1.000 1.000
    DeltaProduct-2 [-1,1]               0.514 1.000 0.758   1.000 1.000 1.000   1.000 0.996 1.000
    Gated DeltaNet [-1,1]               0.535 0.516 0.730   1.000 1.000 1.000   1.000 1.000 1.000
    Gated DeltaNet, signed gate [-1,1]  0.377 0.535 0.783   0.465 0.988 1.000   1.000 0.535 1.000
    KDA [-1,1]                          0.537 0.535 0.486   1.000 0.490 0.752   1.000 1.000 1.000
    KDA, signed gate [-1,1]             1.000 0.535 1.000   0.752 0.848 0.486   0.783 1.000 1.000
"""

import sys
from dataclasses import replace

from statetrack.experiments.registry import item
from statetrack.run import run
from statetrack.training import Options

SMOOTH = {"gate": "smooth", "beta": "sigmoid"}
word, steps = (sys.argv[1] if len(sys.argv) > 1 else ""), int(sys.argv[2]) if len(sys.argv) > 2 else 600


def accuracies(specs):
    """At bit 256, one for each spec."""
    found = (run(spec, options=Options(device="cpu", say=lambda text: None)) for spec in specs)
    return " ".join(f"{done['metrics']['accuracy']['256']:.3f}" for done in found)


def smooth(spec):
    """The spec with the smooth gates and betas of those mixers that have a choice."""
    mixer = spec.model.mixer
    choices = {name: value for name, value in SMOOTH.items() if hasattr(mixer, name)}
    return replace(spec, model=replace(spec.model, mixer=replace(mixer, **choices)))


parity = [r for r in item("ours-gates").runs("quick") if r.panel == "Parity" and word in r.label]
print(f"{'':36}{'smooth':20}{'hard':20}isometry")
for label in dict.fromkeys(r.label for r in parity if r.eigenvalues != "[0,1]"):
    specs = [r.spec for r in parity if r.label == label]
    best = [replace(spec, training=replace(spec.training, steps=steps)) for spec in specs]
    hard = [replace(spec, training=replace(spec.training, isometry=0.0)) for spec in best]
    settings = [[smooth(spec) for spec in hard], hard, best]
    different = [specs for i, specs in enumerate(settings) if specs not in settings[:i]]
    print(f"{label:<36}" + "".join(f"{accuracies(specs):20}" for specs in different).rstrip(), flush=True)
