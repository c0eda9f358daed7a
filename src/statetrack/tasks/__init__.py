"""Tasks: sequences with labels, by name.

    batch = task("s5-swaps").sample(64, (32, 32), torch.Generator().manual_seed(0))
    batch.inputs, batch.targets     both (B, T)

`TASKS` holds the named ones; "regex:(ab|ba)*", "dfa:FILE.json" and "group:S5" are tasks of automata, and
"jsonl:FILE" is a task of stored sequences, "corpus:DIR" one of text.

"s5" and "group:S5" are two tasks. "s5" is the word problem: which of the 120 permutations is the product so
far (121 tokens and classes, with the start token)? "group:S5" is the automaton of the group's two generators
on five points: at which of them is point 0 now (3 tokens, 5 classes)?
"""

import re

from statetrack.config import register, register_kind
from statetrack.errors import UserError, unknown_name
from statetrack.plugins import find
from statetrack.tasks.automaton import PREFIXES, Automaton, automaton_task
from statetrack.tasks.contract import check_task
from statetrack.tasks.corpus import PREFIX as CORPUS_PREFIX
from statetrack.tasks.corpus import Corpus, corpus_task
from statetrack.tasks.groups import Group, group
from statetrack.tasks.jsonl import PREFIX as JSONL_PREFIX
from statetrack.tasks.jsonl import Jsonl, jsonl_task
from statetrack.tasks.modular_arithmetic import BracketArithmetic, ModularArithmetic
from statetrack.tasks.parity import Parity
from statetrack.tasks.stored import StoredTask
from statetrack.tasks.task import IGNORE, Batch, Task, answer_positions
from statetrack.tasks.word_problem import WordProblem

TASKS: dict[str, Task] = {
    "parity": Parity(),
    "parity-dense": WordProblem("S2"),
    "mod-arithmetic": ModularArithmetic(),
    "mod-arithmetic-brackets": BracketArithmetic(),
    "mod-arithmetic-brackets-no-mult": BracketArithmetic(multiplication=False),
    "word-problem": WordProblem(),
    "s5": WordProblem("S5"),
    "s5-swaps": WordProblem("S5", inputs="swaps"),
    "s5-up-to-3": WordProblem("S5", inputs="up-to-3"),
    "s5-4-tokens": WordProblem("S5", tokens_per_element=4),
    "z60": WordProblem("Z60"),
    "z60-2-tokens": WordProblem("Z60", tokens_per_element=2),
}

_FROM_FILES = {JSONL_PREFIX: jsonl_task, CORPUS_PREFIX: corpus_task}


def task(name: str, alphabet: str | None = None) -> Task:
    """The task of this name, with its defaults.

        task("parity"), task("s5-swaps")          a name in `TASKS`
        task("regex:(ab|ba)*", alphabet="ab")     the states of the automaton of a regex
        task("dfa:FILE.json"), task("group:S5")   of an automaton in a file, or of a group that moves points
        task("jsonl:FILE")                        sequences with labels, stored in a file
        task("corpus:DIR")                        text, as `statetrack lm tokenize --out DIR` stores it

    "s5" asks for the product of permutations (121 classes), "group:S5" for the place of a point (5 classes).
    An unknown name is a `UserError` that suggests the nearest one.
    """
    if name.startswith(PREFIXES):
        return automaton_task(name, alphabet)
    read = next((read for prefix, read in _FROM_FILES.items() if name.startswith(prefix)), None)
    if ":" in name and read is None:
        raise unknown_name("task", name.partition(":")[0] + ":", (*PREFIXES, *_FROM_FILES))
    found: Task | None = _named(name) if read is None else None
    if alphabet is not None:
        raise UserError(f"task {name!r} takes no alphabet; that belongs to tasks such as 'regex:(ab|ba)*'.")
    return read(name) if found is None else found  # type: ignore[misc]


def _named(name: str) -> Task:
    try:
        return find("task", name, TASKS)
    except UserError as error:
        if not re.fullmatch(r"[SAZDsazd]_?[0-9]+", str(name)):
            more = "Also regex:PATTERN, dfa:FILE.json, group:NAME, jsonl:FILE and corpus:DIR."
            raise UserError(f"{error} {more}") from error
        group_ = str(name).replace("_", "").upper()
        raise UserError(
            f"task {name!r} is not known, and could be two things. The product of all elements of the group "
            f"so far: 'word-problem' with group {group_!r} (--task word-problem --group {group_}; 's5' and "
            "'z60' are short for those of S5 and Z60). Or the place of one point, as generators of the group "
            f"move it: 'group:{group_}'."
        ) from error


def register_task(name: str, task: Task) -> None:
    """Add a task from outside: `--task NAME`, its fields flags, its class a kind that specs may name.

    The class is a frozen dataclass derived from `Task`; the instance holds the defaults. Two short sequences
    are drawn, to check their shapes.

        register_task("mod-3", CountModulo(3))                in my_tasks.py
        statetrack train --task mod-3 --plugin my_tasks.py    on the command line
    """
    if not isinstance(task, Task):
        raise UserError(
            f"register_task: {task!r} is not a Task. Derive its class from statetrack.tasks.Task."
        )
    check_task("register_task", task)
    register("register_task", name, task, TASKS)


# Automata and files are tasks without a name of their own.
for _cls in (Automaton, Corpus, Jsonl, *map(type, TASKS.values())):
    register_kind(_cls)


__all__ = [
    "IGNORE",
    "TASKS",
    "Automaton",
    "Batch",
    "BracketArithmetic",
    "Corpus",
    "Group",
    "Jsonl",
    "ModularArithmetic",
    "Parity",
    "StoredTask",
    "Task",
    "WordProblem",
    "answer_positions",
    "group",
    "register_task",
    "task",
]
