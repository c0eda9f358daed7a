"""statetrack lm eval: lm-evaluation-harness, with the paper's tasks as one group."""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statetrack.commands.flags import parse, take_model
from statetrack.errors import UserError, require
from statetrack.files import write_json
from statetrack.integrations.lm_eval import PAPER_TASKS, evaluate, paper_table
from statetrack.lm.models import open_model
from statetrack.training.loop import resolve_device


@dataclass(frozen=True)
class EvalOptions:
    """Evaluate a language model with lm-evaluation-harness: `statetrack lm eval MODEL`.

    MODEL is the folder of a run or of an exported model. The task "paper" stands for all of the paper's. The
    harness downloads their data; tasks of your own, YAML files in --include-path, can be local.
    """

    tasks: tuple[str, ...] = ("paper",)  # names of tasks; paper: all of the paper's
    include_path: Path | None = None  # folder of YAML tasks
    limit: int | None = None  # documents of each task; all when None
    batch_size: int = 8  # sequences at a time
    max_length: int | None = None  # tokens of a context; the training length when None
    shots: int | None = None  # examples in front of each question; the task's own number when None
    out: Path | None = None  # JSON file; MODEL/eval.json when None
    device: str = "auto"  # auto, cpu or cuda
    tokenizer: Path | None = None  # tokenizer.json, where MODEL has none


def main(arguments: Sequence[str]) -> None:
    folder, flags = take_model(arguments, "lm eval")
    options = parse(EvalOptions, flags, "statetrack lm eval MODEL")
    for name in ("limit", "batch_size", "max_length"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= sys.maxsize:
            raise UserError(f"lm eval: {name} is {value}, expected from 1 to {sys.maxsize}.")
    if options.shots is not None and options.shots < 0:
        raise UserError(f"lm eval: shots is {options.shots}, expected 0 or more.")
    require("lm_eval", extra="eval", for_="evaluation on benchmark tasks")
    opened = open_model(folder, tokenizer=options.tokenizer)
    opened.model.to(resolve_device(options.device))
    result = evaluate(
        opened,
        options.tasks,
        include_path=options.include_path,
        limit=options.limit,
        batch_size=options.batch_size,
        max_length=options.max_length,
        shots=options.shots,
    )
    out = options.out or Path(folder) / "eval.json"
    write_json(out, result)
    print(as_text(result))
    print(f"\nSee {out}")


def as_text(result: Mapping[str, Any]) -> str:
    """All metrics by task; below them our column beside the paper's, if one of its tasks is there."""
    lines = []
    if result["limit"] is not None:
        lines.append(
            f"Only the first {result['limit']} documents of each task: not comparable with other results."
        )
    for task, metrics in result["tasks"].items():
        documents = f"{result['samples'][task]} documents" if task in result["samples"] else "group"
        lines.append(f"{task} ({documents})")
        beside = _beside(result.get("baselines", {}).get(task))
        lines += [
            f"  {name:<24}{value:>12.4f}{beside if name.startswith('acc') else ''}"
            for name, value in metrics.items()
        ]
    if {*PAPER_TASKS} & {*result["tasks"]}:
        lines += ["", "Beside the paper's models, trained on 100B tokens of FineWeb (tab:lm_harness):"]
        lines += _columns(paper_table(result))
    return "\n".join(lines)


def _beside(baselines: Mapping[str, float] | None) -> str:
    """What an accuracy on choices is compared with."""
    if not baselines:
        return ""
    return f"  (chance {baselines['chance']:.4f}, majority {baselines['majority']:.4f})"


def _columns(table: Sequence[Sequence[str]]) -> list[str]:
    """The table with models as columns: names wrapped in the header, one line per metric."""
    header, *models = table
    names = [textwrap.wrap(row[0].removesuffix(" (paper)"), 11) for row in models]
    height = max(map(len, names))
    names = [[*[""] * (height - len(name)), *name] for name in names]
    lines = [f"{'':<13}" + "".join(f"{name[i]:>12}" for name in names) for i in range(height)]
    rows = zip(header[1:], *(row[1:] for row in models), strict=True)
    return lines + [f"{metric:<13}" + "".join(f"{value:>12}" for value in row) for metric, *row in rows]
