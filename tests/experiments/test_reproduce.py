"""`statetrack reproduce` from end to end, with a few steps per run."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from statetrack.cli import main
from statetrack.experiments.registry import ITEMS


def exit_code(arguments):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    return exit.value.code


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One folder for all items: the two Chomsky items find each other's runs there."""
    return tmp_path_factory.mktemp("reproduce")


def reproduce(name, out):
    main(["reproduce", name, "--scale", "smoke", "--out", str(out), "--device", "cpu"])
    return out / name / "smoke"


@pytest.mark.parametrize("name", ITEMS)
def test_every_item_runs_at_smoke_scale(name, out, capsys):
    folder = reproduce(name, out)
    shown = capsys.readouterr().out
    assert "SMOKE scale" in shown
    assert "What differs from the paper" in shown
    written = {path.name for path in folder.iterdir()}
    assert written == {"runs.json", "report.html", "figure.png", "figure.pdf"}
    assert all((out / "runs" / run.id / "done.json").exists() for run in ITEMS[name].runs("smoke"))


def test_repeating_runs_nothing_again_and_writes_the_same_report(out, capsys):
    folder = reproduce("fig-parity", out)
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/done.json")}
    page = (folder / "report.html").read_bytes()
    reproduce("fig-parity", out)
    assert {path: path.stat().st_mtime_ns for path in out.glob("runs/*/done.json")} == before
    assert (folder / "report.html").read_bytes() == page


def test_the_list_names_every_item_with_its_runs(capsys):
    main(["reproduce", "--list"])
    shown = capsys.readouterr().out
    for name, item in ITEMS.items():
        (line,) = [line for line in shown.splitlines() if line.startswith(name + " ")]
        assert item.paper_label in line
        assert item.what in line
    assert " 624 " in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce"], "give the name of an item first"),
        (["reproduce", "fig-6"], "item 'fig-6' is not known"),
        (["reproduce", "fig-parity", "--scale", "huge"], "huge"),
        (["reproduce", "fig-parity", "--workers", "0"], "workers is 0"),
        (["reproduce", "fig-parity", "--minutes", "0"], "minutes is 0"),
        (["reproduce", "fig-parity", "--minutes", "1", "--ray", "auto"], "not for --ray"),
        (["reproduce", "fig-parity", "--gpus-per-run", "0.5"], "--gpus-per-run is for --ray"),
        (["reproduce", "fig-parity", "--gpus-per-run", "nan", "--ray", "auto"], "gpus_per_run is nan"),
        (["reproduce", "fig-parity", "--with-results", "nowhere"], "nowhere is not a folder"),
        (["reproduce", "fig-parity", "--seeds", "0"], "seeds is 0"),
        (["reproduce", "fig-parity", "--only", "mamba"], "matches no run"),
        (["reproduce", "fig-parity", "--device", "tpux"], "expected auto, cpu or cuda"),
        (["report"], "give at least one folder"),
        (["report", "nowhere"], "nowhere holds no runs.json"),
        (["plot-spectrum"], "give the folder of a finished run"),
        (["plot-spectrum", "nowhere"], "does not exist"),
        (["diagnose"], "give the folder of a finished run"),
        (["diagnose", "nowhere"], "does not exist"),
    ],
)
def test_mistakes_end_with_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert exit_code(arguments) == 2
    shown = capsys.readouterr()
    assert message in " ".join((shown.err + shown.out).split())
    assert not list(tmp_path.iterdir())


def test_only_and_seeds_choose_the_runs(tmp_path, capsys):
    main(
        [
            "reproduce",
            "fig-parity",
            "--scale",
            "smoke",
            "--only",
            "[-1,1]",
            "--seeds",
            "3",
            "--out",
            str(tmp_path),
        ]
    )
    index = json.loads((tmp_path / "fig-parity/smoke/runs.json").read_text())
    assert [(run["label"], run["spec"]["seed"]) for run in index["runs"]] == [
        ("Diagonal LRNN [-1,1]", i) for i in range(3)
    ]


def test_a_failed_run_is_reported_with_its_log_and_the_rest_goes_on(tmp_path, capsys):
    broken, other, *_ = runs = ITEMS["fig-parity"].runs("smoke")
    (tmp_path / "runs" / broken.id).mkdir(parents=True)
    (tmp_path / "runs" / broken.id / "spec.json").write_text(json.dumps(other.spec.to_dict()))
    assert exit_code(["reproduce", "fig-parity", "--scale", "smoke", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert f"1 of {len(runs)} runs failed" in shown
    assert str(tmp_path / "runs" / broken.id / "run.log") in shown
    assert (tmp_path / "fig-parity/smoke/report.html").exists()


@pytest.mark.slow
def test_control_c_ends_with_code_130_and_the_command_goes_on(tmp_path):
    command = [
        sys.executable,
        "-m",
        "statetrack.cli",
        "reproduce",
        "fig-parity",
        "--scale",
        "quick",
        "--seeds",
        "1",
    ]
    command += ["--only", "[-1,1]", "--out", str(tmp_path), "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    while not any(path.read_text() for path in tmp_path.glob("runs/*/metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == "Stopped with 1 runs to go; the same command goes on from there."
    assert list(tmp_path.glob("runs/*/checkpoint-*.safetensors"))
