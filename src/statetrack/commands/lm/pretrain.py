"""statetrack lm pretrain: train a language model on token shards, on one process or many."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from statetrack.commands.flags import take, take_first, take_plugins
from statetrack.commands.spec_flags import given_model, model_parts, parse_parts
from statetrack.config import from_dict
from statetrack.errors import UserError, unknown_name
from statetrack.exit_codes import exit_codes
from statetrack.integrations.loggers import logging_to
from statetrack.layers import SIZED_PRESETS, model_config
from statetrack.layers.presets import preset_names
from statetrack.layers.ranges import KEEP
from statetrack.lm.embedded import embedded_corpus
from statetrack.lm.extend import extended_spec
from statetrack.lm.specs import CONTEXT, EVALUATION, PAPER, TRAINING
from statetrack.lm.tokenizers import check_same_tokenizer
from statetrack.plugins import load_plugins
from statetrack.run import RESULTS, processes, run
from statetrack.run_folder import TOKENIZER
from statetrack.spec import RunSpec
from statetrack.tasks import Corpus
from statetrack.training import Options
from statetrack.training.corpus_source import check_corpus
from statetrack.training.loop import resolve_device
from statetrack.training.printed_rows import print_row
from statetrack.training.ranks import Ranks, is_first_process, leaving_at_once

PAPER_PREFIX = "paper:"
EXAMPLE = "deltanet-60m"
_ANY = Corpus("DIR", sha256="-", context=CONTEXT, vocabulary=257)  # stands for data that --help does not need


@dataclass(frozen=True)
class CorpusFields:
    """What a run makes of the data."""

    context: int = CONTEXT  # tokens of a training sequence
    reset: bool = False  # start every document from an empty state (the paper's code does not)
    vocabulary: int = 0  # of the model, at least that of the data; 0 for equal


@dataclass(frozen=True)
class PretrainOptions:
    """How the run is carried out; none of this is part of the spec."""

    out: Path | None = None  # results folder; results/<run_id> when None
    device: str = "auto"  # auto, cpu or cuda
    parallel: Literal["ddp", "fsdp", "zero2"] | None = None  # how torchrun's processes share the work
    micro_batches: int = 1  # pieces of a process's batch, one after the other to save memory
    activation_checkpointing: bool = False  # compute blocks again in the backward pass to save memory
    checkpoint_seconds: float = 600.0  # maximum time between checkpoints
    checkpoints: Literal["whole", "sharded"] | None = None  # one file, or one per process (fsdp, zero2)
    spike: float = 1.0  # stop when the loss is this much above the median of its last rows; 0: at NaN only
    cuda_graphs: bool = True  # on one GPU, launch each step as one CUDA graph
    log: Literal["tensorboard", "wandb"] | None = None  # where rows go besides metrics.jsonl
    print_spec: bool = False  # print the spec as JSON and stop


def main(arguments: Sequence[str]) -> None:
    device, _ = take(arguments, "--device", "auto")
    with leaving_at_once(), exit_codes(quiet=not is_first_process()), processes(device) as ranks:
        with ranks.together():
            options, spec = read_arguments(arguments, ranks)
            if not options.print_spec:
                check_corpus(spec)  # before the run, which makes its folder first
        if options.print_spec:
            if ranks.is_first:
                print(json.dumps(spec.to_dict(), indent=2))
            return
        _pretrain(spec, options, ranks)


def _pretrain(spec: RunSpec, options: PretrainOptions, ranks: Ranks) -> None:
    folder = options.out or RESULTS / spec.id
    with logging_to(options.log if ranks.is_first else None, folder, spec) as log:

        def progress(step: int, row: dict[str, Any]) -> None:
            print_row(step, row)
            log(step, row)

        with ranks.together():
            how = Options(
                options.device,
                options.checkpoint_seconds,
                options.cuda_graphs,
                progress=progress,
                ranks=ranks,
                parallel=options.parallel,
                micro_batches=options.micro_batches,
                checkpoints=options.checkpoints,
                activation_checkpointing=options.activation_checkpointing,
                spike=options.spike,
            )
        done = run(spec, folder, how)
    if ranks.is_first:
        print(f"{folder}: {done['seconds']:.0f} s on {done['machine']['device']}")


def read_arguments(arguments: Sequence[str], ranks: Ranks | None = None) -> tuple[PretrainOptions, RunSpec]:
    """The options and the spec. What names the model and the data is read before the other flags."""
    rest = take_plugins(arguments)
    name, rest = take_first(rest)
    data, rest = take(rest, "--data", None)
    extend, rest = take(rest, "--extend", None)
    keep, rest = take(rest, "--keep", "weights")
    every, rest = take(rest, "--attention-every", "0")
    device, _ = take(rest, "--device", "auto")
    if {"-h", "--help"} & {*rest}:
        load_plugins()  # to list their names
        default = RunSpec(
            _ANY, model_config(name if name in SIZED_PRESETS else EXAMPLE), TRAINING, EVALUATION
        )
    else:
        default = _default(name, data, extend, keep, device, ranks or Ranks())
    corpus = default.task
    assert isinstance(corpus, Corpus)
    parts: dict[str, Any] = {
        "task": CorpusFields(corpus.context, corpus.reset, 0 if corpus is _ANY else corpus.vocabulary),
        **model_parts(default.model),
        "training": default.training,
        "evaluation": default.evaluation,
        "run": PretrainOptions(),
    }
    description = (
        "Train a language model: statetrack lm pretrain SPEC.json | PRESET | paper:NAME [--data DIR]. "
        f"Presets: {preset_names()}. Runs of the paper: {', '.join(PAPER)}. --data is a folder of "
        "`statetrack lm tokenize` (default: the Python standard library as bytes). --extend RUN starts from "
        "the weights of a run in [0,1] and opens its range to [-1,1]; --keep function fits them first so "
        "that the model computes nearly the same. --attention-every N makes every N-th layer attention."
    )
    given = parse_parts(parts, rest, "statetrack lm pretrain", description, default.seed)
    task = Corpus(corpus.path, corpus.sha256, given.task.context, given.task.reset, given.task.vocabulary)
    model = given_model(name or "model", default.model, given, every)
    changed = {"training": given.training, "evaluation": given.evaluation, "seed": given.seed}
    spec = replace(default, task=task, model=model, **changed).resolved()
    if not given.run.print_spec:
        _check_data(spec, None if extend is None else Path(extend))
    return given.run, spec


def _default(
    name: str | None, data: str | None, extend: str | None, keep: str, device: str, ranks: Ranks
) -> RunSpec:
    """The spec before any flag, with lengths left to the task."""
    if extend is not None:
        return _extended(Path(extend), name, data, keep, ranks)
    if name is None:
        raise UserError(f"lm pretrain needs a spec, a preset or paper:NAME, for example {EXAMPLE}.")
    if name.endswith(".json") or Path(name).is_file():
        return _from_file(Path(name), data)
    if Path(name, "spec.json").is_file():
        raise UserError(
            f"lm pretrain: {name} is the folder of a run. To go on with it: {name}/spec.json --out {name}"
        )
    folder = data if data is not None else ranks.on_first(lambda: str(embedded_corpus()))
    if name.startswith(PAPER_PREFIX):
        run_name = name.removeprefix(PAPER_PREFIX)
        if run_name not in PAPER:
            raise unknown_name("lm pretrain: run of the paper", run_name, PAPER)
        paper = PAPER[run_name]
        corpus = Corpus(folder, context=CONTEXT, vocabulary=paper.vocabulary)
        return RunSpec(corpus, model_config(paper.model), paper.training, EVALUATION)
    # a CPU has no fast bfloat16
    precision = "bfloat16" if resolve_device(device).type == "cuda" else "float32"
    return RunSpec(
        Corpus(folder, context=CONTEXT),
        model_config(name),
        replace(TRAINING, precision=precision),
        EVALUATION,
    )


def _from_file(path: Path, data: str | None) -> RunSpec:
    """The spec in a file, on its own data or on those in the folder `data`."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable JSON file: {error}") from None
    if data is not None and isinstance(content, dict) and isinstance(content.get("task"), dict):
        content["task"] |= {"path": data, "sha256": ""}
    spec = from_dict(content)
    if not isinstance(spec, RunSpec) or not isinstance(spec.task, Corpus):
        raise UserError(f"{path} is not the spec of a language model, whose task is a Corpus.")
    return _with_free_lengths(spec)


def _with_free_lengths(spec: RunSpec) -> RunSpec:
    """Lengths that follow from the context follow it again, so that --context can change."""
    training, evaluation = spec.training, spec.evaluation
    if training.train_lengths == spec.task.train_lengths:
        training = replace(training, train_lengths=None)
    if evaluation.eval_lengths == spec.task.eval_lengths:
        evaluation = replace(evaluation, eval_lengths=None)
    return replace(spec, training=training, evaluation=evaluation)


def _extended(run_folder: Path, name: str | None, data: str | None, keep: str, ranks: Ranks) -> RunSpec:
    """The spec of a finished run with the range [-1,1] and its weights to start from."""
    if name is not None:
        raise UserError(f"lm pretrain: {name!r} and --extend were both given; a run brings its own model.")
    if keep not in KEEP:
        raise unknown_name("--keep", keep, KEEP)
    spec = _from_file(run_folder / "spec.json", data)
    return ranks.on_first(lambda: extended_spec(spec, run_folder, keep))  # type: ignore[arg-type]


def _check_data(spec: RunSpec, extended: Path | None) -> None:
    """Refuse data that do not fit the vocabulary, or the run whose weights are taken; no folder is left."""
    assert isinstance(spec.task, Corpus)
    folder = spec.task.shards.folder
    if extended is not None and (extended / TOKENIZER).exists():
        check_same_tokenizer(folder, extended)
