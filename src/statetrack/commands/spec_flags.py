"""Every field of a run spec as a flag: what `train` and `lm pretrain` share."""

from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass, replace
from typing import Any

from statetrack.commands.flags import parse
from statetrack.errors import UserError
from statetrack.field_comments import field_comments, listed
from statetrack.layers import ModelConfig
from statetrack.layers.presets import with_attention, with_mixer_options

SEED = "of initial weights and training data: another seed is another run"


def parse_parts(
    parts: dict[str, Any], arguments: Sequence[str], prog: str, description: str, seed: int = 0
) -> Any:
    """Read the fields of several dataclasses, given with their defaults, and --seed; one attribute each."""
    _check_flags(prog, parts)
    named = [(name, type(value), field(default=value)) for name, value in parts.items()]
    arguments_class = make_dataclass(
        "Arguments",
        [*named, ("seed", int, field(default=seed))],
        namespace={"__doc__": f"{description}\n\n{listed({'seed': SEED})}"},
        frozen=True,
    )
    return parse(arguments_class, arguments, prog)


def model_parts(model: ModelConfig) -> dict[str, Any]:
    """The parts "mixer" and "model" of a config; which mixers there are is chosen by name."""
    backbone = {name: value for name, value in vars(model).items() if name not in _MIXERS}
    return {"mixer": model.mixer, "model": _Backbone(**backbone)}


def given_model(name: str, default: ModelConfig, given: Any, attention_every: str = "0") -> ModelConfig:
    """`default`, which has the name `name`, with the flags that were given; options of the mixer go to every
    mixer of a hybrid."""
    options = {f.name: getattr(given.mixer, f.name) for f in fields(given.mixer)}
    changed = {key: value for key, value in options.items() if value != getattr(default.mixer, key)}
    config = replace(default, **vars(given.model))
    if attention_every != "0":
        every: Any = int(attention_every) if attention_every.isdecimal() else attention_every
        config = with_attention(name, config, every)
    return with_mixer_options(name, config, changed)


def _check_flags(prog: str, parts: dict[str, Any]) -> None:
    """Refuse two parts with a field of the same name, which tasks and mixers from outside can cause."""
    owners = {"seed": "run"}
    for part, config in parts.items():
        for name in (f.name for f in fields(config)):
            if name in owners:
                flag = "--" + name.replace("_", "-")
                raise UserError(
                    f"{prog.removeprefix('statetrack ')}: {flag} would be a field of the {owners[name]} and "
                    f"of the {part} {type(config).__name__}. Rename one, or run a spec file: "
                    "python -m statetrack.run."
                )
            owners[name] = part


_MIXERS = ("mixer", "mixers")
_Backbone = make_dataclass(
    "_Backbone",
    [(f.name, f.type) for f in ModelConfig.__dataclass_fields__.values() if f.name not in _MIXERS],
    namespace={
        "__doc__": "The backbone around the mixer.\n\n" + listed(field_comments(ModelConfig), _MIXERS)
    },
    frozen=True,
)
