"""lm-evaluation-harness as it is, on a model of this library: `statetrack lm eval`.

The model goes to the harness through its Hugging Face wrapper. The paper's tasks are one group, "paper", and
a table sets ours beside the numbers of Table 4 (tab:lm_harness).
"""

import logging
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from statetrack.errors import UserError, require, unknown_name
from statetrack.lm.models import OpenedModel

__all__ = ["COLUMNS", "PAPER", "PAPER_TASKS", "evaluate", "paper_table"]

GROUP = "paper"


class Column(NamedTuple):
    """A column of the paper's table: the harness's task and metric, and the factor between the two."""

    task: str
    metric: str
    factor: float = 100.0  # the paper has accuracies in per cent


COLUMNS = {
    "Wiki. ppl": Column("wikitext", "word_perplexity", 1.0),
    "LMB. ppl": Column("lambada_openai", "perplexity", 1.0),
    "LMB. acc": Column("lambada_openai", "acc"),
    "PIQA acc": Column("piqa", "acc"),
    "Hella. acc_n": Column("hellaswag", "acc_norm"),
    "Wino. acc": Column("winogrande", "acc"),
    "ARC-e acc": Column("arc_easy", "acc"),
    "ARC-c acc_n": Column("arc_challenge", "acc_norm"),
    "SWDE cont.": Column("swde", "contains"),
    "SQUAD cont.": Column("squad_completion", "contains"),
    "FDA cont.": Column("fda", "contains"),
}
AVERAGE = "Avg."  # of these, as in the paper
AVERAGED = ("LMB. acc", "PIQA acc", "Hella. acc_n", "Wino. acc", "ARC-e acc", "ARC-c acc_n")

# each task once, in the order of the columns
PAPER_TASKS: tuple[str, ...] = tuple(dict.fromkeys(column.task for column in COLUMNS.values()))
# where the harness keeps them: to read the index of all of its tasks takes a quarter of a minute
FOLDERS = {"lambada_openai": "lambada", "arc_easy": "arc", "arc_challenge": "arc"}

# Table 4 (tab:lm_harness), the models trained on FineWeb; columns as in COLUMNS
PAPER: dict[str, tuple[float, ...]] = {
    "DeltaNet 340M [0,1]": (24.68, 31.49, 33.7, 70.3, 45.1, 51.3, 50.0, 26.1, 35.2, 28.7, 11.8),
    "DeltaNet 340M [-1,1]": (24.54, 31.15, 34.0, 69.9, 44.6, 51.9, 50.0, 24.4, 37.2, 33.1, 6.6),
    "Mamba 370M [0,1]": (24.84, 24.69, 35.6, 70.6, 48.4, 51.2, 53.4, 24.8, 21.6, 27.7, 2.8),
    "Mamba 370M [-1,1]": (25.02, 24.71, 36.2, 70.5, 47.8, 53.3, 54.7, 26.7, 20.9, 24.8, 2.5),
    "DeltaNet 1.3B [0,1]": (18.54, 14.32, 43.5, 73.7, 56.2, 56.9, 58.2, 29.9, 49.1, 35.1, 8.6),
    "DeltaNet 1.3B [-1,1]": (18.57, 12.73, 43.7, 73.3, 55.8, 56.8, 56.9, 27.9, 48.8, 33.9, 12.3),
}


def evaluate(
    opened: OpenedModel,
    tasks: Sequence[str] = (GROUP,),
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    shots: int | None = None,
) -> dict[str, Any]:
    """The metrics of the tasks, by task and metric, with what they were measured under.

    `include_path` is a folder of YAML tasks; `limit` takes the first documents of each task only. Contexts
    are cut to `max_length` tokens, the training length when None.
    """
    harness = require("lm_eval", extra="eval", for_="evaluation on benchmark tasks")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of what is meant here
    names = list(dict.fromkeys(_named(tasks)))
    if not names:
        raise UserError(f"lm eval: no task was named, expected {GROUP!r} or names of tasks.")
    manager = _task_manager(names, include_path)
    model = _harness_model(opened, batch_size, max_length or opened.context)
    try:
        found = harness.simple_evaluate(
            model=model,
            tasks=names,
            task_manager=manager,
            limit=limit,
            num_fewshot=shots,
            log_samples=True,  # for the number of choices and the answers
            bootstrap_iters=0,
        )
    except AssertionError as error:
        if "max_length" not in (traceback.extract_tb(error.__traceback__)[-1].line or ""):
            raise
        raise UserError(
            f"lm eval: an answer in a task has more tokens than a context, {max_length or opened.context}. "
            "Give a larger --max-length."
        ) from error
    except (ConnectionError, FileNotFoundError) as error:
        raise UserError(
            f"The data of a task cannot be loaded: {error}. lm-evaluation-harness takes them from the "
            "Hugging Face hub. Without network, run it once where there is one and copy the cache (HF_HOME), "
            "or give tasks of your own: --include-path FOLDER --tasks NAME."
        ) from error
    return {
        "model": opened.name,
        "tasks": {name: _metrics(found["results"][name]) for name in sorted(found["results"])},
        "baselines": {
            name: found_baselines
            for name in sorted(found["results"])
            if (found_baselines := _baselines(found, name))
        },
        "samples": {name: count["effective"] for name, count in sorted(found["n-samples"].items())},
        "limit": limit,
        "shots": shots,
        "max_length": max_length or opened.context,
        "lm_eval": version("lm_eval"),
    }


def _named(tasks: Sequence[str]) -> Iterator[str]:
    for name in tasks:
        yield from PAPER_TASKS if name == GROUP else (name,)


def _task_manager(names: Sequence[str], include_path: str | Path | None) -> Any:
    """The harness's index of tasks, of the user's folder and of as few of its own as will do."""
    tasks = require("lm_eval.tasks", extra="eval", for_="evaluation on benchmark tasks")
    own = Path(str(tasks.__file__)).parent
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include-path {include_path} is not a folder, expected one with YAML tasks.")
    given = [] if include_path is None else [Path(include_path)]
    known = {own / FOLDERS.get(name, name) for name in names if name in PAPER_TASKS}
    manager = tasks.TaskManager(include_path=[*sorted(known), *given], include_defaults=False)
    if not {*names} <= {*_all_names(manager)}:
        manager = tasks.TaskManager(include_path=given or None)
    for name in names:
        if name not in _all_names(manager):
            raise unknown_name("lm eval: task", name, [GROUP, *PAPER_TASKS], "--include-path adds your own.")
    return manager


def _all_names(manager: Any) -> set[str]:
    return {*manager.all_tasks, *manager.all_groups, *manager.all_tags}


def _harness_model(opened: OpenedModel, batch_size: int, max_length: int) -> Any:
    models = require("lm_eval.models.huggingface", extra="eval", for_="evaluation on benchmark tasks")
    from statetrack.integrations.huggingface.export import wrapped
    from statetrack.integrations.huggingface.tokenizer import fast_tokenizer

    return models.HFLM(
        pretrained=wrapped(opened),
        tokenizer=fast_tokenizer(opened.tokenizer),
        batch_size=batch_size,
        max_length=max_length,
    )


def _metrics(found: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one task; the harness writes "acc,none" for the metric acc without a filter."""
    values = {key.removesuffix(",none"): value for key, value in found.items()}
    return {key: float(x) for key, x in values.items() if isinstance(x, int | float) and key != "sample_len"}


def _baselines(found: Mapping[str, Any], task: str) -> dict[str, float]:
    """What needs no model on a task of choices: an even choice, and always the place most often right.

    Empty for other kinds of tasks, and for groups.
    """
    if found["configs"].get(task, {}).get("output_type") != "multiple_choice":
        return {}
    documents = {sample["doc_id"]: sample for sample in found["samples"][task]}.values()
    choices = [len(sample["arguments"]) for sample in documents]
    answers = Counter(str(sample["target"]) for sample in documents)
    if not choices or min(choices) == 0:
        return {}
    return {
        "chance": sum(1 / n for n in choices) / len(choices),
        "majority": max(answers.values()) / len(documents),
    }


def paper_table(result: Mapping[str, Any]) -> list[list[str]]:
    """Our row and those of Table 4 (tab:lm_harness), with a header; "-" for what was not measured."""
    header = ["model", *COLUMNS, AVERAGE]
    tasks = result["tasks"]
    ours = [
        tasks[column.task][column.metric] * column.factor
        if column.metric in tasks.get(column.task, {})
        else None
        for column in COLUMNS.values()
    ]
    rows = {result["model"]: ours} | {f"{name} (paper)": list(row) for name, row in PAPER.items()}
    return [header, *([name, *map(_number, [*row, _average(row)])] for name, row in rows.items())]


def _average(row: Sequence[float | None]) -> float | None:
    by_name = dict(zip(COLUMNS, row, strict=True))
    values = [by_name[name] for name in AVERAGED]
    return None if None in values else sum(v for v in values if v is not None) / len(values)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 1e4 else f"{value:.2e}"
