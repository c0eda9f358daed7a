"""statetrack train: one model on one task; every field of the spec is a flag."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

from statetrack.commands.flags import parse, take, take_plugins
from statetrack.errors import UserError
from statetrack.layers import ModelConfig, model_config
from statetrack.layers.presets import preset_names, with_mixer_options
from statetrack.ops.checks import checked
from statetrack.plugins import load_plugins
from statetrack.run import print_row, run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import TASKS, task
from statetrack.training import Options


@dataclass(frozen=True)
class TrainOptions:
    """How the run is carried out; none of this is part of the spec."""

    out: Path | None = None  # results folder; results/<run_id> when None
    device: str = "auto"  # auto, cpu or cuda
    checkpoint_seconds: float = 20.0  # maximum time between checkpoints
    cuda_graphs: bool = True  # on a GPU, launch each step as one CUDA graph
    check_values: bool = False  # check beta, keys and NaN in every step (slower)
    print_spec: bool = False  # print the spec as JSON and stop


def main(arguments: Sequence[str]) -> None:
    options, spec = read_arguments(arguments)
    if options.print_spec:
        print(json.dumps(spec.to_dict(), indent=2))
        return
    how = Options(options.device, options.checkpoint_seconds, options.cuda_graphs, progress=print_row)
    with checked(options.check_values):
        done = run(spec, options.out, how)
    folder = options.out or Path("results") / spec.id
    print(f"{folder}: {done['seconds']:.0f} s on {done['machine']['device']}")


def read_arguments(arguments: Sequence[str]) -> tuple[TrainOptions, RunSpec]:
    """The options and the spec. What names the task and the model is read before the other flags."""
    rest = take_plugins(arguments)
    if {"-h", "--help"} & {*rest}:
        load_plugins()  # to list their names
    task_name, rest = take(rest, "--task", "parity-dense")
    mixer_name, rest = take(rest, "--mixer", "deltanet")
    alphabet, rest = take(rest, "--alphabet", None)
    every, rest = take(rest, "--attention-every", "0")
    chosen_task = task(task_name, alphabet)
    model = model_config(mixer_name)
    defaults = {
        "task": chosen_task,
        "mixer": model.mixer,
        "model": _Backbone(**{name: value for name, value in vars(model).items() if name not in _MIXERS}),
        "training": TrainingConfig(),
        "evaluation": EvaluationConfig(),
        "options": TrainOptions(),
    }
    fields = [(name, type(value), field(default=value)) for name, value in defaults.items()]
    _check_flags(defaults)
    description = (
        f"Train on --task {task_name} ({', '.join(TASKS)}, or regex:PATTERN, dfa:FILE.json, group:NAME, "
        f"jsonl:FILE) with --mixer {mixer_name} ({preset_names()}). --attention-every N makes every N-th "
        "layer attention. "
        "--plugin FILE.py, or a module, adds tasks and mixers of your own."
    )
    arguments_class = make_dataclass(
        "Train", [*fields, ("seed", int, field(default=0))], namespace={"__doc__": description}, frozen=True
    )
    given = parse(arguments_class, rest, "statetrack train")
    model = _model(mixer_name, model, given, every)
    spec = RunSpec(given.task, model, given.training, given.evaluation, given.seed).resolved()
    return given.options, spec


def _model(name: str, preset: ModelConfig, given: Any, attention_every: str) -> ModelConfig:
    """The preset with the flags that were given; options of the mixer go to every mixer of a hybrid."""
    options = {f.name: getattr(given.mixer, f.name) for f in fields(given.mixer)}
    changed = {key: value for key, value in options.items() if value != getattr(preset.mixer, key)}
    if attention_every != "0":
        every = int(attention_every) if attention_every.isdecimal() else attention_every
        return model_config(name, attention_every=every, **vars(given.model), **changed)
    return with_mixer_options(name, replace(preset, **vars(given.model)), changed)


def _check_flags(parts: dict[str, Any]) -> None:
    """Refuse two parts with a field of the same name, which tasks and mixers from outside can cause."""
    owners = {"seed": "run"}
    for part, config in parts.items():
        for name in (f.name for f in fields(config)):
            if name in owners:
                flag = "--" + name.replace("_", "-")
                raise UserError(
                    f"train: {flag} would be a field of the {owners[name]} and of the {part} "
                    f"{type(config).__name__}. Rename one, or run a spec file: python -m statetrack.run."
                )
            owners[name] = part


_MIXERS = ("mixer", "mixers")  # chosen by name
_Backbone = make_dataclass(
    "_Backbone",
    [(f.name, f.type) for f in ModelConfig.__dataclass_fields__.values() if f.name not in _MIXERS],
    frozen=True,
)
