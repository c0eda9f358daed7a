"""statetrack lm SUBCOMMAND: language models, from text to evaluation."""

import importlib
from collections.abc import Sequence

from statetrack.errors import unknown_name

SUBCOMMANDS = {
    "tokenize": ("statetrack.commands.lm.tokenize", "text, JSONL, parquet or source code to token shards"),
    "pretrain": ("statetrack.commands.lm.pretrain", "train a language model, on one process or many"),
    "demo": ("statetrack.commands.lm.demo", "a small DeltaNet in both ranges, in a few minutes on a CPU"),
    "perplexity": (
        "statetrack.commands.lm.perplexity",
        "perplexity by position, far past the training length",
    ),
    "eval": ("statetrack.commands.lm.eval", "lm-evaluation-harness, with the paper's tasks as one group"),
    "generate": ("statetrack.commands.lm.generate", "continue a prompt"),
    "export": ("statetrack.commands.lm.export", "a run as a Hugging Face folder"),
}


def main(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return
    if arguments[0] not in SUBCOMMANDS:
        raise unknown_name("lm: command", arguments[0], SUBCOMMANDS)
    importlib.import_module(SUBCOMMANDS[arguments[0]][0]).main(arguments[1:])


def _help() -> str:
    lines = [
        "usage: statetrack lm COMMAND [options]",
        "",
        "Language models over the mixers of this library.",
        "",
    ]
    lines += [f"  {name:<14} {text}" for name, (_, text) in SUBCOMMANDS.items()]
    return "\n".join([*lines, "", "statetrack lm COMMAND --help lists the options of a command."])
