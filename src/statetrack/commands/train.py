"""statetrack train: one model on one task; every field of the spec is a flag."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from statetrack.commands.flags import take, take_plugins
from statetrack.commands.spec_flags import given_model, model_parts, parse_parts
from statetrack.layers import model_config
from statetrack.layers.presets import preset_names
from statetrack.ops.checks import checked
from statetrack.plugins import load_plugins
from statetrack.run import run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import TASKS, task
from statetrack.training import Options
from statetrack.training.printed_rows import print_row


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
    parts = {"task": chosen_task, **model_parts(model), "training": TrainingConfig()}
    parts |= {"evaluation": EvaluationConfig(), "options": TrainOptions()}
    description = (
        f"Train on --task {task_name} ({', '.join(TASKS)}, or regex:PATTERN, dfa:FILE.json, group:NAME, "
        f"jsonl:FILE, corpus:DIR) with --mixer {mixer_name} ({preset_names()}). --attention-every N makes "
        "every N-th layer attention. "
        "--plugin FILE.py, or a module, adds tasks and mixers of your own."
    )
    given = parse_parts(parts, rest, "statetrack train", description)
    model = given_model(mixer_name, model, given, every)
    spec = RunSpec(given.task, model, given.training, given.evaluation, given.seed).resolved()
    return given.options, spec
