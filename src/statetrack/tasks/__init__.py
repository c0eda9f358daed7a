"""Tasks by name."""

from statetrack.errors import unknown_name
from statetrack.tasks.groups import Group, group
from statetrack.tasks.parity import Parity
from statetrack.tasks.task import IGNORE, Batch, Task
from statetrack.tasks.word_problem import WordProblem

TASKS: dict[str, Task] = {
    "parity": Parity(),
    "parity-dense": WordProblem("S2"),
    "word-problem": WordProblem(),
    "s5": WordProblem("S5"),
    "s5-swaps": WordProblem("S5", inputs="swaps"),
    "s5-up-to-3": WordProblem("S5", inputs="up-to-3"),
    "s5-4-tokens": WordProblem("S5", tokens_per_element=4),
    "z60": WordProblem("Z60"),
    "z60-2-tokens": WordProblem("Z60", tokens_per_element=2),
}


def task(name: str) -> Task:
    """The task of this name, with its defaults."""
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    return TASKS[name]


__all__ = ["IGNORE", "TASKS", "Batch", "Group", "Parity", "Task", "WordProblem", "group", "task"]
