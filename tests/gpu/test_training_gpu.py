"""Training on a GPU: a step as one CUDA graph is the eager step; runs resume exactly and share a GPU."""

import json
import random
import socket
from dataclasses import replace

import pytest
import torch

from statetrack.files import load_tensors
from statetrack.layers import model_config
from statetrack.ops.checks import checked
from statetrack.ops.triton_runtime import compile_ahead as triton_ahead
from statetrack.run import run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.sweep import Job, sweep
from statetrack.tasks import task
from statetrack.training import Options, read_metrics
from statetrack.training.graph_step import GraphStep
from statetrack.training.ranks import PARALLEL, start_processes
from statetrack.training.source import source_of
from statetrack.training.state import new_state

pytestmark = pytest.mark.gpu

EVALUATION = EvaluationConfig(eval_samples=64, eval_batch=64)
TRAINING = TrainingConfig(steps=200, batch=64, log_every=20)
SPECS = {
    "word problem": RunSpec(task("s5-swaps"), model_config("deltanet-no-conv"), TRAINING, EVALUATION),
    "parity, Mamba": RunSpec(task("parity"), model_config("mamba"), TRAINING, EVALUATION),
    "arithmetic": RunSpec(task("mod-arithmetic"), model_config("deltanet", layers=2), TRAINING, EVALUATION),
    "brackets": RunSpec(task("mod-arithmetic-brackets"), model_config("deltanet"), TRAINING, EVALUATION),
    "several widths": RunSpec(
        task("s5-swaps"),
        model_config("deltanet-no-conv"),
        # at 1e-3 the loss falls so steeply that a change of 1e-7 in the weights changes it by 2e-3
        replace(TRAINING, train_lengths=(8, 40), lr=2e-4),
        EVALUATION,
    ),
    "bfloat16 layers": RunSpec(
        task("s5-swaps"), model_config("gated-deltanet"), replace(TRAINING, precision="bfloat16"), EVALUATION
    ),
    "noisy states": RunSpec(
        task("s5-swaps"),
        model_config("deltanet-no-conv", beta="hard"),
        # at 1e-3 the loss falls from step 80 on, and then, in bfloat16 and with the same noise, a change
        # of 1e-7 in the first weights changes it by 4e-2, and one of 1e-3 by 1e-1; at 2e-4 the latter by 9e-4
        replace(
            TRAINING,
            initial_states="noise",
            centred_gradient=True,
            z_loss=1e-4,
            precision="bfloat16",
            lr=2e-4,
        ),
        EVALUATION,
    ),
    "carried states": RunSpec(
        task("s5-swaps"),
        model_config("deltanet", beta="hard"),
        replace(TRAINING, initial_states="carried", lr=2e-4),
        EVALUATION,
    ),
    "hard gates, isometry": RunSpec(
        task("s5-swaps"),
        model_config("kda", beta="hard", gate="hard"),
        replace(TRAINING, isometry=0.003, lr=2e-4),
        EVALUATION,
    ),
    "carried while right": RunSpec(
        task("s5-swaps"),
        model_config("deltanet", beta="hard"),
        replace(TRAINING, initial_states="carried-right", label_smoothing=0.1, lr=2e-4),
        EVALUATION,
    ),
    "curriculum, consistency": RunSpec(
        task("s5-swaps"),
        model_config("deltanet-no-conv", beta="hard"),
        replace(
            TRAINING,
            initial_states="carried-right",
            short_steps=100,
            short_batch=128,
            consistency=0.01,
            lr=2e-4,
        ),
        EVALUATION,
    ),
}
GRAPHS = {"several widths": 4, "curriculum, consistency": 2}  # else 1


def graph_step(spec, say, graphs=True):
    device = torch.device("cuda")
    return GraphStep(spec, new_state(spec, device), source_of(spec, device), say, graphs)


def losses(spec, graphs, packed=True, every=20):
    """The mean loss of every so many steps, and the step that took them."""
    step = graph_step(spec, pytest.fail, graphs)
    if not packed:
        step.packer = None
    found = []
    with step.on_stream():
        for number in range(1, spec.training.steps + 1):
            step()
            if number % every == 0:
                found.append(step.state.loss_sum.item() / every)
                step.state.loss_sum.zero_()
    torch.cuda.synchronize()  # what the step works on is read on another stream
    return torch.tensor(found), step


@pytest.mark.parametrize("name", SPECS)
def test_two_hundred_captured_steps_are_two_hundred_eager_steps(name):
    spec = SPECS[name].resolved()
    eager, eager_step = losses(spec, graphs=False)
    captured, step = losses(spec, graphs=True)
    assert len(step.graphs) == GRAPHS.get(name, 1)
    torch.testing.assert_close(captured, eager, rtol=1e-3, atol=1e-3)
    # as many random numbers were drawn
    assert torch.equal(step.state.generator.get_state(), eager_step.state.generator.get_state())


@pytest.mark.parametrize("name", ["word problem", "noisy states", "carried states"])
def test_captured_steps_draw_what_eager_steps_draw(name):
    """With weights that stay as they are, the loss of a step depends on its draws alone.

    Other noise changes it by 5e-3 (the median of 20 steps), bfloat16 instead of float32 layers by 7e-5.
    """
    spec = SPECS[name].resolved()
    spec = replace(spec, training=replace(spec.training, lr=0.0, schedule="constant"))
    eager, _ = losses(spec, graphs=False, every=1)
    captured, step = losses(spec, graphs=True, every=1)
    assert step.graphs
    torch.testing.assert_close(captured, eager, rtol=0, atol=3e-4)


@pytest.mark.parametrize("name", ["parity, Mamba", "arithmetic"])
def test_packed_steps_are_padded_steps(name):
    spec = SPECS[name].resolved()
    spec = replace(spec, training=replace(spec.training, steps=60))
    packed, step = losses(spec, graphs=True)
    assert step.packer is not None
    padded, _ = losses(spec, graphs=True, packed=False)
    torch.testing.assert_close(packed, padded, rtol=1e-3, atol=1e-3)


def test_copies_of_the_weights_are_the_weights_rounded():
    spec = SPECS["bfloat16 layers"].resolved()
    spec = replace(spec, training=replace(spec.training, steps=20, train_lengths=(8, 40)))
    _, step = losses(spec, graphs=True)
    assert step.graphs
    for weight, copy in step.half_weights.of.items():
        torch.testing.assert_close(copy.detach(), weight.detach().bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["parity, Mamba", "bfloat16 layers"])
def test_compiling_kernels_ahead_changes_no_bit_of_a_run(name, monkeypatch):
    def state():
        _, step = losses(replace(spec, training=replace(spec.training, steps=4)), graphs=True)
        return [*step.state.model.parameters(), step.state.loss_sum, step.state.generator.get_state()]

    spec = SPECS[name].resolved()
    ahead = state()
    monkeypatch.setattr(triton_ahead, "_compiling_in_threads", None)
    assert all(torch.equal(a, b) for a, b in zip(ahead, state(), strict=True))


@pytest.mark.parametrize("name", ["word problem", "carried states"])
def test_a_run_cut_in_the_middle_ends_as_if_it_had_not_been(name, tmp_path):
    spec = SPECS[name].resolved()

    class Stop(Exception):
        pass

    def die(step, row):
        if step == 100:
            raise Stop

    run(spec, tmp_path / "whole", Options(say=print))
    with pytest.raises(Stop):
        run(spec, tmp_path / "cut", Options(checkpoint_seconds=0.0, progress=die))
    run(spec, tmp_path / "cut", Options(say=print))
    whole, cut = (load_tensors(tmp_path / name / "model.safetensors")[0] for name in ("whole", "cut"))
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=0, atol=0)


def test_what_cannot_be_captured_runs_eagerly_and_says_why():
    spec, said = SPECS["word problem"].resolved(), []
    with checked():
        step = graph_step(spec, said.append)
        with step.on_stream():
            for _ in range(5):
                step()
    assert step.graphs == {}
    assert said == ["No CUDA graph, steps are launched kernel by kernel: values are checked in every step"]


def test_runs_that_share_a_gpu_compute_what_they_compute_alone(tmp_path):
    specs = [replace(SPECS["word problem"], seed=seed).resolved() for seed in range(3)]
    jobs = {
        name: [Job(str(spec.seed), spec, tmp_path / name / spec.id) for spec in specs]
        for name in ("alone", "shared")
    }
    assert sweep(jobs["alone"], workers=1) == []
    assert sweep(jobs["shared"], workers=1, runs_per_worker=3) == []
    for alone, shared in zip(jobs["alone"], jobs["shared"], strict=True):
        ours, theirs = (json.loads((job.folder / "done.json").read_text()) for job in (alone, shared))
        assert ours["metrics"] == theirs["metrics"]


def test_a_file_of_sequences_is_trained_on_in_graphs(tmp_path):
    drawn, path = random.Random(0), tmp_path / "bits.jsonl"
    rows = [[drawn.randrange(2) for _ in range(drawn.randint(3, 40))] for _ in range(400)]
    lines = [{"inputs": r, "targets": [sum(r[: t + 1]) % 2 for t in range(len(r))]} for r in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = replace(SPECS["word problem"], task=task(f"jsonl:{path}")).resolved()
    eager, _ = losses(spec, graphs=False)
    captured, step = losses(spec, graphs=True)
    assert step.graphs
    torch.testing.assert_close(captured, eager, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_process_of_torchrun_computes_what_one_without_it_does(parallel, tmp_path, monkeypatch):
    """One rank, on NCCL: the eager step in two micro-batches against the graph."""
    spec = SPECS["parity, Mamba"].resolved()
    spec = replace(spec, training=replace(spec.training, steps=40))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "1", "RANK": "0"}
    for name, value in (places | {"LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    run(spec, tmp_path / "alone", Options(say=print))
    with start_processes(torch.device("cuda")) as ranks:
        run(spec, tmp_path / "ranks", Options(say=print, ranks=ranks, parallel=parallel, micro_batches=2))
    alone, several = (
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("alone", "ranks")
    )
    assert several == pytest.approx(alone, rel=1e-3)
