"""`reproduce` piece by piece: some minutes at a time, anywhere, without repeating what is known."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

import statetrack.reproduce as reproducing
from statetrack.cli import main as command
from statetrack.experiments.registry import ITEMS
from statetrack.report.results import export, read_index
from statetrack.reproduce import ReproduceOptions, main, reproduce

WITHOUT_EXTRAS = """
import sys
for name in ("tyro", "rich", "matplotlib", "jinja2", "markupsafe", "ray", "transformers"):
    sys.modules[name] = None
from statetrack.reproduce import main
if __name__ == "__main__":
    main()
"""


def test_the_entry_needs_no_extras_and_carries_out_all_items(tmp_path):
    """Of every item the runs of one model; what is finished is found by the second call."""
    script = tmp_path / "reproduce_here.py"
    script.write_text(WITHOUT_EXTRAS)
    command = [sys.executable, str(script), "all", "--scale", "smoke", "--device", "cpu", "--seeds", "1"]
    command += ["--runs-per-gpu", "3", "--only", "'[-1,1]' 'lrnn'", "--out", str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment()).stdout
    assert "fig-parity: 0 of 2 cells of the paper with 2 seeds; 0 of 4 runs." in shown
    assert (
        "To be run, in this order: 1 first seeds. Next: Parity: Diagonal LRNN [-1,1], lr 0.01, seed 0."
        in shown
    )
    assert "fig-parity: 0 of 2 cells of the paper with 2 seeds, 1 with fewer; 1 of 4 runs." in shown
    assert "not run: Parity: Diagonal LRNN [0,1]" in shown
    assert "fewer seeds than planned: Parity: Diagonal LRNN [-1,1] (1 of 2)" in shown
    assert {path.name for path in (tmp_path / "fig-parity/smoke").iterdir()} == {"runs.json"}


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1"}


def test_all_is_every_item_once_and_its_words_may_miss_some(tmp_path, capsys):
    options = ReproduceOptions("smoke", runs_per_gpu=4, out=tmp_path, device="cpu", only="'mlstm, lr'")
    outcome = reproduce("all", options)
    assert [part.item.name for part in outcome.parts] == ["tab-chomsky"]
    assert len(outcome.parts[0].results().finished) == 4
    capsys.readouterr()
    reproduce("all", options)
    assert "Every run is finished." in capsys.readouterr().out


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder as docs/results: seed 0 of fig-parity, finished elsewhere."""
    folder = tmp_path_factory.mktemp("kept")
    out = folder / "elsewhere"
    options = ReproduceOptions("smoke", out=out, device="cpu", only="'seed 0'", runs_per_gpu=2)
    reproduce("fig-parity", options)
    export(read_index(out / "fig-parity/smoke"), folder / "fig-parity/smoke")
    return folder


def test_kept_results_are_repeated_unless_they_are_named(kept, tmp_path, capsys):
    """The report shows those that are named beside the new ones."""
    arguments = ["fig-parity", "--scale", "smoke", "--device", "cpu", "--only", "'[-1,1]'"]
    out = tmp_path / "new"
    command(["reproduce", *arguments, "--out", str(out), "--with-results", str(kept)])
    shown = capsys.readouterr().out
    assert "2 of 4 runs" in shown
    assert "3 of 4 runs: 1 of 2 cells (a model on a task) with 2 seeds, 1 with fewer." in shown
    assert "3 of 4 runs: " in (out / "fig-parity/smoke/report.html").read_text()
    seeds = {json.loads(path.read_text())["seed"] for path in out.glob("runs/*/spec.json")}
    assert seeds == {1}
    main([*arguments, "--out", str(tmp_path / "again"), "--runs-per-gpu", "2"])
    assert len(list(tmp_path.glob("again/runs/*/done.json"))) == 2


def test_two_calls_at_once_on_one_folder_list_the_runs_of_both(tmp_path, monkeypatch):
    """The second call begins and ends while the first is at work."""

    def options(only):
        return ReproduceOptions("smoke", out=tmp_path, device="cpu", only=only, runs_per_gpu=2)

    carry_out = reproducing._carry_out

    def with_another_call(*arguments):
        monkeypatch.setattr(reproducing, "_carry_out", carry_out)
        reproduce("fig-parity", options("'[-1,1]'"))
        return carry_out(*arguments)

    monkeypatch.setattr(reproducing, "_carry_out", with_another_call)
    reproduce("fig-parity", options("'[0,1]'"))
    assert len(read_index(tmp_path / "fig-parity/smoke").finished) == 4


@pytest.mark.slow
def test_the_minutes_end_in_checkpoints_and_the_copied_folder_goes_on(tmp_path, monkeypatch, capsys):
    """The clock jumps past the end once a run has logged some steps."""
    real, rows = time.monotonic, [0]

    def logged(out):
        return max((len(p.read_text().splitlines()) for p in out.glob("runs/*/metrics.jsonl")), default=0)

    def call(out):
        late = [0.0]

        def clock():
            if not late[0] and logged(out) > rows[0]:
                late[0] = 1e6
            return real() + late[0]

        monkeypatch.setattr(time, "monotonic", clock)
        reproduce("fig-parity", ReproduceOptions("quick", minutes=600, out=out, device="cpu"))
        rows[0] = logged(out)
        return capsys.readouterr().out

    shown = call(tmp_path / "here")
    assert "0 runs finished, 1 more have a checkpoint, 5 are to begin. The same command goes on." in shown
    (begun,) = (tmp_path / "here").glob("runs/*/checkpoint-*.safetensors")
    first = begun.parent.name
    shutil.move(tmp_path / "here", tmp_path / "there")
    shown = call(tmp_path / "there")
    assert "Going on from step" in (tmp_path / "there/runs" / first / "run.log").read_text()
    assert "1 more have a checkpoint" in shown
    assert first in {run.id for run in ITEMS["fig-parity"].runs("quick")}
