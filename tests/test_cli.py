"""The command line as a user meets it: exit codes, one-line errors, no tracebacks."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from statetrack.cli import main
from statetrack.commands.train import read_arguments
from statetrack.exit_codes import exit_codes
from statetrack.spec import RunSpec

SMALL = ["--d-model", "8", "--heads", "2", "--steps", "6", "--batch", "4"]
SMALL += ["--log-every", "2", "--eval-samples", "8"]


def statetrack(*arguments, **options):
    command = [sys.executable, "-m", "statetrack.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


def exit_code(arguments):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    return exit.value.code


def test_help_lists_the_commands(capsys):
    main([])
    assert {"demo", "train", "bench"} <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "Did you mean 'train'"),
        (["train", "--task", "s5-swap"], "Did you mean 's5-swaps'"),
        (["train", "--mixer", "manba"], "Did you mean 'mamba'"),
        (["train", "--stepz", "3"], "--steps"),
        (["train", "--steps", "many"], "many"),
        (["train", "--steps", "-4"], "steps is -4"),
        (["train", "--heads", "3"], "does not divide"),
        (["train", "--eigenvalues", "[0,2]"], "[0,2]"),
        (["train", "--train-lengths", "-3", "5"], "train_lengths is -3 5"),
        (["train", "--device", "tpux"], "expected auto, cpu or cuda"),
        (["train", "--task"], "--task needs a value"),
        (["train", "--device", "meta"], "expected auto, cpu or cuda"),
        (["train", "--beta2", "1"], "below 1"),
        (["train", "--seed", "-1"], "seed is -1"),
        (["train", "--head-dim", "0"], "head_dim is 0"),
        (["train", "--value-dim", "-3"], "value_dim is -3"),
        (["train", "--convolution", "-1"], "convolution is -1"),
        (["train", "--mlp-ratio", "nan"], "mlp_ratio is nan"),
        (["train", "--mlp-ratio", "1e308"], "mlp_ratio is 1e+308, expected a number from 0"),
        (["train", "--layers", "1000000000"], "layers is 1000000000, expected at most 100,000"),
        (
            ["train", "--batch", "9" * 20],
            "batch is 99999999999999999999, expected a number of at most 64 bits",
        ),
        (["train", "--head-dim", "9" * 20], "expected a number of at most 64 bits"),
        (["train", "--head-dim", "9" * 18], "its sizes are too large for any machine"),
        (["train", "--out", ""], "--out is empty, expected a folder"),
        (["train", "--mixer", "mamba", "--num-heads", "3"], "Here: heads, though not in this task and mixer"),
        (["train", "--learning-rate", "3"], "Here: lr. More"),
        (["train", "--checkpoint-seconds", "nan"], "checkpoint_seconds is nan"),
        (["train", "--checkpoint-seconds", "-1"], "checkpoint_seconds is -1"),
        (["train", "--mixer", "mamba", "--convolution", "0"], "convolution is 0"),
        (["train", "--mixer", "mamba", "--d-state", "0"], "d_state is 0"),
        (["train", "--mixer", "dense-transition", "--size", "0"], "size is 0"),
        (["train", "--group", "Q8", "--task", "word-problem"], "'Q8' is not known"),
        (["bench", "--threads", "0"], "threads is 0"),
        (["bench", "--only", "softmax"], "matches no case"),
    ],
)
def test_mistakes_end_with_code_2_and_name_the_problem(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_code(arguments) == 2
    shown = capsys.readouterr()
    assert message in " ".join((shown.err + shown.out).split())
    assert "Traceback" not in shown.err
    assert not list(tmp_path.iterdir())


def test_every_field_of_the_spec_is_a_flag():
    flags = (
        "--task s5-swaps --mixer deltanet --eigenvalues [0,1] --layers 2 --steps 7 --batch 3 --lr 0.5 "
        "--seed 9 --gated --householders 2 --convolution 0 --train-lengths 4 6 --eval-lengths 4 8 --clip 0 "
        "--schedule constant --no-residual --tokens-per-element 2"
    )
    _, spec = read_arguments(flags.split())
    assert spec.model.mixer.eigenvalues == "[0,1]"
    assert (spec.model.layers, spec.training.steps, spec.training.batch, spec.seed) == (2, 7, 3, 9)
    assert (spec.model.mixer.gated, spec.model.mixer.householders, spec.model.residual) == (True, 2, False)
    assert (spec.task.inputs, spec.task.tokens_per_element) == ("swaps", 2)
    assert spec.evaluation.eval_lengths == (4, 8)


def test_print_spec_gives_a_file_that_runs(tmp_path, capsys):
    main(["train", *SMALL, "--print-spec"])
    path = tmp_path / "spec.json"
    path.write_text(capsys.readouterr().out)
    from statetrack.run import main as run_spec

    run_spec([str(path), "--out", str(tmp_path / "out"), "--device", "cpu"])
    assert json.loads((tmp_path / "out/done.json").read_text())["metrics"]["step"] == 6


def test_train_writes_a_folder_named_by_the_spec_and_does_not_repeat_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["train", *SMALL])
    (folder,) = (tmp_path / "results").iterdir()
    assert folder.name == RunSpec.load(folder / "spec.json").id
    main(["train", *SMALL])
    assert "is finished already" in capsys.readouterr().out


def test_another_spec_in_the_same_folder_is_refused(tmp_path, capsys):
    main(["train", *SMALL, "--out", str(tmp_path)])
    assert exit_code(["train", *SMALL, "--out", str(tmp_path), "--seed", "1"]) == 2
    assert "different spec (seed 0, here 1)" in capsys.readouterr().err


def test_waiting_threads_sleep_early_unless_the_user_says_otherwise(monkeypatch, capsys):
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    main(["train", "--print-spec"])
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    main(["train", "--print-spec"])
    assert os.environ["GOMP_SPINCOUNT"] == "1000"


def test_values_are_checked_when_asked_for(tmp_path):
    main(["train", *SMALL, "--check-values", "--out", str(tmp_path)])


@pytest.mark.slow
def test_control_c_ends_with_code_130_and_one_line(tmp_path):
    command = [sys.executable, "-m", "statetrack.cli", "train", *SMALL, "--steps", "100000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--out", str(tmp_path)], env=environment, **pipes)
    while not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.startswith("Stopped at step")
    assert "Traceback" not in errors
    assert list(tmp_path.glob("checkpoint-*.safetensors"))


def test_an_output_folder_that_cannot_be_made_is_a_clear_error(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert exit_code(["train", *SMALL, "--out", str(tmp_path / "file" / "run")]) == 2
    assert "cannot be made: Not a directory" in capsys.readouterr().err


def test_a_name_too_long_is_the_users_mistake(tmp_path, capsys):
    assert exit_code(["train", *SMALL, "--out", str(tmp_path / ("x" * 300))]) == 2
    assert "File name too long" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_is_one_line(error, capsys):
    with pytest.raises(SystemExit) as left, exit_codes():
        raise error
    assert left.value.code == 1
    told = capsys.readouterr().err
    assert told.startswith("error: out of memory")
    assert told.count("\n") == 1
    assert "Choose a smaller model, batch" in told


def test_other_errors_keep_their_traceback():
    with pytest.raises(RuntimeError, match="a bug"), exit_codes():
        raise RuntimeError("a bug")


def test_a_wrong_backend_in_the_environment_is_named_before_the_header(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STATETRACK_BACKEND", "Chunked")
    assert exit_code(["train", *SMALL, "--out", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr()
    assert "STATETRACK_BACKEND 'Chunked' is not known. Did you mean 'chunked'" in shown.err
    assert not shown.out
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("STATETRACK_BACKEND", "")  # as if it were not set
    main(["train", *SMALL, "--out", str(tmp_path / "run")])


@pytest.mark.parametrize(
    "command",
    [
        ["compile", "--group", "S3", "--out"],
        ["reproduce", "fig-parity", "--scale", "smoke", "--out"],
        ["explain", "--regex", "ab", "--alphabet", "ab", "--html"],
    ],
)
def test_a_file_where_a_folder_is_expected_is_the_users_mistake(command, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert exit_code([*command, str(tmp_path / "file" / "x.json")]) == 2
    assert "Choose another path" in capsys.readouterr().err


def test_control_c_while_torch_loads_is_one_line():
    code = """
import sys
from statetrack.cli import main

class Interrupts:
    def find_spec(name, *_):
        if name == "torch":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts)
main(["train"])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 130
    assert result.stderr == "Stopped.\n"


def test_demo_prints_a_table_and_writes_a_self_contained_report(tmp_path, monkeypatch, capsys):
    """The whole demo with two steps per run: everything but the accuracy."""
    from dataclasses import replace

    import statetrack.commands.demo as demo

    def tiny(quick):
        def shrink(spec):
            return replace(
                spec,
                training=replace(spec.training, steps=2, batch=2),
                evaluation=replace(spec.evaluation, eval_samples=4),
            ).resolved()

        return [replace(r, spec=shrink(r.spec)) for r in planned(quick)]

    planned = demo.runs
    monkeypatch.setattr(demo, "runs", tiny)
    monkeypatch.chdir(tmp_path)
    main(["demo"])
    shown = capsys.readouterr().out
    assert "8x = 256" in shown
    assert shown.count("[-1,1]") >= 3
    page = (tmp_path / "results/demo/report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    assert shown.count("most frequent answer") == page.count("most frequent answer") == 2
    assert not any(mark in page for mark in ("http://", "https://", "<script"))
    assert (tmp_path / "results/demo/accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_bench_compares_with_peers_and_measures_memory(tmp_path, monkeypatch, capsys):
    import torch

    import statetrack.bench.cpu_report as bench
    from statetrack.bench.cases import DeltaRuleCase, GatedCase, GatedDeltaCase, KdaCase, SelectiveScanCase

    gated = [case(1, 16, 1, 8) for case in (GatedCase, KdaCase, GatedDeltaCase)]
    cases = [SelectiveScanCase(1, 16, 8, 4), DeltaRuleCase(1, 16, 1, 8), *gated]
    monkeypatch.setattr(bench, "CPU_CASES", cases)
    monkeypatch.setattr(bench, "growth_cases", lambda: [[DeltaRuleCase(1, T, 1, 8) for T in (8, 16)]])
    threads = torch.get_num_threads()
    try:
        main(["bench", "--seconds", "0", "--threads", "1", "--json", str(tmp_path / "bench.json")])
    finally:
        torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "bench.json").read_text())["comparisons"]
    assert [row["peer"] for row in rows] == ["mambapy"] + 4 * ["transformers"]
    assert all(row["speedup"] > 0 and row["peer_bytes"] >= 0 for row in rows)
    assert [row.get("sign_cost", 0) > 0 for row in rows] == [True, False, True, True, True]
    shown = capsys.readouterr().out
    assert "us per token" in shown
    assert "as a multiple of its time in [0,1]" in shown


@pytest.mark.parametrize(
    "kind", ["SelectiveScanCase", "DeltaRuleCase", "GatedCase", "KdaCase", "GatedDeltaCase"]
)
def test_bench_peers_compute_what_we_compute(kind):
    """A benchmark of two different functions would be worth nothing."""
    import torch

    from statetrack.bench.cases import KINDS

    case = KINDS[kind](2, 37, 4, 8)
    gradients = []
    for who in ("ours", "peer"):
        leaves, out = case._inputs()
        work = getattr(case, who)
        case_inputs = (leaves, out)
        object.__setattr__(case, "_inputs", lambda case_inputs=case_inputs: case_inputs)
        work()()
        object.__delattr__(case, "_inputs")
        gradients.append([x.grad for x in leaves])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
