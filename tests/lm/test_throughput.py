"""Tokens per second, utilisation, memory and time left: beside the metrics, never in them."""

import json
from dataclasses import replace

import pytest
import torch
from corpora import small_corpus

from statetrack.integrations.loggers import logging_to, numbers
from statetrack.layers import model_config
from statetrack.run import run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.training import Options, throughput
from statetrack.training.printed_rows import print_row
from statetrack.training.ranks import Ranks
from statetrack.training.throughput import Meter, flops_per_token, peak_flops

CPU = torch.device("cpu")


@pytest.fixture
def spec(tmp_path):
    return RunSpec(
        small_corpus(tmp_path / "data"),
        model_config("deltanet", d_model=8, heads=2),
        TrainingConfig(steps=6, batch=4, log_every=2),
        EvaluationConfig(eval_lengths=(4, 16), eval_samples=2),
    ).resolved()


class Clock:
    now = 50.0

    def monotonic(self):
        return self.now


def test_the_meter_counts_training_time_only(spec, monkeypatch):
    """Two steps of 4 x 16 tokens in 4 seconds, and 6 seconds of evaluation between them."""
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    meter = Meter(spec, CPU, Ranks())
    meter.start(0)
    clock.now += 3.0
    with meter.paused():
        clock.now += 6.0
    clock.now += 1.0
    row = meter.read(2)
    assert row["tokens"] == 128
    assert row["tokens_per_second"] == 32.0
    assert row["seconds_left"] == 20.0  # four steps at the pace of two in ten seconds, all in all
    clock.now += 2.0
    assert meter.read(4)["tokens_per_second"] == 64.0
    assert "mfu" not in row
    assert row["memory_bytes"] > 0


def test_the_flops_of_a_token_are_six_per_parameter_that_multiplies_it():
    deltanet = model_config("deltanet-60m")
    assert deltanet.tied
    assert flops_per_token(deltanet, 32_000, 2048) == 6 * 55_031_808
    untied = replace(deltanet, tied=False)
    # an untied table is looked up, not multiplied with: both count one table
    assert flops_per_token(untied, 32_000, 2048) == flops_per_token(deltanet, 32_000, 2048)
    hybrid = model_config("deltanet-60m", attention_every=12)
    pure = flops_per_token(hybrid, 32_000, 0)
    assert flops_per_token(hybrid, 32_000, 2048) - pure == 6 * 2048 * 512


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("Some other GPU", None),
    ],
)
def test_the_peak_goes_by_the_name_of_the_device(name, peak):
    assert peak_flops(name, "bfloat16") == peak
    assert peak_flops(name, "float32") is None


def test_utilisation_is_the_share_of_all_devices_peaks(spec, monkeypatch):
    monkeypatch.setattr(throughput, "peak_flops", lambda name, precision: 1e9)
    monkeypatch.setattr(throughput, "time", clock := Clock())
    several = Ranks()
    several.size = 4
    meter = Meter(spec, CPU, several)
    meter.start(0)
    clock.now += 1.0
    flops = 64 * flops_per_token(spec.model, spec.task.vocab_size, 16)
    assert meter.read(1)["mfu"] == pytest.approx(flops / 4e9)


def test_speed_goes_to_a_file_of_its_own_and_to_the_line(spec, tmp_path, capsys):
    run(spec, tmp_path / "run", Options(progress=print_row, say=lambda text: None))
    rows, speeds = (
        [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "throughput.jsonl")
    )
    assert [row["step"] for row in speeds] == [row["step"] for row in rows] == [2, 4, 6]
    assert rows[0].keys() == {"step", "loss", "lr", "grad_norm"}
    assert speeds[0].keys() == {"step", "tokens", "tokens_per_second", "memory_bytes", "seconds_left"}
    first = capsys.readouterr().out.splitlines()[0]
    for part in ("step       2  loss 2.8", "  ppl 16.", "  lr ", "  grad ", " tokens/s  ", " GB  ", " left"):
        assert part in first
    assert "MFU" not in first


def test_tensorboard_has_every_number_of_every_row_once_after_a_resumed_run(spec, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    class Stop(Exception):
        pass

    def logged(cut):
        with logging_to("tensorboard", tmp_path / "run", spec) as log:

            def progress(step, row):
                log(step, row)
                if step == cut:
                    raise Stop

            run(spec, tmp_path / "run", Options(checkpoint_seconds=0.0, progress=progress, say=str))

    with pytest.raises(Stop):
        logged(cut=4)
    logged(cut=None)
    events = reader.EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(row["step"], pytest.approx(row["loss"])) for row in rows]
    assert {"grad_norm", "lr", "tokens_per_second", "perplexity/16"} <= {*events.Tags()["scalars"]}


def test_nested_numbers_get_joined_names():
    row = {"step": 3, "loss": 1.0, "by_split": {"code": {"loss": 2}}, "name": "x"}
    assert dict(numbers(row)) == {"loss": 1.0, "by_split/code/loss": 2.0}


def test_wandb_takes_the_rows_offline(spec, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with logging_to("wandb", tmp_path, spec) as log:
        log(2, {"step": 2, "loss": 1.5})
    assert list((tmp_path / "wandb").glob("offline-run-*"))
