"""Trained models next to the theory: small models of the classes in the table of `explain`."""

from dataclasses import dataclass
from typing import Any

from statetrack.automata import Explanation, Verdict
from statetrack.errors import UserError
from statetrack.layers import ModelConfig, model_config
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import Automaton

MULTIPLES = (1, 2, 4, 8)  # of the training length: the columns of the table
MAX_FACTORS, MAX_LAYERS = 6, 4  # larger classes are not trained


@dataclass(frozen=True)
class VerdictRun:
    """One class of the table as a model that can be trained."""

    verdict: Verdict
    model: str
    spec: RunSpec


@dataclass(frozen=True)
class Measured:
    """A finished run: accuracy at `MULTIPLES` of the training length, and that of the most frequent state."""

    verdict: Verdict
    model: str
    accuracy: list[float]
    guess: list[float]
    folder: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "class": self.verdict.model.name,
            "answer": self.verdict.answer,
            "model": self.model,
            "accuracy": self.accuracy,
            "guess": self.guess,
            "folder": self.folder,
            "seconds": self.seconds,
        }


def runs(found: Explanation, steps: int, length: int) -> list[VerdictRun]:
    """A run for every class with a yes or no; of equivalent classes, the smallest."""
    dfa = found.dfa.minimal()
    if dfa.n_states == 1 or not dfa.alphabet:
        raise UserError("explain: the automaton has a single state or no letters: there is nothing to train.")
    task = Automaton.of(dfa, words="live")
    planned: dict[ModelConfig, VerdictRun] = {}
    for verdict in found.verdicts:
        chosen = _model(verdict, found)
        if chosen is not None and chosen[1] not in planned:
            name, config = chosen
            planned[config] = VerdictRun(verdict, name, _spec(task, config, steps, length))
    if not planned:
        raise UserError("explain: no class is both settled and small enough to train here.")
    return list(planned.values())


def _model(verdict: Verdict, found: Explanation) -> tuple[str, ModelConfig] | None:
    """Mamba or Mamba-3 for diagonal classes, DeltaNet or DeltaProduct without convolutions for others."""
    m = verdict.model
    # Rows with two and more factors in [0,1] answer as the row with one does; training one is enough.
    repeated = m.eigenvalues == "[0,1]" and (m.householders or 1) > 1
    if verdict.answer == "unknown" or repeated:
        return None
    levels = max(1, *(len(sizes) for sizes in found.cascades.values() if sizes is not None))
    layers = m.layers or (1 if levels == 1 or found.analysis.is_group else 2)
    if m.kind == "diagonal":
        family, preset = ("Mamba-3", "mamba3") if m.eigenvalues == "unit-circle" else ("Mamba", "mamba")
        name = f"{family} {m.eigenvalues}, {_layers(layers)}"
        return name, model_config(preset, d_model=32, layers=layers, eigenvalues=m.eigenvalues)
    k = m.householders or 1
    cascade_not_needed = m.name.endswith("(cascade)") and m is not found.cheapest
    if k > MAX_FACTORS or layers > MAX_LAYERS or cascade_not_needed:
        return None
    name = (
        f"DeltaNet {m.eigenvalues}, {_layers(layers)}" if k == 1 else f"DeltaProduct_{k}, {_layers(layers)}"
    )
    changes: dict[str, Any] = {
        "d_model": 64,
        "layers": layers,
        "householders": k,
        "eigenvalues": m.eigenvalues,
    }
    return name, model_config("deltanet-no-conv", **changes)


def _layers(n: int) -> str:
    return f"{n} layer{'s' if n > 1 else ''}"


def _spec(task: Automaton, model: ModelConfig, steps: int, length: int) -> RunSpec:
    return RunSpec(
        task=task,
        model=model,
        training=TrainingConfig(
            steps, lr=3e-3, train_lengths=(length, length), weight_decay=0.01, log_every=max(1, steps // 10)
        ),
        evaluation=EvaluationConfig(
            eval_lengths=tuple(m * length for m in MULTIPLES), eval_samples=512, eval_batch=128
        ),
    ).resolved()
