"""The run spec: everything that decides what a training run computes, and nothing else.

Where it runs, how often it saves and what it prints are options of `statetrack.run`, not part of the spec.
Saving and printing change no metric; a GPU draws other training data than a CPU from the same seed, which is
one more sample of the same experiment, so it does not change the run's id either.
"""

import json
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from statetrack.config import added, check_types, from_dict, register_kind, run_id, to_dict
from statetrack.errors import UserError, unknown_name
from statetrack.layers import PRESETS, Model, ModelConfig
from statetrack.tasks import Task, WordProblem, task

__all__ = ["EvaluationConfig", "RunSpec", "TrainingConfig"]


@dataclass(frozen=True)
class TrainingConfig:
    """AdamW with warm-up, a learning-rate schedule and gradient clipping.

    The defaults suit small models on a CPU; the experiments set the values of the paper.
    """

    steps: int = 1000  # number of updates
    batch: int = 64  # sequences of one step
    lr: float = 1e-3  # largest learning rate
    schedule: Literal["constant", "cosine"] = "cosine"  # of the learning rate after the warm-up
    warmup: float = 0.1  # fraction of the steps
    final_lr: float = 1e-6  # where the cosine ends
    weight_decay: float = 0.1  # AdamW's, of matrices; embeddings, biases and norms have none
    beta1: float = 0.9  # AdamW's mean of gradients
    beta2: float = 0.999  # AdamW's mean of squared gradients
    eps: float = 1e-8  # AdamW's: added to the root of that mean
    clip: float = 1.0  # largest gradient norm; 0 for no clipping
    train_lengths: tuple[int, int] | None = None  # shortest and longest; the task's own when None
    train_samples: int = 0  # size of a fixed training set, the same for every seed; 0 draws fresh sequences
    precision: Literal["float32", "bfloat16"] = "float32"  # of the layers; recurrences keep float32
    log_every: int = 50  # steps between two rows of metrics.jsonl
    # what keeps a tracker right at lengths beyond those it was trained on: docs/length.md
    centred_gradient: bool = added(False)  # gradients of the logits that sum to zero in spite of rounding
    z_loss: float = added(0.0)  # times the squared log of the softmax's denominator, added to the loss
    label_smoothing: float = added(0.0)  # e: the probability asked for is 1 - e + e / classes, not 1
    # times the mean of 1 - e^2 over the eigenvalues e = 1 - beta and gates of delta rules, added to the loss
    isometry: float = added(0.0)
    # times the mean squared distance of right answers' logits from the mean of their class, added to the loss
    # behind the short steps
    consistency: float = added(0.0)
    # where training sequences start: an empty state, noise, or the state in which the last batch ended
    # ("carried-right": where every answer in it was right); with short_steps, only short ones are carried on
    initial_states: Literal["empty", "noise", "carried", "carried-right"] = added("empty")
    state_noise: float = added(0.1)  # standard deviation of "noise"
    carried_batches: int = added(8)  # mean number of batches that a sequence with a "carried" state goes on
    # a curriculum: so many first steps have sequences of `short_length` and a schedule of their own; behind
    # them AdamW begins anew
    short_steps: int = added(0)
    short_length: int = added(2)  # length of the sequences of the first `short_steps` steps
    short_batch: int = added(0)  # number of these sequences in a step; `batch` when 0
    # the weights kept: the last ones, or those with the largest predicted horizon so far
    select: Literal["last", "horizon"] = added("last")
    select_every: int = added(1000)  # steps between two looks at the horizon

    def batch_at(self, step: int) -> int:
        """The number of sequences of a step."""
        return self.short_batch or self.batch if step < self.short_steps else self.batch


@dataclass(frozen=True)
class EvaluationConfig:
    """Accuracy at many lengths, on sequences fixed by `eval_seed`: the same for every training seed.

    "dense" tasks report accuracy at each of `eval_lengths`; for "last" tasks they are the edges of bins. A
    corpus reports perplexity between these positions, in `eval_samples` windows of every held-out split.
    """

    eval_lengths: tuple[int, ...] | None = None  # the task's own when None
    eval_samples: int = 1024  # sequences of each length
    eval_batch: int = 128  # sequences at a time
    eval_every: int = 0  # steps; 0 for the last step only
    eval_seed: int = 20_241_101  # of the sequences


@dataclass(frozen=True)
class RunSpec:
    """One run: task, model, training, evaluation and seed.

        spec = RunSpec(task("parity"), model_config("mamba", layers=2), TrainingConfig(steps=500), seed=1)
        RunSpec.from_dict(spec.to_dict()) == spec.resolved()

    Equal specs are the same run and share an `id`.
    """

    # what is learned, such as task("parity")
    task: Task = field(default_factory=lambda: task("parity-dense"))
    model: ModelConfig = field(default_factory=lambda: PRESETS["deltanet"])  # the backbone and its mixers
    training: TrainingConfig = TrainingConfig()  # steps, batch, rate, ...
    evaluation: EvaluationConfig = EvaluationConfig()  # lengths and numbers of test sequences
    seed: int = 0  # of initial weights and training data
    initial: str = added("")  # SHA-256 of a safetensors file of weights to start from; random ones when empty
    initial_path: str = field(default="", compare=False, kw_only=True)  # where that file is

    def resolved(self) -> "RunSpec":
        """The spec with the task's defaults written out, checked."""
        check_types(self, "spec")
        training, evaluation = self.training, self.evaluation
        if training.train_lengths is None:
            training = replace(training, train_lengths=self.task.train_lengths)
        lengths = self.task.eval_lengths if evaluation.eval_lengths is None else evaluation.eval_lengths
        spec = replace(self, training=training, evaluation=replace(evaluation, eval_lengths=tuple(lengths)))
        _check(spec)
        return spec

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits that name the run and its results folder."""
        return run_id(self.resolved())

    def to_dict(self) -> dict:
        """Plain data for JSON, with the task's defaults written out; `from_dict` reads it."""
        return to_dict(self.resolved())

    @classmethod
    def from_dict(cls, data: dict) -> "RunSpec":
        """The spec in plain data, every field checked."""
        spec = from_dict(data)
        if not isinstance(spec, cls):
            raise UserError(f"spec is a {type(spec).__name__}, expected a RunSpec.")
        return spec.resolved()

    @classmethod
    def load(cls, path: str | Path) -> "RunSpec":
        """Read a spec from a JSON file."""
        try:
            data = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise UserError(f"{path} does not exist, expected a JSON file with a run spec.") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UserError(f"{path} is not a readable JSON file: {error}") from None
        return cls.from_dict(data)


for _cls in (RunSpec, TrainingConfig, EvaluationConfig):
    register_kind(_cls)  # as tasks and models are where they have their names


def check_seed(name: str, seed: int) -> None:
    """Refuse seeds that a generator does not take."""
    if not 0 <= seed < 2**63:
        raise UserError(f"{name} is {seed}, expected a whole number from 0 to 2^63 - 1.")


def _check(spec: RunSpec) -> None:
    t, e = spec.training, spec.evaluation
    at_least = {
        "steps": 1,
        "batch": 1,
        "log_every": 1,
        "lr": 0,
        "weight_decay": 0,
        "clip": 0,
        "final_lr": 0,
        "eps": 0,
        "z_loss": 0,
        "isometry": 0,
        "consistency": 0,
        "state_noise": 0,
        "short_steps": 0,
        "short_batch": 0,
        "carried_batches": 1,
        "select_every": 1,
    }
    for name, low in at_least.items():
        value = getattr(t, name)
        if not (value >= low and math.isfinite(value)):
            raise UserError(
                f"training: {name} is {value}, expected at least {low}"
                f"{'' if math.isfinite(value) else ', and a finite number'}."
            )
    if not 0 <= t.warmup <= 1:
        raise UserError(f"training: warmup is {t.warmup}, expected a number from 0 to 1.")
    if t.train_samples and spec.task.labels == "given":
        raise UserError(
            f"training: train_samples is {t.train_samples}, but the task brings its own training set. Leave "
            "it at 0."
        )
    if t.train_samples and t.train_samples < t.batch:
        raise UserError(
            f"training: train_samples is {t.train_samples}, expected 0 or at least batch = {t.batch}."
        )
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(t, name) < 1:
            raise UserError(f"training: {name} is {getattr(t, name)}, expected at least 0 and below 1.")
    for name, seed in (("seed", spec.seed), ("eval_seed", e.eval_seed)):
        check_seed(name, seed)
    shortest = spec.task.shortest
    low, high = t.train_lengths if t.train_lengths and len(t.train_lengths) == 2 else (0, 0)
    if not shortest <= low <= high:
        raise UserError(
            f"training: train_lengths is {' '.join(map(str, t.train_lengths or ())) or 'empty'}, expected "
            f"shortest and longest, from {shortest} up."
        )
    for name, least in (("eval_samples", 1), ("eval_batch", 1), ("eval_every", 0)):
        if getattr(e, name) < least:
            raise UserError(f"evaluation: {name} is {getattr(e, name)}, expected at least {least}.")
    _check_length_options(spec)
    lengths = e.eval_lengths or ()
    needed = 1 if spec.task.labels in ("dense", "next") else 2
    if len(lengths) < needed or min(lengths) < shortest or list(lengths) != sorted(set(lengths)):
        raise UserError(
            f"evaluation: eval_lengths is {' '.join(map(str, lengths)) or 'empty'}, expected at least "
            f"{needed} rising lengths from {shortest} up{', the edges of the bins' if needed == 2 else ''}."
        )
    if spec.initial_path and not spec.initial:
        raise UserError(
            f"initial_path is {spec.initial_path!r} without initial, the SHA-256 of that file. Give both, as "
            "`statetrack train --initial RUN --print-spec` does."
        )
    _check_model(*_sizes(spec))


def _sizes(spec: RunSpec) -> tuple[ModelConfig, int, int]:
    return spec.model, spec.task.vocab_size, spec.task.n_classes


def _check_length_options(spec: RunSpec) -> None:
    """Options that not every task can have."""
    t, kind = spec.training, type(spec.task).__name__
    given = {"initial_states": ("empty", "noise", "carried", "carried-right"), "select": ("last", "horizon")}
    for name, known in given.items():
        if getattr(t, name) not in known:
            raise unknown_name(f"training: {name}", getattr(t, name), known)
    of_classes = ("centred_gradient", "z_loss", "label_smoothing", "isometry", "consistency")
    if spec.task.labels == "next" and any(getattr(t, name) for name in of_classes):
        raise UserError(
            f"training: {', '.join(of_classes[:-1])} and {of_classes[-1]} are for tasks with classes, not "
            f"for {kind}. Leave them out."
        )
    if t.isometry and not _reports_norm_loss(*_sizes(spec)):
        raise UserError(
            f"training: isometry is {t.isometry}, which needs a layer of the delta rule: DeltaNet, "
            "DeltaProduct, Gated DeltaNet or KDA. Choose one of them, or leave isometry out."
        )
    if not 0 <= t.label_smoothing < 1:
        raise UserError(f"training: label_smoothing is {t.label_smoothing}, expected at least 0 and below 1.")
    if t.initial_states == "noise" and spec.task.labels != "dense":
        raise UserError(
            f'training: initial_states is "noise", which needs a task with a label at every position, not '
            f"{kind}."
        )
    if t.initial_states != "empty" and (mixer := _mixer_without_states(*_sizes(spec))):
        raise UserError(
            f'training: initial_states is "{t.initial_states}", which needs a mixer with a state of '
            f'known form. {mixer} does not offer that. Use a DeltaNet, or initial_states "empty".'
        )
    if t.select == "horizon" and not isinstance(spec.task, WordProblem):
        raise UserError(f'training: select is "horizon", which is for group word problems, not for {kind}.')
    low, high = t.train_lengths or (1, 1)
    if t.short_steps and not (
        spec.task.labels == "dense" and spec.task.shortest <= t.short_length < low and not t.train_samples
    ):
        raise UserError(
            f"training: short_steps is {t.short_steps} with short_length {t.short_length}, expected a task "
            "with a label at every position, fresh sequences (train_samples 0) and a short_length from "
            f"{spec.task.shortest} up, below {low}, the shortest of train_lengths; else short_steps 0."
        )
    plain = isinstance(spec.task, WordProblem) and spec.task.tokens_per_element == 1
    if t.initial_states.startswith("carried") and not (plain and low == high and not t.train_samples):
        raise UserError(
            f'training: initial_states is "{t.initial_states}", expected a group word problem with one token '
            'per element, one training length and fresh sequences (train_samples 0); else use "empty".'
        )


@lru_cache(maxsize=4096)  # the runs of a sweep share a few models
def _check_model(config: ModelConfig, vocab_size: int, n_classes: int) -> None:
    """Widths that do not fit are the layers' to refuse; on the meta device that costs no memory."""
    _on_meta(config, vocab_size, n_classes)


@lru_cache(maxsize=4096)
def _reports_norm_loss(config: ModelConfig, vocab_size: int, n_classes: int) -> bool:
    """Whether a mixer of the model reports what `training.isometry` is computed from."""
    blocks: Any = _on_meta(config, vocab_size, n_classes).blocks
    return any(getattr(block.mixer, "reports_norm_loss", False) for block in blocks)


@lru_cache(maxsize=4096)
def _mixer_without_states(config: ModelConfig, vocab_size: int, n_classes: int) -> str | None:
    """The name of the first mixer whose states training cannot set."""
    for block in _on_meta(config, vocab_size, n_classes).blocks:
        mixer: Any = block.mixer
        if getattr(mixer, "empty_state", lambda batch: None)(1) is None:
            return type(mixer).__name__
    return None


def _on_meta(config: ModelConfig, vocab_size: int, n_classes: int) -> Model:
    try:
        with torch.device("meta"):
            return Model(config, vocab_size, n_classes)
    except (OverflowError, RuntimeError) as error:
        if "overflow" not in str(error).lower():
            raise
        raise UserError("model: its sizes are too large for any machine. Choose smaller ones.") from error
