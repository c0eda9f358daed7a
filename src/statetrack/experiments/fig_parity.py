"""Fig. 1 (fig:parity_motivation): a diagonal linear RNN learns parity once eigenvalues may be negative."""

from dataclasses import dataclass
from itertools import product

from statetrack.experiments.item import Claim, Item, LabelledRun, Published, Scale, check_scale, range_label
from statetrack.layers import model_config
from statetrack.ops.checks import EIGENVALUES
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import task

PANEL, FAMILY = "Parity", "Diagonal LRNN"

PAPER = {
    (PANEL, "Diagonal LRNN [0,1]"): Published("random guessing", best=0.0),
    (PANEL, "Diagonal LRNN [-1,1]"): Published("perfect score", best=1.0),
}
CLAIMS = (Claim(PANEL, "Diagonal LRNN [-1,1]", "Diagonal LRNN [0,1]"),)


@dataclass(frozen=True)
class _Size:
    steps: int
    batch: int
    rates: tuple[float, ...]
    seeds: int
    samples: int
    edges: tuple[int, ...] = tuple(range(40, 257, 24))
    log_every: int = 50


SIZES = {
    "smoke": _Size(4, 4, (1e-2,), 2, 64, log_every=2),
    "quick": _Size(3000, 64, (3e-3,), 3, 2048),
    "paper": _Size(100_000, 1024, (1e-2, 1e-3, 5e-4, 1e-4), 3, 8192, log_every=500),
}

DIFFERENCES = {
    "smoke": ("4 steps of batch 4: nothing is learned, the machinery is tried.",),
    "quick": (
        "3,000 steps of batch 64 at one learning rate, 3e-3 (paper: 100,000 of batch 1024, four rates).",
        "2,048 evaluation sequences instead of 8,192.",
    ),
    "paper": (
        "The paper gives no training protocol for this figure: we use that of Sec. 5.1, the same for both "
        "ranges.",
    ),
}


def runs(scale: Scale, seeds: int | None = None) -> list[LabelledRun]:
    """Both ranges, every learning rate and seed: 24 runs at paper scale."""
    check_scale(scale)
    size = SIZES[scale]
    return [
        LabelledRun(
            PANEL, range_label(FAMILY, eigenvalues), FAMILY, _spec(size, eigenvalues, lr, seed).resolved()
        )
        for eigenvalues, lr, seed in product(EIGENVALUES, size.rates, range(seeds or size.seeds))
    ]


def _spec(size: _Size, eigenvalues: str, lr: float, seed: int) -> RunSpec:
    training = TrainingConfig(size.steps, size.batch, lr, clip=0.0, log_every=size.log_every)
    evaluation = EvaluationConfig(size.edges, size.samples, eval_batch=256)
    return RunSpec(
        task("parity"), model_config("diagonal-toy", eigenvalues=eigenvalues), training, evaluation, seed
    )


ITEM = Item(
    name="fig-parity",
    what="Fig. 1: a diagonal linear RNN on parity, lengths 40 to 256",
    paper_label="fig:parity_motivation",
    runs=runs,
    measure="scaled accuracy",
    figure="curves",
    paper=PAPER,
    claims=CLAIMS,
    differences=DIFFERENCES,
    first_rate=1e-3,
)
