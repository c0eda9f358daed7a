"""Opening a trained language model: a run's folder, finished or not, or an exported Hugging Face folder.

    opened = open_model("results/3f9c0d5a7b21")
    logits, state = opened.model(torch.tensor([opened.tokenizer.encode("Once upon a time")]))

Needs neither transformers nor a network, and runs no code from the folder.
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from statetrack.config import from_dict
from statetrack.errors import UserError
from statetrack.field_comments import explain_fields
from statetrack.files import DamagedFile, load_tensors
from statetrack.layers import Model, ModelConfig
from statetrack.layers.ranges import extended_range
from statetrack.lm.tokenizers import FILE, Tokenizer, load_tokenizer
from statetrack.ops.checks import check_eigenvalues
from statetrack.spec import RunSpec
from statetrack.tasks import Corpus
from statetrack.training.initial import WEIGHTS
from statetrack.training.store import checkpoints, read_weights

__all__ = ["OpenedModel", "open_model"]

EXPORTED = "statetrack"  # `model_type` in the config.json of an exported folder
PREFIX = "model."  # of the weights' names in checkpoints and exported folders


@explain_fields
@dataclass(frozen=True)
class OpenedModel:
    """A language model in evaluation mode, on the CPU, with what belongs to it."""

    model: Model  # tokens (B, T) to logits (B, T, vocab_size), and the state to go on from
    context: int  # tokens of a training sequence
    vocab_size: int  # of the model: at least that of the tokenizer
    name: str  # of the folder
    read_tokenizer: Callable[[], Tokenizer]  # what `tokenizer` calls

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Text to tokens and back. A folder without one is an error here, not where the model is opened."""
        tokenizer = self.read_tokenizer()
        if tokenizer.vocab_size > self.vocab_size:
            raise UserError(
                f"{self.name}: its tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, expected at "
                f"most {self.vocab_size}, the vocabulary of the model. It is the tokenizer of another model."
            )
        return tokenizer


def open_model(
    path: str | Path, eigenvalues: str | None = None, *, tokenizer: str | Path | None = None
) -> OpenedModel:
    """The language model in the folder `path`; of an unfinished run that of its newest checkpoint.

        opened = open_model("results/3f9c0d5a7b21")             a run, or a folder of `statetrack lm export`
        tokens = torch.tensor([opened.tokenizer.encode("Once upon")])
        logits, state = opened.model(tokens)                    tokens (1, T), logits (1, T, vocabulary)

    `eigenvalues="[-1,1]"` opens a model in [0,1] in the wider range, with the same weights, to go on
    training: every eigenvalue a becomes 2 a - 1, so it is another function (see `statetrack.layers.ranges`).
    `tokenizer` is a file or folder to take the tokenizer from instead.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder, expected that of a run, results/<id>, or of an exported model."
        )
    if (folder / "spec.json").exists():
        opened = _open_run(folder, tokenizer)
    elif (folder / "config.json").exists():
        opened = _open_exported(folder, tokenizer)
    else:
        raise UserError(
            f"{folder} holds neither spec.json nor config.json, expected the folder of a run, results/<id>, "
            "or one that `statetrack lm export` has written."
        )
    return opened if eigenvalues is None else replace(opened, model=_in_range(opened.model, eigenvalues))


def _in_range(model: Model, eigenvalues: str) -> Model:
    """The model, or a copy of its weights in [-1,1]: see `statetrack.layers.ranges`."""
    check_eigenvalues("open_model", eigenvalues)
    mixers = [model.config.mixer_of(layer) for layer in range(model.config.layers)]
    ranges = {x for mixer in mixers if (x := getattr(mixer, "eigenvalues", None)) is not None}
    if ranges == {eigenvalues}:
        return model
    if eigenvalues == "[0,1]":
        raise UserError(
            "open_model: the model has eigenvalues in [-1,1], and [0,1] was asked for. Only [0,1] can be "
            "opened as [-1,1], to go on training; the reverse loses the negative half."
        )
    return extended_range(model).eval()


def _open_run(folder: Path, tokenizer: str | Path | None) -> OpenedModel:
    spec = RunSpec.load(folder / "spec.json")
    task = spec.task
    if task.labels != "next":
        raise UserError(
            f"{folder} is a run of {type(task).__name__}, expected one that predicts the next token. Open it "
            "with statetrack.run.load_run."
        )
    model = model_with_weights(folder, spec.model, task.vocab_size, _weights_of_run(folder))

    def read_tokenizer() -> Tokenizer:
        data = task.path if isinstance(task, Corpus) else ""
        for place in (tokenizer, folder, data):
            if place is not None and (Path(place).is_file() or (Path(place) / FILE).exists()):
                return load_tokenizer(place)
        raise UserError(
            f"{folder} holds no {FILE}, and neither does {tokenizer or data or 'any folder it names'}. Give "
            f"the {FILE} of its training data: --tokenizer FILE."
        )

    return OpenedModel(model, spec.training.train_lengths[1], task.vocab_size, folder.name, read_tokenizer)  # type: ignore[index]


def _weights_of_run(folder: Path) -> dict[str, Tensor]:
    if (folder / WEIGHTS).exists():
        return _read(folder / WEIGHTS)
    for checkpoint in checkpoints(
        folder
    ):  # the newest first; one that is damaged gives way to the one before
        with contextlib.suppress(DamagedFile):
            return read_weights(checkpoint)
    raise UserError(
        f"{folder} holds neither {WEIGHTS} nor a checkpoint that can be read: the run has not come far "
        "enough."
    )


def _open_exported(folder: Path, tokenizer: str | Path | None) -> OpenedModel:
    config = read_json(folder / "config.json")
    if config.get("model_type") != EXPORTED:
        raise UserError(
            f"{folder / 'config.json'} is of a model of type {config.get('model_type')!r}, expected "
            f"{EXPORTED!r}, as `statetrack lm export` writes it. Others: `statetrack convert FROM TO`."
        )
    backbone = from_dict(config.get("backbone"), f"{folder / 'config.json'}: backbone")
    sizes = {name: config.get(name) for name in ("vocab_size", "context")}
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise UserError(
                f"{folder / 'config.json'}: {name} is {value!r}, expected a whole number from 1 up."
            )
    if not isinstance(backbone, ModelConfig):
        raise UserError(
            f"{folder / 'config.json'}: backbone is a {type(backbone).__name__}, not a ModelConfig."
        )
    weights = _without_prefix(weights_of_folder(folder))
    model = model_with_weights(folder, backbone, sizes["vocab_size"], weights)  # type: ignore[arg-type]
    # a dtype of its own, such as bfloat16, is kept
    return OpenedModel(
        model,
        sizes["context"],  # type: ignore[arg-type]
        sizes["vocab_size"],  # type: ignore[arg-type]
        folder.name,
        lambda: load_tokenizer(folder if tokenizer is None else tokenizer),
    )


def weights_of_folder(folder: Path) -> dict[str, Tensor]:
    """All weights of a Hugging Face folder, from one file or several."""
    weights: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        weights |= _read(file)
    return weights


def _weight_files(folder: Path) -> list[Path]:
    """One file, or those that model.safetensors.index.json names, as transformers writes large models."""
    index = folder / f"{WEIGHTS}.index.json"
    if (folder / WEIGHTS).exists() or not index.exists():
        return [folder / WEIGHTS]
    names = {*read_json(index).get("weight_map", {}).values()}
    for name in names:
        if Path(str(name)).name != name:
            raise UserError(f"{index} names the file {name!r}, expected a name without folders.")
    return [folder / name for name in sorted(names)]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not a readable JSON file: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a {type(data).__name__}, expected an object.")
    return data


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_tensors(path)[0]
    except (DamagedFile, OSError) as error:
        raise UserError(f"{path}: the weights cannot be read: {error}") from None


def _without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(PREFIX): x for name, x in tensors.items() if name.startswith(PREFIX)}


def model_with_weights(
    folder: Path, config: ModelConfig, vocab_size: int, weights: dict[str, Tensor]
) -> Model:
    """The model with these weights themselves, in their dtype: there is no second copy in memory."""
    with torch.device("meta"):
        model = Model(config, vocab_size, vocab_size)
    marks = {name: vars(p) for name, p in model.named_parameters()}  # such as "no weight decay"
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        reason = (str(error).splitlines()[1:2] or [str(error)])[0].strip()
        raise UserError(
            f"{folder}: the weights do not fit its configuration: {reason} It may hold files of two models."
        ) from None
    if config.tied:
        model.head.weight = model.embedding.weight
    for name, parameter in model.named_parameters():
        vars(parameter).update(marks[name])
    return model.eval()
