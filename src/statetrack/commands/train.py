"""statetrack train: one model on one task; every field of the spec is a flag.

The heavy imports are in functions, so that `statetrack train --help` answers at once.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from statetrack.commands.train_help import overview
from statetrack.errors import UserError
from statetrack.plugins import VARIABLE

if TYPE_CHECKING:
    from statetrack.spec import RunSpec


@dataclass(frozen=True)
class TrainOptions:
    """How the run is carried out; none of this is part of the spec."""

    out: Path | None = None  # results folder; results/<run_id> when None
    device: str = "auto"  # auto, cpu or cuda
    checkpoint_seconds: float = 20.0  # maximum time between checkpoints
    cuda_graphs: bool = True  # on a GPU, launch each step as one CUDA graph
    check_values: bool = False  # check beta, keys and NaN in every step (slower)
    log: Literal["tensorboard", "wandb"] | None = None  # where rows go besides metrics.jsonl
    print_spec: bool = False  # print the spec as JSON and stop


def main(arguments: Sequence[str]) -> None:
    if [*arguments] in (["-h"], ["--help"]) and not os.environ.get(VARIABLE):
        print(overview())
        return
    options, spec = read_arguments(arguments)
    if options.print_spec:
        print(json.dumps(spec.to_dict(), indent=2))
        return
    _train(spec, options)


def _train(spec: "RunSpec", options: TrainOptions) -> None:
    from statetrack.commands.progress import steps_bar
    from statetrack.integrations.loggers import logging_to
    from statetrack.ops.checks import checked
    from statetrack.run import RESULTS, run
    from statetrack.training import Options
    from statetrack.training.loop import check_options, resolve_device
    from statetrack.training.printed_rows import note_on_baseline, print_row

    folder = options.out or RESULTS / spec.id
    how = Options(options.device, options.checkpoint_seconds, options.cuda_graphs)
    check_options(spec, how)  # wrong ones before the header
    if not (folder / "done.json").exists():
        print(header(spec, resolve_device(options.device).type, folder), flush=True)
    with (
        logging_to(options.log, folder, spec) as log,
        steps_bar(spec.training.steps) as bar,
        checked(options.check_values),
    ):

        def progress(step: int, row: dict[str, Any]) -> None:
            bar(step, row)
            print_row(step, row)
            log(step, row)

        how.progress = progress
        done = run(spec, folder, how)
    if note := note_on_baseline(done["metrics"], spec.task):
        print(note)
    print(f"{folder}: {done['seconds']:.0f} s on {done['machine']['device']}")


def header(spec: "RunSpec", device: str, folder: Path) -> str:
    """What is about to be trained, in one line: model, range, parameters, task, device and folder."""
    import torch

    from statetrack.layers import Model
    from statetrack.tasks import TASKS

    task, config = spec.task, spec.model
    names = [name for name, known in TASKS.items() if known == task] or [type(task).__name__]
    with torch.device("meta"):
        model = Model(config, task.vocab_size, task.n_classes)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    mixers = config.mixers or (config.mixer,)
    kinds = dict.fromkeys(type(mixer).__name__.removesuffix("Config") for mixer in mixers)
    ranges = dict.fromkeys(x for mixer in mixers if (x := getattr(mixer, "eigenvalues", None)))
    of_range = f" {' and '.join(ranges)}" if ranges else ""
    layers = f"{config.layers} layer{'s' if config.layers > 1 else ''}"
    return (
        f"{' and '.join(kinds)}{of_range}, {layers}, {parameters:,} parameters; {names[-1]} with "
        f"{task.vocab_size} tokens and {task.n_classes} classes; {device}; {folder}"
    )


def read_arguments(arguments: Sequence[str]) -> "tuple[TrainOptions, RunSpec]":
    """The options and the spec. What names the task and the model is read before the other flags."""
    from statetrack.commands.flags import names_given, take, take_all, take_plugins
    from statetrack.commands.spec_flags import given_model, model_parts, parse_parts
    from statetrack.layers import model_config
    from statetrack.layers.presets import preset_names
    from statetrack.plugins import load_plugins
    from statetrack.recipes import RECIPES, recipe
    from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
    from statetrack.tasks import TASKS, task
    from statetrack.training.initial import starting_from

    rest = take_plugins(arguments)
    if "" in take_all(rest, "--out")[0]:
        raise UserError("--out is empty, expected a folder. Leave it out for results/<run_id>.")
    if {"-h", "--help"} & {*rest}:
        load_plugins()  # to list their names
    task_name, rest = take(rest, "--task", "parity-dense")
    mixer_name, rest = take(rest, "--mixer", "deltanet")
    alphabet, rest = take(rest, "--alphabet", None)
    every, rest = take(rest, "--attention-every", "0")
    recipe_name, rest = take(rest, "--recipe", None)
    initial, rest = take(rest, "--initial", None)
    chosen_task = task(task_name, alphabet)
    model, training = model_config(mixer_name), TrainingConfig()
    chosen = None if recipe_name is None else recipe(recipe_name)
    if chosen is not None:  # the defaults of the flags
        model, training = chosen.applied(chosen_task, model, training)
    parts = {"task": chosen_task, **model_parts(model), "training": training}
    parts |= {"evaluation": EvaluationConfig(), "run": TrainOptions()}
    description = (
        f"Train on --task {task_name} ({', '.join(TASKS)}, or regex:PATTERN, dfa:FILE.json, group:NAME, "
        f"jsonl:FILE, corpus:DIR) with --mixer {mixer_name} ({preset_names()}). --attention-every N makes "
        f"every N-th layer attention. --recipe NAME ({', '.join(RECIPES)}) changes the defaults below. "
        "--initial RUN starts from the final weights of another run, a folder or a safetensors file. "
        "--plugin FILE.py, or a module, adds tasks and mixers of your own. `statetrack train --help` alone "
        "says what the tasks and mixers are."
    )
    given = parse_parts(parts, rest, "statetrack train", description)
    model, training = given_model(mixer_name, model, given, every), given.training
    if chosen is not None:  # again: flags can add what it speaks about, such as a gate, or take it away
        model, training = chosen.applied(given.task, model, training, names_given(rest))
    spec = RunSpec(given.task, model, training, given.evaluation, given.seed).resolved()
    return given.run, spec if initial is None else starting_from(spec, initial)
