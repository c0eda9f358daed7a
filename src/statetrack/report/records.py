"""runs.jsonl: the finished runs of an item in one file, a line each, made to be kept in a repository.

A line holds what a run's folder holds, without weights: id and labels, spec, last metrics, seconds, machine,
commit, and the learning curve thinned to the rows that one can tell from a picture.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statetrack.config import to_dict
from statetrack.errors import UserError
from statetrack.experiments.item import LabelledRun, check_scale
from statetrack.files import write_text

RECORDS = "runs.jsonl"
MOST_ROWS = 150  # of a learning curve, without those that have an evaluation
INVISIBLE = 0.01  # of the height of a curve: an error that is not seen
LOSS_FLOOR = 1e-8  # below it nothing is drawn: a loss of exactly 0 has no place on a logarithmic axis

Row = dict[str, Any]  # of metrics.jsonl


@dataclass(frozen=True)
class Record:
    """A finished run. `done` is the content of done.json, `rows` are those of metrics.jsonl or fewer."""

    item: str
    scale: str
    run: LabelledRun
    done: dict[str, Any]
    rows: list[Row]

    def to_json(self) -> str:
        """One line, with the same bytes for the same run, today and after its config classes gain fields."""
        line = {"item": self.item, "scale": self.scale} | self.run.to_dict()
        del line["spec"]  # it comes behind what one looks for in a line
        line |= {name: self.done.get(name) for name in ("seconds", "commit", "machine", "metrics")}
        line["spec"] = to_dict(self.run.spec, hashed=True)
        last = self.done["metrics"]["step"]
        line["curve"] = [_short(row) for row in self.rows if row["step"] != last]
        return json.dumps(line)

    @classmethod
    def from_json(cls, text: str) -> "Record":
        """The record of a line. Its last row is the metrics, which the curve does not repeat."""
        data = _checked(json.loads(text))
        done = {name: data[name] for name in ("id", "metrics", "seconds", "machine", "commit")}
        rows = [*data["curve"], data["metrics"]]
        return cls(data["item"], data["scale"], LabelledRun.from_dict(data), done, rows)


def _checked(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise UserError("expected an object.")
    text, number = str, (int, float)
    kinds = dict.fromkeys(("item", "scale", "id", "panel", "label", "family"), text)
    kinds |= {"ours": bool, "seconds": number, "commit": (str, type(None)), "machine": dict}
    kinds |= {"metrics": dict, "spec": dict, "curve": list}
    for name, kind in kinds.items():
        if name not in data or not isinstance(data[name], kind):
            raise UserError(f"{name!r} is {data.get(name, 'missing')!s:.60}.")
    check_scale(data["scale"])
    for row in (*data["curve"], data["metrics"]):
        if not isinstance(row, dict) or not all(
            isinstance(row.get(name), number) for name in ("step", "loss")
        ):
            raise UserError(f"a row of the curve is {row!s:.60}, expected step and loss.")
    return data


def _short(row: Row) -> Row:
    """What a learning curve needs of a row; one with an evaluation is kept whole."""
    return row if "accuracy" in row else {"step": row["step"], "loss": float(f"{row['loss']:.5g}")}


def read_records(path: Path) -> list[Record]:
    """The runs of a file, each once."""
    found: dict[str, Record] = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = Record.from_json(line)
        except (UserError, json.JSONDecodeError) as error:
            raise UserError(
                f"{path}, line {number} cannot be read as a run: {error} Restore the line, or delete it."
            ) from error
        known = found.setdefault(record.run.id, record)
        if known != record:
            raise UserError(
                f"{path}, line {number}: run {record.run.id} has an earlier line that differs. Delete one."
            )
    return list(found.values())


def write_records(path: Path, records: Sequence[Record]) -> None:
    """A line per run, in the order given."""
    write_text(path, "".join(record.to_json() + "\n" for record in records))


def thin(rows: Sequence[Row]) -> list[Row]:
    """The rows that give the picture of a learning curve: log loss against step, drawn as straight lines.

    Starting from the first, the last and all with an evaluation, the row farthest from the line between its
    neighbours is added next, until none is seen to be off or there are `MOST_ROWS`. Short bursts stay.
    """
    if not rows:
        return []
    steps = [row["step"] for row in rows]
    height = [math.log(max(row["loss"], LOSS_FLOOR)) for row in rows]
    evaluated = {i for i, row in enumerate(rows) if "accuracy" in row}
    kept = {0, len(rows) - 1} | evaluated
    smallest = INVISIBLE * (max(height) - min(height))

    def farthest(a: int, b: int) -> tuple[float, int]:
        """How far off the line from row a to row b the rows between them are at most, and which one it is."""
        slope = (height[b] - height[a]) / max(1, steps[b] - steps[a])
        off = ((abs(height[i] - height[a] - slope * (steps[i] - steps[a])), i) for i in range(a + 1, b))
        return max(off, default=(0.0, a))

    ends = sorted(kept)
    gaps = {(a, b): farthest(a, b) for a, b in itertools.pairwise(ends)}
    while gaps and len(kept - evaluated) < MOST_ROWS:
        (a, b), (error, i) = max(gaps.items(), key=lambda gap: gap[1][0])
        if error <= smallest:
            break
        del gaps[a, b]
        gaps |= {(a, i): farthest(a, i), (i, b): farthest(i, b)}
        kept.add(i)
    return [rows[i] for i in sorted(kept)]
