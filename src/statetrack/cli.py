"""The command line: `statetrack COMMAND ...`. The module of a command is imported when it is called."""

import importlib
import sys

from statetrack.errors import unknown_name
from statetrack.exit_codes import exit_codes
from statetrack.threads import sleep_when_idle

COMMANDS = {
    "demo": (
        "statetrack.commands.demo",
        "train small models in both eigenvalue ranges and show the difference",
    ),
    "train": ("statetrack.commands.train", "train one model on one task"),
    "explain": ("statetrack.commands.explain", "which model classes can track a regular language, and why"),
    "compile": ("statetrack.commands.compile", "an automaton as the exact weights of a linear RNN"),
    "factor": ("statetrack.commands.factor", "a matrix as generalised Householder factors"),
    "reproduce": ("statetrack.commands.reproduce", "a table or figure of the paper, ours next to theirs"),
    "report": ("statetrack.commands.report", "rebuild and merge reports from result files"),
    "plot-spectrum": (
        "statetrack.commands.plot_spectrum",
        "eigenvalues of the transitions a run has learned",
    ),
    "diagnose": ("statetrack.commands.diagnose", "predict the length at which a trained tracker breaks"),
    "snap": ("statetrack.commands.snap", "round a trained tracker to exact permutations or rotations"),
    "lm": ("statetrack.commands.lm", "language models: tokenize, pretrain, evaluate, generate"),
    "convert": ("statetrack.commands.convert", "Hugging Face checkpoints in, and out again"),
    "bench": ("statetrack.commands.bench", "time the recurrences against other libraries"),
}


def main(arguments: list[str] | None = None) -> None:
    """Run one command; a user's mistake ends with one line on stderr and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with exit_codes():
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(_help())
            return
        if arguments[0] in ("-V", "--version"):
            from statetrack import __version__

            print(f"statetrack {__version__}")
            return
        if arguments[0] not in COMMANDS:
            raise unknown_name("command", arguments[0], COMMANDS)
        if arguments[0] != "bench":  # benchmarks measure the default settings
            sleep_when_idle()
        importlib.import_module(COMMANDS[arguments[0]][0]).main(arguments[1:])


def _help() -> str:
    lines = ["usage: statetrack COMMAND [options]", "", "Linear recurrent networks that can track state.", ""]
    lines += [f"  {name:<14} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([*lines, "", "statetrack COMMAND --help lists the options of a command."])


if __name__ == "__main__":
    main()
