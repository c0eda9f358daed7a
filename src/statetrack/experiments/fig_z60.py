"""Appendix E.2 (fig:z60): the cyclic group of 60 elements, one and two tokens per element."""

from dataclasses import replace

from statetrack.experiments.item import (
    PRECISION,
    Claim,
    Item,
    LabelledRun,
    Published,
    Scale,
    check_scale,
)
from statetrack.experiments.word_problems import (
    EVALUATION,
    PAPER_TRAINING,
    PROTOCOL,
    Size,
    grid,
    models,
    smoke_models,
)

PANELS = {"Z60": "z60", "Z60, 2 tokens": "z60-2-tokens"}

PAPER = {
    (panel, f"{family} {eigenvalues} ({n}L)"): Published(text)
    for panel in PANELS
    for n in (1, 5)
    for family, eigenvalues, text in (
        ("Mamba", "[-1,1]", "the best model; generalises little"),
        ("Mamba", "[0,1]", "worse than [-1,1]"),
        ("DeltaNet", "[-1,1]", "below Mamba [-1,1]"),
        ("DeltaNet", "[0,1]", "worse than [-1,1]"),
    )
}
CLAIMS = tuple(
    claim
    for panel in PANELS
    for n in (1, 5)
    for claim in (
        Claim(panel, f"Mamba [-1,1] ({n}L)", f"Mamba [0,1] ({n}L)"),
        Claim(panel, f"DeltaNet [-1,1] ({n}L)", f"DeltaNet [0,1] ({n}L)"),
        Claim(panel, f"Mamba [-1,1] ({n}L)", f"DeltaNet [-1,1] ({n}L)"),
    )
)

SIZES = {
    "smoke": Size(
        replace(PROTOCOL, steps=2, batch=2, log_every=1),
        replace(EVALUATION, eval_samples=4),
        16,
        1,
        train_length=8,
    ),
    "quick": Size(
        replace(PROTOCOL, steps=1000, batch=64, lr=1e-3, log_every=20),
        replace(EVALUATION, eval_samples=512, eval_batch=64),
        longest=128,
        seeds=1,
    ),
    "paper": Size(PAPER_TRAINING, EVALUATION, longest=500, seeds=1),
}
QUICK_MODELS = (
    "DeltaNet [0,1] (1L)",
    "DeltaNet [-1,1] (1L)",
    "Mamba [0,1] (1L)",
    "Mamba [-1,1] (1L)",
    "Full matrix (1L)",
    "DeltaProduct-2 [-1,1] (1L)",
)

_ALWAYS = (
    "Fresh training sequences every step (paper: a fixed set of 1.6 million); the test set is fixed by its "
    "own seed.",
    "Full matrix: initialised near the identity, which the paper does not specify.",
    'The table shows the "reach": the longest length with sequence accuracy of at least 0.9.',
)
DIFFERENCES = {
    "smoke": ("2 steps at width 8: nothing is learned, the machinery is tried.", *_ALWAYS),
    "quick": (
        "1,000 steps of batch 64, lr 1e-3 (paper: 312,500 of batch 512, lr 1e-4).",
        "One-layer models only; 512 test sequences instead of 40,000; lengths up to 128 instead of 500.",
        *_ALWAYS,
    ),
    "paper": ("One seed, as in the paper.", PRECISION, *_ALWAYS),
}


def runs(scale: Scale, seeds: int | None = None) -> list[LabelledRun]:
    """Two setups; at paper scale 15 models and 1 seed each: 30 runs."""
    check_scale(scale)
    chosen = dict.fromkeys(PANELS, models())
    if scale == "smoke":
        chosen = smoke_models(list(PANELS))
    if scale == "quick":
        chosen = {p: [model for model in models() if model.label in QUICK_MODELS] for p in PANELS}
    return grid(PANELS, chosen, dict.fromkeys(PANELS, SIZES[scale]), seeds)


ITEM = Item(
    name="fig-z60",
    what="App. E.2: the cyclic group of 60 elements, 1 and 2 tokens per element",
    paper_label="fig:z60",
    runs=runs,
    measure="reach",
    figure="curves",
    paper=PAPER,
    claims=CLAIMS,
    differences=DIFFERENCES,
)
