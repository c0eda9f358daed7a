"""Training settings by name, for `statetrack train --recipe NAME`.

long    For trackers that are to stay right far beyond the training length: betas that reach their bounds, so
        that reflections can be exact; a large rate that decays to zero, without weight decay; an eps of AdamW
        above the gradients that rounding leaves once a task is learned. docs/length.md has the measurements.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from statetrack.errors import unknown_name
from statetrack.layers import ModelConfig
from statetrack.spec import TrainingConfig

__all__ = ["RECIPES", "Recipe", "recipe"]


@dataclass(frozen=True)
class Recipe:
    """Fields of the training part of a spec, and of every mixer that has them."""

    training: dict[str, Any]
    mixer: dict[str, Any] = field(default_factory=dict)

    def train(self, training: TrainingConfig) -> TrainingConfig:
        """The training part with the recipe's values; steps, batch and lengths stay."""
        return replace(training, **self.training)

    def build(self, model: ModelConfig) -> ModelConfig:
        """The model with the recipe's options in each of its mixers that has them."""
        mixers = tuple(
            replace(mixer, **{name: x for name, x in self.mixer.items() if hasattr(mixer, name)})  # type: ignore[type-var]
            for mixer in model.mixers or (model.mixer,)
        )
        return replace(model, mixer=mixers[0], mixers=mixers if model.mixers else ())


RECIPES = {
    "long": Recipe(
        {
            "lr": 2e-3,
            "schedule": "cosine",
            "warmup": 0.02,
            "final_lr": 1e-6,
            "weight_decay": 0.0,
            "eps": 1e-6,
        },
        {"beta": "hard"},
    )
}


def recipe(name: str) -> Recipe:
    """The recipe of this name."""
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return RECIPES[name]
