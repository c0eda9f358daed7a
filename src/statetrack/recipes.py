"""Training settings by name, for `statetrack train --recipe NAME`.

long    For trackers that are to stay right far beyond the training length: betas and gates that reach their
        bounds, so that reflections can be exact; a large rate that decays to zero, without weight decay; an
        eps of AdamW above the gradients that rounding leaves once a task is learned. DeltaNets on group word
        problems also go on with a sequence from batch to batch while their answers are right. docs/length.md
        has the measurements.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any

from statetrack.errors import unknown_name
from statetrack.layers import DeltaNetConfig, ModelConfig
from statetrack.spec import TrainingConfig
from statetrack.tasks import Task, WordProblem

__all__ = ["RECIPES", "Recipe", "recipe"]


@dataclass(frozen=True)
class Recipe:
    """Fields of the training part of a spec, and of every mixer that has them.

    `carrying` holds more of the training part, for the models and tasks that can carry states.
    """

    training: dict[str, Any]
    mixer: dict[str, Any] = field(default_factory=dict)
    carrying: dict[str, Any] = field(default_factory=dict)

    def applied(
        self, task: Task, model: ModelConfig, training: TrainingConfig, given: Collection[str] = ()
    ) -> tuple[ModelConfig, TrainingConfig]:
        """The model and the training part with the recipe's values, but for the fields that are `given`.

        What says nothing here, such as the gate of a model without one, has its default.
        """
        before: tuple[Any, ...] = model.mixers or (model.mixer,)
        mixers = tuple(replace(mixer, **_without(given, self.options_of(mixer))) for mixer in before)
        model = replace(model, mixer=mixers[0], mixers=mixers if model.mixers else ())
        training = replace(training, **_without(given, self.training))
        carrying = self.carrying if _can_carry(task, model, training) else _defaults(training, self.carrying)
        return model, replace(training, **_without(given, carrying))

    def options_of(self, mixer: Any) -> dict[str, Any]:
        """The recipe's options that a mixer's config has; `gate` says nothing about a plain DeltaNet."""
        found = {name: x for name, x in self.mixer.items() if hasattr(mixer, name)}
        if not getattr(mixer, "gated", True) and mixer.eigenvalues != "unit-circle":
            found |= _defaults(mixer, found.keys() & {"gate"})
        return found


def _without(given: Collection[str], options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in given}


def _defaults(config: Any, names: Collection[str]) -> dict[str, Any]:
    return {f.name: f.default for f in fields(config) if f.name in names}


def _can_carry(task: Task, model: ModelConfig, training: TrainingConfig) -> bool:
    """Whether `initial_states` "carried" is for this task, this model and these sequences."""
    low, high = training.train_lengths or task.train_lengths
    return (
        isinstance(task, WordProblem)
        and task.tokens_per_element == 1
        and low == high
        and not training.train_samples
        and all(isinstance(mixer, DeltaNetConfig) for mixer in model.mixers or (model.mixer,))
    )


RECIPES = {
    "long": Recipe(
        training={
            "lr": 2e-3,
            "schedule": "cosine",
            "warmup": 0.02,
            "final_lr": 1e-6,
            "weight_decay": 0.0,
            "eps": 1e-6,
        },
        mixer={"beta": "hard", "gate": "hard"},
        carrying={"initial_states": "carried-right", "carried_batches": 64},
    )
}


def recipe(name: str) -> Recipe:
    """The recipe of this name."""
    if not isinstance(name, str) or name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return RECIPES[name]
