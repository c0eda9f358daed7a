"""statetrack convert: models of transformers and flash-linear-attention in, and out again."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from statetrack.commands.flags import parse
from statetrack.errors import require


@dataclass(frozen=True)
class ConvertOptions:
    """Write a checkpoint as one of another family, with equal logits: `statetrack convert FROM TO`.

    Known are Mamba and OLMo Hybrid of transformers, DeltaNet and Gated DeltaNet of flash-linear-attention,
    and the models of this library. What a family cannot express is refused. Reads and writes safetensors
    only.
    """

    source: Path  # a Hugging Face checkpoint, a run (results/<id>), or an exported model
    target: Path  # a new or empty folder
    # family of the result: transformers' Mamba or OLMo Hybrid, a model of fla, or of this library
    to: Literal["statetrack", "mamba", "olmo_hybrid", "fla-deltanet", "fla-gated-deltanet"] = "statetrack"


def main(arguments: Sequence[str]) -> None:
    options = parse(ConvertOptions, arguments, "statetrack convert", positional=True)
    require("transformers", extra="hf", for_="the Hugging Face format")
    from statetrack.integrations.huggingface.conversion import convert

    checkpoint = convert(options.source, options.target, options.to)
    parameters = sum(p.numel() for p in checkpoint.model.parameters())
    files = ", ".join(sorted(path.name for path in options.target.iterdir()))
    print(f"{options.target}: {checkpoint.family} as {options.to}, {parameters:,} parameters; {files}")
