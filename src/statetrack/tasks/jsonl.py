"""A task from a file: `--task jsonl:FILE`, one sequence with its labels per line."""

import hashlib
import json
from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.tasks.stored import Sequences, Split, StoredTask
from statetrack.tasks.task import IGNORE

PREFIX = "jsonl:"
LARGEST = 2**31 - 1  # token or label


@dataclass(frozen=True)
class Jsonl(StoredTask):
    """Sequences of a JSONL file. Each line holds as many targets as inputs, -100 where there is no label:

        {"inputs": [2, 0, 1, 0], "targets": [-100, 1, 1, 0]}
        {"inputs": [2, 1], "targets": [-100, 0], "split": "test"}

    Lines that name no split are assigned by a hash of their content, `test_fraction` of them to "test", so
    equal lines are never in both splits. The file's content is part of the task, its location is not:
    `sha256` identifies the content, and a file that has changed is refused. `vocabulary` and `classes` are
    one more than the largest input and target; they can be raised, for a file that will grow.
    """

    path: str = field(compare=False)  # the file
    sha256: str = ""  # of the file; filled in when empty, like the two sizes when 0
    test_fraction: float = 0.1  # share of the lines without a "split" that are tested on
    vocabulary: int = 0  # number of tokens; one more than the largest input when 0
    classes: int = 0  # number of labels; one more than the largest target when 0

    def __post_init__(self):
        if not 0 <= self.test_fraction <= 1:
            raise UserError(f"Jsonl: test_fraction is {self.test_fraction}, expected a number from 0 to 1.")
        if not (self.sha256 and self.vocabulary and self.classes):
            # written out, so that a spec can be read where the file is not
            object.__setattr__(self, "sha256", self.sha256 or _sha256(_bytes(self.path)))
            object.__setattr__(self, "vocabulary", self.vocabulary or self._file.vocabulary)
            object.__setattr__(self, "classes", self.classes or self._file.classes)
        if self.classes < 2:
            raise UserError(f"Jsonl: every label of {self.path} is 0, expected two or more different ones.")

    @property
    def vocab_size(self) -> int:
        return self.vocabulary

    @property
    def n_classes(self) -> int:
        return self.classes

    @property
    def chance(self) -> float:
        return 1 / self.classes

    def sequences(self, split: Split) -> Sequences:
        needed, given = (self._file.vocabulary, self._file.classes), (self.vocabulary, self.classes)
        if needed[0] > given[0] or needed[1] > given[1]:
            raise UserError(
                f"Jsonl: vocabulary and classes are {given[0]} and {given[1]}, expected at least {needed[0]} "
                f"and {needed[1]}, as {self.path} has them."
            )
        return _split(self._file, self.test_fraction, split)

    @property
    def _file(self) -> "_File":
        return _read(self.path, self.sha256)


@dataclass(frozen=True, eq=False)
class _File:
    """What a file holds. Sequences whose `place` is below the test fraction are for testing."""

    path: str
    sequences: Sequences
    place: Tensor  # (S,): in [0, 1) by a hash of the content, below 0 or above 1 where the line names a split

    @property
    def vocabulary(self) -> int:
        return int(self.sequences.inputs.max()) + 1

    @property
    def classes(self) -> int:
        return int(self.sequences.targets.max()) + 1


def jsonl_task(name: str) -> Jsonl:
    """The task of "jsonl:FILE"."""
    if name == PREFIX:
        raise UserError("task 'jsonl:' names no file, expected jsonl:FILE.")
    return Jsonl(name.removeprefix(PREFIX))


@lru_cache(maxsize=4)
def _split(file: _File, test_fraction: float, split: Split) -> Sequences:
    chosen = (file.place < test_fraction) == (split == "test")
    if not chosen.any():
        raise UserError(
            f"{file.path} has no {split} sequences: {len(chosen)} lines, test_fraction {test_fraction}. Name "
            'a split in some lines ("split": "test"), or choose another test_fraction.'
        )
    whole = file.sequences
    return Sequences(whole.inputs, whole.targets, whole.starts[chosen], whole.lengths[chosen])


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}. Put the file there, or name it by --task jsonl:FILE."
        ) from None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@lru_cache(maxsize=4)
def _read(path: str, sha256: str) -> _File:
    """Read the file, which must have this hash."""
    raw = _bytes(path)
    found = _sha256(raw)
    if found != sha256:
        raise UserError(
            f"{path} has changed: its SHA-256 is {found}, expected {sha256} as the spec has it. Bring back "
            "the file, or start a new run with it."
        )
    inputs, targets, lengths, place = array("q"), array("q"), array("q"), array("d")
    for number, line in enumerate(raw.splitlines(), 1):
        given = _line(f"{path}, line {number}", line)
        inputs.extend(given["inputs"])
        targets.extend(given["targets"])
        lengths.append(len(given["inputs"]))
        place.append(_place(given))
    if not lengths:
        raise UserError(f"{path} is empty, expected a line of inputs and targets per sequence.")
    size = _tensor(lengths)
    sequences = Sequences(_tensor(inputs), _tensor(targets), size.cumsum(0) - size, size)
    return _File(path, sequences, torch.tensor(place, dtype=torch.float64))


def _tensor(numbers: array) -> Tensor:
    return torch.frombuffer(numbers, dtype=torch.long).clone()


def _line(where: str, line: bytes) -> dict[str, Any]:
    """One line, checked."""
    try:
        given = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}.") from None
    if not isinstance(given, dict) or not {"inputs", "targets"} <= given.keys():
        raise UserError(f'{where}: expected an object {{"inputs": [...], "targets": [...]}}.')
    if given.get("split", "train") not in ("train", "test"):
        raise UserError(f'{where}: split is {given["split"]!r}, expected "train" or "test".')
    for name in ("inputs", "targets"):
        _check_numbers(f"{where}: {name}", given[name], IGNORE if name == "targets" else 0)
    if len(given["inputs"]) != len(given["targets"]):
        raise UserError(
            f"{where} has {len(given['inputs'])} inputs and {len(given['targets'])} targets, expected as "
            "many of each."
        )
    if all(target == IGNORE for target in given["targets"]):
        raise UserError(f"{where} has no label: every target is {IGNORE}. Leave the line out.")
    return given


def _check_numbers(where: str, numbers: Any, besides: int) -> None:
    """Whole numbers from 0 to `LARGEST`, or the number `besides`."""
    if not isinstance(numbers, list) or not numbers:
        raise UserError(f"{where} is {str(numbers)[:60]}, expected a list of at least one whole number.")
    for number in numbers:
        if type(number) is not int or not (0 <= number <= LARGEST or number == besides):
            also = f", or {besides} for no label" if besides else ""
            raise UserError(
                f"{where} holds {str(number)[:60]}, expected whole numbers from 0 to {LARGEST}{also}."
            )


def _place(given: dict[str, Any]) -> float:
    """A number in [0, 1) that depends on the sequence and its labels alone; -1 for "test", 2 for "train"."""
    if "split" in given:
        return -1.0 if given["split"] == "test" else 2.0
    content = json.dumps([given["inputs"], given["targets"]]).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:6], "little") / 2**48
