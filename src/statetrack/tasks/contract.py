"""What training and evaluation take for granted about a task, checked for tasks from outside."""

import torch

from statetrack.errors import UserError
from statetrack.tasks.stored import StoredTask
from statetrack.tasks.task import IGNORE, Task


def check_task(where: str, task: Task) -> None:
    """Raise a `UserError` that names what the task lacks; `where` opens the message."""
    where = f"{where}: {type(task).__name__}"
    for name in ("labels", "train_lengths", "eval_lengths"):
        # on the class: the lengths of a stored task are properties, which would read its data
        if not hasattr(type(task), name):
            raise UserError(f"{where} has no {name}. Set it in the class, as statetrack.tasks.Parity does.")
    if task.labels not in ("dense", "last", "given"):
        raise UserError(f'{where}: labels is {task.labels!r}, expected "dense", "last" or "given".')
    stored = isinstance(task, StoredTask)
    if stored != (task.labels == "given"):
        expected = 'labels "given"' if stored else "a class derived from statetrack.tasks.StoredTask"
        raise UserError(f"{where}: labels is {task.labels!r}, expected {expected}.")
    if not stored:
        _check_sample(where, task)


def _check_sample(where: str, task: Task) -> None:
    length = task.train_lengths[0]
    inputs, targets = task.sample(2, (length, length), torch.Generator().manual_seed(0))
    if inputs.ndim != 2 or inputs.shape != targets.shape or len(inputs) != 2:
        raise UserError(
            f"{where} drew inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)} for a batch of 2, "
            "expected (batch, time) twice."
        )
    for name, values, size, classes in (
        ("inputs", inputs, "vocab_size", task.vocab_size),
        ("targets", targets[targets != IGNORE], "n_classes", task.n_classes),
    ):
        if values.dtype != torch.int64:
            raise UserError(f"{where} drew {name} of {values.dtype}, expected torch.int64.")
        if values.numel() and (int(values.min()) < 0 or int(values.max()) >= classes):
            raise UserError(
                f"{where} drew {name} from {int(values.min())} to {int(values.max())}, expected 0 to "
                f"{classes - 1}, since its {size} is {classes}."
            )
    if task.labels == "dense" and inputs.shape[1] != length + 1:
        raise UserError(
            f"{where} drew {inputs.shape[1]} tokens for length {length}, expected {length + 1}: a dense task "
            "puts a start token before its sequence."
        )
    if task.labels == "dense" and (targets == IGNORE).any():
        raise UserError(f"{where}: {IGNORE} among the targets, expected a label at every position (dense).")
    if task.labels == "last" and not ((targets != IGNORE).sum(1) == 1).all():
        raise UserError(f'{where}: expected one label in every sequence, since labels is "last".')
