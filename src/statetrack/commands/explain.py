"""statetrack explain: which model classes can track a language, by theorem and by training."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from statetrack.automata import Explanation, explain
from statetrack.commands.automaton import AutomatonOptions, read_automaton
from statetrack.commands.flags import parse
from statetrack.commands.progress import Report, progress_bars
from statetrack.errors import UserError
from statetrack.experiments.verdicts import MULTIPLES, Measured, VerdictRun, runs
from statetrack.report.page import template
from statetrack.run import run
from statetrack.training import Options


@dataclass(frozen=True)
class ExplainOptions:
    """Which classes of linear RNNs can track a regular language at every length, and why."""

    automaton: AutomatonOptions = field(default_factory=AutomatonOptions)  # which language
    json: bool = False  # print JSON instead of text
    html: Path | None = None  # write a page that draws the automaton and runs a compiled network
    train: bool = False  # train a small model of every class with a yes or no, and compare
    steps: int = 300  # of each training run
    train_length: int = 16  # letters in training; measured on up to eight times as many
    out: Path = Path("results/explain")  # where training runs are kept
    device: str = "auto"  # auto, cpu or cuda


def main(arguments: Sequence[str]) -> None:
    options = parse(ExplainOptions, arguments, "statetrack explain")
    name, dfa = read_automaton(options.automaton)
    if options.html is not None and options.html.is_dir():
        raise UserError(f"--html is {options.html}, a folder; expected the name of a file.")
    if options.html is not None:
        template("automaton.html")  # report a missing extra before the training, not after it
    found = explain(dfa)
    if not options.json:
        print(f"{name}\n\n{found.text()}")
    measured = _train(options, found) if options.train else []
    if options.json:
        record = {"name": name, **found.to_dict()}
        if options.train:
            record["measured"] = [row.to_dict() for row in measured]
        print(json.dumps(record, indent=2))
    elif options.train:
        print(f"\n{_table(measured, options.train_length)}")
        if found.cheapest not in [row.verdict.model for row in measured]:
            print(f"{found.cheapest.name}, the first class proven to suffice, is too large to train here.")
    if options.html is not None:
        from statetrack.report.automaton_page import write_automaton_page

        title = f"{name}, acting on {dfa.n_states} points" if options.automaton.group else name
        write_automaton_page(options.html, title, found, measured, options.train_length)
        print(f"\nSee {options.html}", file=sys.stderr if options.json else sys.stdout)


def _train(options: ExplainOptions, found: Explanation) -> list[Measured]:
    planned = runs(found, options.steps, options.train_length)
    # With --json only JSON goes to the standard output.
    with progress_bars(
        [(r.verdict.model.name, options.steps) for r in planned], sys.stderr if options.json else sys.stdout
    ) as bar:
        return [_measure(r, options, bar(i)) for i, r in enumerate(planned)]


def _measure(r: VerdictRun, options: ExplainOptions, progress: Report) -> Measured:
    """Carry out the run, or read its result, in results/explain/<run_id>."""
    folder, lengths = options.out / r.spec.id, list(r.spec.evaluation.eval_lengths or ())
    done = run(r.spec, folder, Options(options.device, progress=progress, say=lambda text: None))
    accuracy = [done["metrics"]["accuracy"][str(length)] for length in lengths]
    # The share of the most frequent state at each length, on words drawn as for the evaluation.
    generator = torch.Generator().manual_seed(r.spec.evaluation.eval_seed)
    targets = r.spec.task.sample(
        r.spec.evaluation.eval_samples, (lengths[-1], lengths[-1]), generator
    ).targets
    guess = [targets[:, t].bincount().max().item() / len(targets) for t in lengths]
    return Measured(r.verdict, r.model, accuracy, guess, str(folder), done["seconds"])


def _table(measured: list[Measured], length: int) -> str:
    """The verdicts next to the measured accuracies, aligned."""
    width = max(len(row.verdict.model.name) for row in measured)
    columns = "".join(f"{f'{m}x = {m * length}':>10}" for m in MULTIPLES)
    lines = [f"Trained on {length} letters; share of right states after so many letters:\n"]
    lines.append(f"{'class':<{width}}  {'theory':<7}{columns}   trained as")
    for row in measured:
        values = "".join(f"{value:>10.3f}" for value in row.accuracy)
        lines.append(f"{row.verdict.model.name:<{width}}  {row.verdict.answer:<7}{values}   {row.model}")
    guess = "".join(f"{value:>10.3f}" for value in measured[0].guess)
    lines.append(f"{'(always the most frequent state)':<{width}}  {'':<7}{guess}")
    lines.append(
        "\nYes and no are about what weights can do, at every length. Training can fail to find them where\n"
        "theory says yes (more --steps may help), and can look right for a while where it says no."
    )
    return "\n".join(lines)
