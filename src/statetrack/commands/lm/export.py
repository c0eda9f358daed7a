"""statetrack lm export: a run as a Hugging Face folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from statetrack.commands.flags import parse
from statetrack.errors import require
from statetrack.lm.models import open_model


@dataclass(frozen=True)
class ExportOptions:
    """Write a run as a Hugging Face folder: `statetrack lm export RUN DIR`.

    In Python, `import statetrack.integrations.huggingface` makes AutoModelForCausalLM read it; other programs
    need trust_remote_code=True, which loads two lines that import this library.
    """

    run: Path  # results/<id>, finished or not
    dir: Path  # new or empty
    tokenizer: Path | None = None  # tokenizer.json, where the run has none


def main(arguments: Sequence[str]) -> None:
    options = parse(ExportOptions, arguments, "statetrack lm export", positional=True)
    require("transformers", extra="hf", for_="the Hugging Face format")
    opened = open_model(options.run, tokenizer=options.tokenizer)
    from statetrack.integrations.huggingface.export import export

    folder = export(opened, options.dir)
    parameters = sum(p.numel() for p in opened.model.parameters())
    print(f"{folder}: {parameters:,} parameters, {', '.join(sorted(p.name for p in folder.iterdir()))}")
