"""`statetrack lm demo` at a tiny size: both ranges, pictures, a summary; a second call finds all of it."""

import signal
import sys
from contextlib import contextmanager

import numpy as np
import pytest

from statetrack.cli import main
from statetrack.lm.compare import compare
from statetrack.lm.demo import DemoSize, specs, summary
from statetrack.lm.layout import bin_edges, layout_of
from statetrack.lm.measured import Measured, Perplexities
from statetrack.lm.shards import write_shards

FLAGS = ["--steps", "6", "--batch", "2", "--context", "8", "--d-model", "16", "--device", "cpu"]


@pytest.fixture
def data(tmp_path):
    documents = [[(7 * i + j) % 16 for j in range(20 + i)] for i in range(20)]
    write_shards(tmp_path / "data", {"train": documents, "heldout": documents[::3]}, 17, 16)
    return tmp_path / "data"


def demo(data, out, *flags):
    main(["lm", "demo", *FLAGS, "--data", str(data), "--out", str(out), *flags])


def test_a_second_call_finds_what_the_first_has_done(data, tmp_path, capsys):
    demo(data, tmp_path / "out")
    first = capsys.readouterr().out
    files = ("loss.png", "loss.svg", "perplexity.png", "perplexity.svg", "perplexity.json")
    before = {name: (tmp_path / "out" / name).read_bytes() for name in files}
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/runs").rglob("done.json")}
    assert len(written) == 2
    demo(data, tmp_path / "out")
    second = capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == before
    without_times = [
        [line for line in text.splitlines() if "step" not in line and " s. See" not in line]
        for text in (first, second)
    ]
    assert without_times[0] == without_times[1]
    assert "Past the training length, [0,1] has perplexity" in first


def test_ranges_differ_in_nothing_else(data):
    one, other = specs(data, DemoSize(steps=3))
    assert {one.model.mixer.eigenvalues, other.model.mixer.eigenvalues} == {"[0,1]", "[-1,1]"}
    assert (one.task, one.training, one.evaluation, one.seed) == (
        other.task,
        other.training,
        other.evaluation,
        other.seed,
    )


def test_an_interrupted_demo_continues_to_the_same_numbers(data, tmp_path, monkeypatch, capsys):
    """Ctrl-C in the middle of the second run."""
    demo(data, tmp_path / "whole")

    @contextmanager
    def stop_in_the_second_run(runs):
        yield lambda i: lambda step, row: signal.raise_signal(signal.SIGINT) if (i, step) == (1, 3) else None

    with monkeypatch.context() as patched:
        patched.setattr("statetrack.commands.lm.demo.progress_bars", stop_in_the_second_run)
        with pytest.raises(SystemExit) as stopped:
            demo(data, tmp_path / "stopped")
    assert stopped.value.code == 130
    assert "Stopped at step 3 of 6; the same command goes on from there." in capsys.readouterr().err
    assert not (tmp_path / "stopped/perplexity.json").exists()
    demo(data, tmp_path / "stopped")
    assert "Going on from step 3 of 6." in capsys.readouterr().err
    for name in ("perplexity.json", "loss.svg"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_without_matplotlib_nothing_is_trained(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stopped:
        demo(data, tmp_path / "out")
    assert stopped.value.code == 2
    assert not (tmp_path / "out").exists()


def measured(shift, noise=0.0):
    """Two ranges on 20 documents of ten tokens; [-1,1] loses `shift` more per token."""
    layout = layout_of(np.arange(0, 202, 10), bin_edges(20, 2))
    generator = np.random.default_rng(0)
    losses = [
        2.0 * layout.tokens,
        (2.0 + shift) * layout.tokens + noise * generator.normal(size=len(layout.tokens)),
    ]
    models = [
        Measured(name, f"DeltaNet {name}", {"heldout": values}, context=10)
        for name, values in zip(("[0,1]", "[-1,1]"), losses, strict=True)
    ]
    return Perplexities("", "concatenated", {"heldout": layout}, tuple(models))


@pytest.mark.parametrize(
    ("shift", "noise", "said"),
    [
        (0.1, 0.0, "[0,1] is better by 10.5 %"),
        (-0.1, 0.0, "[-1,1] is better by 10.5 %"),
        (0.0, 5.0, "no difference that these documents show"),
    ],
)
def test_the_summary_names_the_better_range_only_where_the_interval_does(shift, noise, said):
    found = measured(shift, noise)
    text = summary(found, compare(found, "DeltaNet [0,1]", "DeltaNet [-1,1]", resamples=500))
    assert text.count(said) >= 2
    assert "Each range was trained once" in text
