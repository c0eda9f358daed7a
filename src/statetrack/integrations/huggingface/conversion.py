"""Checkpoints of other families as models of this library, and back: `statetrack convert FROM TO`.

Names and shapes of the weights are mapped one to one, so the logits stay the same. What one side cannot
express is refused. Files are read as data: JSON and safetensors, no pickle, no code, no network.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from statetrack.errors import UserError, unknown_name
from statetrack.files import new_folder, save_tensors, write_json, write_text
from statetrack.integrations.huggingface.families import FAMILIES
from statetrack.integrations.huggingface.families.family import Family, Weights, to_ours, to_theirs
from statetrack.integrations.huggingface.families.settings import check_settings
from statetrack.integrations.huggingface.modeling import StateTrackForCausalLM
from statetrack.integrations.huggingface.tokenizer import fast_tokenizer
from statetrack.layers import Model
from statetrack.lm.models import EXPORTED, model_with_weights, open_model, read_json, weights_of_folder
from statetrack.lm.tokenizers import FILE
from statetrack.training.initial import WEIGHTS

__all__ = ["TARGETS", "Checkpoint", "convert", "read_checkpoint", "write_checkpoint"]

TARGETS = (EXPORTED, *FAMILIES)
HEADS = ("lm_head.weight",)  # stored beside a tied table by some programs
# of a folder, copied as they are
TOKENIZER_FILES = (
    FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)


@dataclass(frozen=True)
class Checkpoint:
    """A language model with the settings that its layers do not depend on."""

    model: Model
    family: str  # "statetrack", or the family it was read from
    tokens: dict[str, Any]  # bos_token_id, eos_token_id, pad_token_id
    context: int
    tokenizer: Any = None  # one of ours, of a run
    tokenizer_folder: Path | None = None  # or the files of a folder


def convert(source: str | Path, target: str | Path, to: str = EXPORTED) -> Checkpoint:
    """Write the checkpoint in the folder `source` as one of `TARGETS` to the new folder `target`."""
    if to not in TARGETS:
        raise unknown_name("convert: to", to, TARGETS)
    checkpoint = read_checkpoint(source)
    write_checkpoint(checkpoint, target, to)
    return checkpoint


def read_checkpoint(path: str | Path) -> Checkpoint:
    """The model in a folder: of a run, of `statetrack lm export`, or a checkpoint of a known family."""
    folder = Path(path)
    if not (folder / "spec.json").exists() and (folder / "config.json").exists():
        settings = read_json(folder / "config.json")
        if settings.get("model_type") != EXPORTED:
            return _read_family(folder, settings)
        opened = open_model(folder)
        return Checkpoint(opened.model, EXPORTED, _tokens(settings), opened.context, tokenizer_folder=folder)
    opened = open_model(folder)
    tokenizer = opened.tokenizer
    end: dict[str, Any] = dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.end_of_document
    )
    return Checkpoint(opened.model, EXPORTED, end, opened.context, tokenizer=tokenizer)


def _read_family(folder: Path, given: dict[str, Any]) -> Checkpoint:
    family = next((f for f in FAMILIES.values() if f.model_type == given.get("model_type")), None)
    if family is None:
        known = ", ".join(f.model_type for f in FAMILIES.values())
        raise UserError(
            f"{folder / 'config.json'}: model_type is {given.get('model_type')!r}, expected one of {known}, "
            f"or {EXPORTED}."
        )
    settings = _settings(folder, family, given)
    check_settings(str(folder / "config.json"), settings)
    config = family.read(settings)
    weights = family.named(config, _their_weights(folder, tied=config.tied))
    config, weights = family.after_reading(config, to_ours(str(folder), family.names(config), weights))
    model = model_with_weights(folder, config, settings["vocab_size"], weights)
    context = settings.get("max_position_embeddings") or 2048
    return Checkpoint(model, family.name, _tokens(settings), context, tokenizer_folder=folder)


def _settings(folder: Path, family: Family, given: dict[str, Any]) -> dict[str, Any]:
    """config.json with the family's defaults for what it leaves out."""
    if family.defaults is not None:
        return {**family.defaults, **given}
    given = {name: value for name, value in given.items() if name not in ("model_type", "auto_map")}
    try:
        return AutoConfig.for_model(family.model_type, **given).to_dict()
    except Exception as error:  # transformers has many kinds
        reason = (str(error).strip().splitlines() or [repr(error)])[-1].strip()
        raise UserError(f"{folder / 'config.json'} is not one of {family.name}: {reason}") from None


def _their_weights(folder: Path, *, tied: bool) -> Weights:
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if not list(folder.glob("*.safetensors")) and pickles:
        raise UserError(
            f"{folder} holds {pickles[0]}, a pickle, which can run code when it is read, expected {WEIGHTS}. "
            "Load the model with transformers where you trust it, and save_pretrained() it."
        )
    weights = weights_of_folder(folder)
    if tied:
        weights = {name: x for name, x in weights.items() if name not in HEADS}
    return weights


def _tokens(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: settings.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def write_checkpoint(checkpoint: Checkpoint, path: str | Path, to: str) -> None:
    """Write config.json, model.safetensors and the tokenizer to a new folder, which appears when complete."""
    files = None if to == EXPORTED else _their_files(checkpoint, FAMILIES[to])
    with new_folder(path) as folder:
        if files is None:
            options = checkpoint.tokens | {"context": checkpoint.context}
            StateTrackForCausalLM.from_model(checkpoint.model, **options).save_pretrained(folder)
        else:
            settings, weights = files
            write_json(folder / "config.json", settings)
            save_tensors(folder / WEIGHTS, weights, {"format": "pt"})
        _write_tokenizer(checkpoint, folder)


def _their_files(checkpoint: Checkpoint, family: Family) -> tuple[dict[str, Any], Weights]:
    """config.json and the weights of a model as one of the family."""
    model = checkpoint.model
    config, weights = family.before_writing(model.config, model.state_dict())
    settings = family.write(config) | checkpoint.tokens
    settings |= {
        "vocab_size": model.embedding.num_embeddings,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": checkpoint.context,
        "architectures": [family.architecture],
        "dtype": str(model.embedding.weight.dtype).removeprefix("torch."),
    }
    if family.defaults is None:
        settings = AutoConfig.for_model(family.model_type, **settings).to_diff_dict()
    return settings | {"model_type": family.model_type}, to_theirs(family.names(config), weights)


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    if checkpoint.tokenizer is not None:
        fast_tokenizer(checkpoint.tokenizer).save_pretrained(folder)
        write_text(folder / FILE, checkpoint.tokenizer.to_json())
    if checkpoint.tokenizer_folder is not None:
        for name in TOKENIZER_FILES:
            if (checkpoint.tokenizer_folder / name).is_file():
                shutil.copyfile(checkpoint.tokenizer_folder / name, folder / name)
