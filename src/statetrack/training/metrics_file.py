"""metrics.jsonl: one row per line of the log. Rows hold no times, so a resumed run writes the same bytes."""

import json
import os
from pathlib import Path
from typing import Any

from statetrack.files import write_text


class MetricsFile:
    """The file, to be added to. Of several processes rank 0 alone does so."""

    def __init__(self, path: Path):
        self.path = path

    def begin(self, rows: list[dict[str, Any]]) -> None:
        """Begin with `rows` and lose all others, such as those a killed run wrote after its checkpoint."""
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def append(self, row: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")

    def flush(self) -> None:
        """Have the rows on the disk: a checkpoint counts on them."""
        with open(self.path, "a") as file:
            os.fsync(file.fileno())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole rows of metrics.jsonl; a line cut off by a kill ends the reading."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                break
            rows.append(row)
    return rows
