"""Training from Python: `statetrack.train(task="parity-dense", mixer="deltanet", steps=500)`."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from statetrack import recipes, tasks
from statetrack.errors import UserError
from statetrack.field_comments import explain_fields
from statetrack.layers import AttentionConfig, MixerConfig, Model, ModelConfig, model_config
from statetrack.peer_options import UnknownOption, unknown_option
from statetrack.run import RESULTS, load_run, run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import Task
from statetrack.training import Options
from statetrack.training.initial import starting_from
from statetrack.training.printed_rows import note_on_baseline, print_row

__all__ = ["TrainedModel", "train"]


@explain_fields
@dataclass(frozen=True)
class TrainedModel:
    """A finished run: the model it trained, on the CPU, and what is known about it.

    trained = statetrack.train(steps=200)
    logits, state = trained.model(inputs)       inputs (B, T), logits (B, T, classes)
    trained.metrics["accuracy"]                 by length, on sequences not trained on
    """

    model: Model  # on the CPU
    spec: RunSpec  # task, model, training, evaluation and seed, with all defaults written out
    metrics: dict[str, Any]  # of the last step: loss, accuracy by length, ...
    folder: Path  # `load_run(folder)` gives spec and model again
    done: dict[str, Any]  # the content of done.json: metrics, seconds, machine, commit

    def __repr__(self) -> str:
        return f"TrainedModel(folder={str(self.folder)!r}, metrics={self.metrics})"


def train(
    task: str | Task = "parity-dense",
    mixer: str | ModelConfig | MixerConfig = "deltanet",
    *,
    alphabet: str | None = None,
    recipe: str | None = None,
    initial: str | Path | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    device: str = "auto",
    verbose: bool = True,
    **options: Any,
) -> TrainedModel:
    """Train one model on one task, as `statetrack train` does, and return it with its metrics.

        trained = train("parity-dense", "deltanet", eigenvalues="[-1,1]", steps=200, eval_lengths=(40, 256))
        trained.metrics["accuracy"]                 {"40": 1.0, "256": ...}
        trained.model(inputs)                       the trained `Model`

    - `task`: a name that `statetrack.task` knows ("parity", "s5-swaps", "regex:(ab|ba)*" with `alphabet`,
      "group:S5", "jsonl:FILE", ...), or a `Task`.
    - `mixer`: a name that `statetrack.model_config` knows ("deltanet", "mamba", "mlstm", ...), a
      `ModelConfig`, or the config of a mixer, such as `DeltaNetConfig(heads=2)`.
    - `options`: fields of `TrainingConfig` (steps, batch, lr, ...), of `EvaluationConfig` (eval_lengths,
      ...), of the task (inputs, words, ...), of the backbone (d_model, layers, ...) and of the mixer (heads,
      eigenvalues, ...).
    - `recipe`: "long" changes the defaults of the options, for trackers that are to stay right at lengths far
      beyond those of training (docs/length.md).
    - `initial`: the folder of a finished run, or a safetensors file, whose weights this run starts from.
    - `out`: the results folder, results/<run_id> by default. A finished run is read from it, not repeated; an
      interrupted one continues from its last checkpoint.
    - `device`: "auto", "cpu" or "cuda". `verbose=False` prints nothing.
    """
    chosen = tasks.task(task, alphabet) if isinstance(task, str) else task
    if not isinstance(chosen, Task):
        raise UserError(f"train: task is {task!r}, expected a name such as 'parity-dense', or a Task.")
    named = {*options}
    of_task = _taken(options, chosen)
    of_training = _taken(options, TrainingConfig)
    evaluation = EvaluationConfig(**_taken(options, EvaluationConfig))
    if isinstance(mixer, str):
        model = _model(mixer, chosen, options)
    elif isinstance(mixer, type) or not isinstance(mixer, ModelConfig | MixerConfig):
        raise UserError(
            f"train: mixer is {mixer!r:.80}, expected a name such as 'deltanet', a ModelConfig, or the "
            "config of a mixer, such as DeltaNetConfig(heads=2)."
        )
    elif options:
        error = unknown_option("train", next(iter(options)), _names(TrainingConfig, EvaluationConfig, chosen))
        raise UnknownOption(
            f"{error} Those of the model are in its config: ModelConfig(DeltaNetConfig(heads=2), d_model=32)."
        )
    else:
        model = mixer if isinstance(mixer, ModelConfig) else ModelConfig(mixer)
    chosen, training = replace(chosen, **of_task), TrainingConfig(**of_training)
    if recipe is not None:
        model, training = recipes.recipe(recipe).applied(chosen, model, training, named)
    spec = RunSpec(chosen, model, training, evaluation, seed).resolved()
    if initial is not None:
        spec = starting_from(spec, initial)
    if out is not None and not (isinstance(out, str | Path) and str(out)):
        raise UserError(f"train: out is {out!r}, expected a folder, or None for results/<run_id>.")
    folder = RESULTS / spec.id if out is None else Path(out)
    how = Options(device, progress=print_row) if verbose else Options(device, say=lambda text: None)
    done = run(spec, folder, how)
    if verbose and (note := note_on_baseline(done["metrics"], spec.task)):
        print(note)
    return TrainedModel(load_run(folder)[1], spec, done["metrics"], folder, done)


def _model(name: str, chosen: Task, options: dict[str, Any]) -> ModelConfig:
    """The named model with the options that are left; an unknown one is answered with all there are."""
    preset = model_config(name)
    known = _names(preset, preset.mixer, TrainingConfig, EvaluationConfig, chosen)
    known += ["attention_every", *(_names(AttentionConfig) if "attention_every" in options else [])]
    for option in options:
        if option not in known:
            raise unknown_option("train", option, known, of=name)
    return model_config(name, **options)


def _taken(options: dict[str, Any], config: Any) -> dict[str, Any]:
    """The options that are fields of a dataclass, removed from `options`; sequences become tuples."""
    names = [name for name in _names(config) if name in options]
    given = {name: options.pop(name) for name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _names(*configs: Any) -> list[str]:
    return [field.name for config in configs for field in fields(config)]
