"""What a family of checkpoints is: its options against ours, and its names of the weights against ours."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.layers import ModelConfig
from statetrack.layers.mixer import MixerConfig

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Equal:
    """Tensors with the same rows: ours, one below the other, and theirs. One of the sides is one tensor."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()  # of each tensor of the side that has several


@dataclass(frozen=True)
class Family:
    """A kind of checkpoint, as config.json names it by `model_type`.

    `read` gives our configuration of their settings, `write` their settings of ours; both refuse what the
    other side does not have. `names` are the weights of a model, and `named` puts weights that were stored
    under other names under these. `before_writing` may give an equal model that the family can express, and
    `after_reading` takes that back.
    """

    name: str
    model_type: str
    architecture: str
    defaults: Mapping[str, Any] | None  # of its settings; None: transformers has the class of its config
    read: Callable[[Mapping[str, Any]], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    names: Callable[[ModelConfig], list[Equal]]
    named: Callable[[ModelConfig, Weights], Weights] = lambda _, weights: weights
    before_writing: Callable[[ModelConfig, Weights], tuple[ModelConfig, Weights]] = lambda *model: model
    after_reading: Callable[[ModelConfig, Weights], tuple[ModelConfig, Weights]] = lambda *model: model


def one(ours: str, theirs: str) -> Equal:
    """One tensor under two names."""
    return Equal((ours,), (theirs,))


def renamed(pairs: Mapping[str, str], ours: str, theirs: str, suffix: str = ".weight") -> list[Equal]:
    """`one` for each pair of names, below the prefixes `ours` and `theirs`."""
    return [one(f"{ours}{a}{suffix}", f"{theirs}{b}{suffix}") for a, b in pairs.items()]


def to_ours(where: str, names: Sequence[Equal], weights: Weights) -> Weights:
    """Their weights under our names. Anything missing or left over is an error."""
    wanted = {name for equal in names for name in equal.theirs}
    if missing := sorted(wanted - weights.keys()):
        raise UserError(
            f"{where}: the weight {missing[0]!r} is missing ({len(missing)} are). Its config.json and its "
            "weights are of two models, or of a version of the family that is not known here."
        )
    if unknown := sorted(weights.keys() - wanted):
        raise UserError(
            f"{where}: the weight {unknown[0]!r} is not known ({len(unknown)} are not), so the logits would "
            "not be those of this checkpoint."
        )
    return {
        name: part for equal in names for name, part in _parts(equal.ours, equal.theirs, equal.rows, weights)
    }


def to_theirs(names: Sequence[Equal], weights: Weights) -> Weights:
    """Our weights under their names."""
    return {
        name: part for equal in names for name, part in _parts(equal.theirs, equal.ours, equal.rows, weights)
    }


def _parts(to: tuple[str, ...], of: tuple[str, ...], rows: tuple[int, ...], weights: Weights):
    whole = weights[of[0]] if len(of) == 1 else torch.cat([weights[name] for name in of])
    if len(to) > 1 and sum(rows) != len(whole):
        raise UserError(
            f"The weight {of[0]!r} has {len(whole)} rows, expected {sum(rows)} by the configuration."
        )
    parts = (whole,) if len(to) == 1 else (part.contiguous() for part in whole.split(rows))
    return zip(to, parts, strict=True)


def expect(where: str, settings: Any, **expected: Any) -> None:
    """Refuse settings, a mapping or a config, with another value than the one that the other side has."""
    for name, value in expected.items():
        given = settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name)
        allowed = value if isinstance(value, tuple) else (value,)
        if given not in allowed:
            raise UserError(
                f"{where}: {name} is {given!r}, expected {' or '.join(map(repr, allowed))}. A model with "
                "another value cannot be converted."
            )


def single(where: str, mixers: Iterable[MixerConfig], kind: type, what: str) -> Any:
    """The one configuration that all these mixers have."""
    found = list(dict.fromkeys(mixers))
    if len(found) == 1 and isinstance(found[0], kind):
        return found[0]
    shown = ", ".join(dict.fromkeys(type(mixer).__name__ for mixer in found)) or "none"
    raise UserError(
        f"{where}: the {what} have {len(found)} configurations ({shown}), expected one {kind.__name__} for "
        "all of them."
    )


def of_pattern(mixers: Sequence[MixerConfig]) -> dict[str, Any]:
    """`mixer` and `mixers` of a `ModelConfig` with these layers, as the shortest pattern that repeats."""
    for period in range(1, len(mixers) + 1):
        if all(mixer == mixers[i % period] for i, mixer in enumerate(mixers)):
            return {"mixer": mixers[0], "mixers": () if period == 1 else tuple(mixers[:period])}
    raise UserError("A model without layers cannot be converted.")


def layers_of(config: ModelConfig) -> list[MixerConfig]:
    """The mixers of all layers."""
    return [config.mixer_of(layer) for layer in range(config.layers)]


def expect_backbone(where: str, config: ModelConfig, *, mlp: bool) -> None:
    """Refuse a backbone without RMS norms and residual sums, or without (with) a SwiGLU in each layer."""
    expect(where, config, norm="rms", residual=True)
    if mlp:
        expect(where, config, mlp="swiglu")
    if mlp != (config.mlp_ratio > 0):
        expected = "above 0: its layers have an MLP" if mlp else "0: its layers have no MLP"
        raise UserError(f"{where}: mlp_ratio is {config.mlp_ratio}, expected {expected}.")
