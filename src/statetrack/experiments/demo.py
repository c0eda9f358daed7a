"""The runs of `statetrack demo`: parity and S5 swaps, each model in both eigenvalue ranges."""

from dataclasses import dataclass

from statetrack.layers import model_config
from statetrack.ops.checks import EIGENVALUES
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import task

TRAIN_LENGTH = 32
MULTIPLES = (1, 2, 4, 8)  # of the training length: the columns of the table


@dataclass(frozen=True)
class DemoRun:
    """One curve of the picture."""

    panel: str
    model: str
    eigenvalues: str
    spec: RunSpec

    @property
    def label(self) -> str:
        return f"{self.model} {self.eigenvalues}"


def runs(quick: bool = False) -> list[DemoRun]:
    """Six runs of about a quarter of a minute each; `quick` trains on shorter sequences, for fewer steps."""
    length = TRAIN_LENGTH // 2 if quick else TRAIN_LENGTH
    # One head that changes its sign suffices; with several, training also finds short-range shortcuts.
    one_head = {"d_model": 32, "heads": 1}
    panels = [
        ("Parity", "Mamba", "parity-dense", "mamba", {"d_model": 64}, 3e-3, 260 if quick else 300),
        ("Parity", "DeltaNet", "parity-dense", "deltanet-no-conv", one_head, 1e-2, 120 if quick else 300),
        (
            "Swaps of five items (S5)",
            "DeltaNet",
            "s5-swaps",
            "deltanet-no-conv",
            {},
            1e-3,
            240 if quick else 300,
        ),
    ]
    return [
        DemoRun(panel, model, eigenvalues, _spec(task_name, preset, changes, eigenvalues, lr, steps, length))
        for panel, model, task_name, preset, changes, lr, steps in panels
        for eigenvalues in EIGENVALUES
    ]


def _spec(
    task_name: str, preset: str, changes: dict, eigenvalues: str, lr: float, steps: int, length: int
) -> RunSpec:
    # four points per doubling, from a quarter of the training length to eight times it
    octaves = [length // 4 * 2**i for i in range(5)]
    lengths = [octave * quarter // 4 for octave in octaves for quarter in (4, 5, 6, 7)] + [
        MULTIPLES[-1] * length
    ]
    return RunSpec(
        task=task(task_name),
        model=model_config(preset, eigenvalues=eigenvalues, **changes),
        training=TrainingConfig(
            steps, lr=lr, train_lengths=(length, length), log_every=10, weight_decay=0.01
        ),
        evaluation=EvaluationConfig(eval_lengths=tuple(lengths), eval_samples=512, eval_batch=64),
    ).resolved()
