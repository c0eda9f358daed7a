"""What `statetrack train --help` says; it imports nothing heavy, so that it is shown at once."""

TASK_LINES = {
    "parity": "is the number of ones odd? One answer, after the last bit",
    "parity-dense": "the same, with an answer after every bit",
    "mod-arithmetic": "the value modulo 5 of an expression without brackets, such as 2 - 3 * 4",
    "mod-arithmetic-brackets": "the same with brackets",
    "mod-arithmetic-brackets-no-mult": "the same with brackets and without multiplication",
    "word-problem": "the product of the elements of a group so far (--group A5; S5 by default)",
    "s5": "which permutation of 5 points is the product so far? 120 letters, 121 classes",
    "s5-swaps": "the same, letters restricted to the identity and swaps of two points",
    "s5-up-to-3": "the same, letters restricted to those that move at most 3 points",
    "s5-4-tokens": "as s5, with four tokens per letter",
    "z60": "the sum modulo 60 so far",
    "z60-2-tokens": "as z60, with two tokens per letter",
    "regex:PATTERN": "the state of a regular expression's automaton (with --alphabet ab)",
    "dfa:FILE.json": "the state of an automaton in a file",
    "group:NAME": "where is one point, as generators of the group move it? group:S5 has 2 letters and 5 "
    "classes, the points: it is not s5, whose 120 permutations are the classes",
    "jsonl:FILE": "sequences with labels of your own",
    "corpus:DIR": "text, as `statetrack lm tokenize` stores it",
}
MIXER_LINES = {
    "deltanet": "DeltaNet",
    "deltanet-no-conv": "DeltaNet without short convolutions, as in the paper's word problems",
    "gated-deltanet": "Gated DeltaNet",
    "gated-deltanet-signed": "Gated DeltaNet whose gate may be negative",
    "deltanet-rotating": "DeltaNet with rotations of pairs of channels beside its reflections",
    "deltaproduct": "DeltaProduct with two Householder factors per token",
    "kda": "Kimi Delta Attention: Gated DeltaNet with a gate per channel",
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "mamba3": "Mamba-3 (single input), whose states turn",
    "gla": "gated linear attention",
    "hgrn2": "HGRN2",
    "transformer": "causal attention",
    "mlstm": "mLSTM of xLSTM",
    "slstm": "sLSTM of xLSTM, a non-linear RNN",
    "dense-transition": "a full transition matrix per token",
    "diagonal-toy": "a diagonal recurrence of width 10",
}
COMMON_LINES = {
    '--eigenvalues "[-1,1]"': 'their range: "[0,1]", "[-1,1]", or "unit-circle" with rotations',
    "--steps N --batch N --lr X": "training",
    "--recipe long": "defaults for trackers that are to stay right at long lengths",
    "--initial RUN": "start from the final weights of another run: its folder, or a safetensors file",
    "--train-lengths A B": "shortest and longest training sequence",
    "--eval-lengths A B ...": "lengths to measure accuracy at",
    "--d-model N --layers N --heads N": "the size of the model",
    "--attention-every N": "every N-th layer is attention",
    "--seed N": "another seed is another run",
    "--out DIR": "the results folder (default: results/<run_id>)",
    "--device NAME": "auto, cpu or cuda",
    "--log tensorboard": "write metrics to TensorBoard, or to Weights & Biases (wandb)",
    "--print-spec": "print the run as JSON and stop",
    "--plugin FILE.py": "tasks and mixers of your own",
}


def overview() -> str:
    """Tasks, mixers and the flags most used."""
    return "\n".join(
        [
            "usage: statetrack train [--task TASK] [--mixer MIXER] [options]",
            "",
            "Train one model on one task, and measure its accuracy at longer lengths.",
            "",
            "tasks (default: parity-dense):",
            *_table(TASK_LINES),
            "",
            "mixers (default: deltanet):",
            *_table(MIXER_LINES),
            "  Language models by size, such as deltanet-60m: see statetrack lm pretrain --help",
            "",
            "options:",
            *_table(COMMON_LINES),
            "",
            "Every field of the task, the mixer, the model, the training and the evaluation is a flag:",
            "  statetrack train --task TASK --mixer MIXER --help    lists those of a task and a mixer",
        ]
    )


def _table(lines: dict[str, str]) -> list[str]:
    import textwrap

    rows = []
    for name, text in lines.items():
        first, *rest = textwrap.wrap(text, 72)
        rows += [f"  {name:<33} {first}", *(" " * 36 + line for line in rest)]
    return rows
