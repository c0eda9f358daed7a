"""docs/automata.md shows what the commands print."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from statetrack.cli import main

TEXT = (Path(__file__).parents[2] / "docs/automata.md").read_text()
BLOCKS = re.findall(r"^```\n(\$ .*?)\n```$", TEXT, flags=re.S | re.M)
NEED_RUNS = {"train", "snap"}  # of trained models: tests/test_snap.py checks what they do
SHOWN = [
    (match[1], match[2].strip("\n"))
    for block in BLOCKS
    for match in re.finditer(r"^\$ statetrack (.*)\n((?:(?!\$ ).*\n?)*)", block, flags=re.M)
    if "--train" not in match[1] and match[1].split()[0] not in NEED_RUNS
]


@pytest.mark.parametrize(("command", "expected"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_pasted_output_is_what_the_command_prints(command, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("cycle.npy", np.eye(4)[[1, 2, 0, 3]])
    main(shlex.split(command))
    assert capsys.readouterr().out.strip("\n") == expected


def test_every_command_is_shown():
    assert {command.split()[0] for command, _ in SHOWN} == {"explain", "compile", "factor"}
