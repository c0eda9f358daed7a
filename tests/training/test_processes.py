"""Two processes (gloo) compute what one computes: DDP, FSDP2 and ZeRO-2, each in two micro-batches."""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from process_specs import CUT, SPEC, file_spec, text_spec
from torch import Generator
from torch.nn.parallel import DistributedDataParallel

from statetrack.errors import UserError
from statetrack.files import load_tensors
from statetrack.run import load_run, main, run
from statetrack.tasks import IGNORE, task
from statetrack.training import Options, build_model, evaluate
from statetrack.training.protocols import WHOLE, Share
from statetrack.training.ranks import PARALLEL, start_processes
from statetrack.training.sharded_step import ShardedStep
from statetrack.training.source import source_of
from statetrack.training.state import new_state
from statetrack.training.store import checkpoints

HERE = Path(__file__).parent
QUIET = {"device": "cpu", "say": lambda text: None}
CPU = torch.device("cpu")


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(folder, expected_folder):
    """Rows and final weights, to rounding."""
    ours, expected = rows(folder), rows(expected_folder)
    assert [row["step"] for row in ours] == [row["step"] for row in expected]
    for name in ("loss", "lr"):
        assert [row[name] for row in ours] == pytest.approx([row[name] for row in expected], rel=1e-5)
    assert ours[-1].get("accuracy") == expected[-1].get("accuracy")
    for name in {"grad_norm", "heldout_loss"} & expected[-1].keys():
        assert ours[-1][name] == pytest.approx(expected[-1][name], rel=1e-5)
    weights = [load_tensors(path / "model.safetensors")[0] for path in (folder, expected_folder)]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="session")
def one(tmp_path_factory):
    """The folder of one process that nothing happened to."""
    folder = tmp_path_factory.mktemp("one")
    run(SPEC, folder, Options(**QUIET))
    return folder


@pytest.fixture(scope="session")
def two(tmp_path_factory):
    """The folder that two_processes.py has filled. Of several test workers one does it for all."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "two-processes"
    out.mkdir(exist_ok=True)
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "said").exists():
            for parallel in PARALLEL:
                _cut_at_one(out / parallel / "from one")
            file_spec(out)
            text_spec(out)
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += [str(HERE / "two_processes.py"), str(out)]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert ran.returncode == 0, ran.stderr
            (out / "said").write_text(ran.stdout + ran.stderr)
    return out


def _cut_at_one(folder):
    """One process, stopped after step CUT, with its checkpoint."""

    class Stop(Exception):
        pass

    def die(step, row):
        if step > CUT:
            raise Stop

    with pytest.raises(Stop):
        run(SPEC, folder, Options(checkpoint_seconds=0.0, progress=die, **QUIET))


def ended(two, what):
    """How something ended on both ranks."""
    return [json.loads((two / f"rank-{rank}.json").read_text())[what] for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PARALLEL)
def test_two_processes_have_the_losses_and_weights_of_one(parallel, two, one):
    assert_same_run(two / parallel / "whole", one)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_run_of_two_processes_goes_on_at_one(parallel, two, one, tmp_path):
    folder, said = tmp_path / "to one", []
    shutil.copytree(two / parallel / "to one", folder)
    run(SPEC, folder, Options(device="cpu", say=said.append))
    assert said == [f"Going on from step {CUT} of 20."]
    assert_same_run(folder, one)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_run_of_one_process_goes_on_at_two(parallel, two, one):
    folder = two / parallel / "from one"
    assert_same_run(folder, one)
    # what came before the checkpoint is that of one process to the bit, so it was not computed again
    assert rows(folder)[: CUT // 2] == rows(one)[: CUT // 2]
    assert rows(folder) != rows(one)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_resumed_run_of_two_processes_ends_with_the_same_bytes(parallel, two):
    for name in ("metrics.jsonl", "model.safetensors"):
        whole, cut = ((two / parallel / end / name).read_bytes() for end in ("whole", "cut"))
        assert whole == cut


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_signal_to_one_rank_stops_both_at_one_step_with_one_checkpoint(parallel, two):
    expected = ["Interrupted", f"Stopped at step {CUT} of 20; the same command goes on from there."]
    assert ended(two, f"{parallel}, stopped") == [expected, expected]
    (checkpoint,) = checkpoints(two / parallel / "to one")
    assert checkpoint.name == f"checkpoint-{CUT:09d}" + (".safetensors" if parallel == "ddp" else "")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "zero2"])
def test_each_of_two_processes_writes_its_part_of_a_checkpoint(parallel, two):
    (checkpoint,) = checkpoints(two / parallel / "to one")
    parts = [load_tensors(path)[0] for path in sorted(checkpoint.glob("*.safetensors"))]
    for name, weight in build_model(SPEC).state_dict().items():
        rows_there = [len(part[f"model.{name}"]) for part in parts if f"model.{name}" in part]
        assert sum(rows_there) == len(weight)
        assert max(rows_there) == -(-len(weight) // 2)
    assert sum(part.keys() >= {"generator", "loss_sum"} for part in parts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PARALLEL)
def test_sharded_weights_are_written_whole(parallel, two):
    done = json.loads((two / parallel / "whole/done.json").read_text())
    assert done["machine"]["processes"] == f"2, {parallel}"
    spec, model = load_run(two / parallel / "whole")
    assert evaluate(model, spec, CPU)["accuracy"] == done["metrics"]["accuracy"]


@pytest.fixture(scope="session")
def text(two, tmp_path_factory):
    """The folder of one process that trains the language model."""
    folder = tmp_path_factory.mktemp("text")
    run(text_spec(two), folder, Options(**QUIET))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PARALLEL)
def test_two_processes_train_the_language_model_of_one(parallel, two, text):
    assert_same_run(two / parallel / "text/whole", text)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_language_model_goes_on_at_the_same_number_of_processes_to_the_bit(parallel, two, text, tmp_path):
    for name in ("metrics.jsonl", "model.safetensors"):
        whole, cut = ((two / parallel / "text" / end / name).read_bytes() for end in ("whole", "cut"))
        assert whole == cut
    folder, said = shutil.copytree(two / parallel / "text/to one", tmp_path / "one"), []
    run(text_spec(two), folder, Options(device="cpu", say=said.append))
    assert said == ["Going on from step 5 of 8."]
    assert_same_run(folder, text)


@pytest.mark.slow
def test_the_loss_is_the_mean_over_all_labels_even_where_ranks_have_different_numbers(two, tmp_path):
    spec = file_spec(two)
    run(spec, tmp_path, Options(**QUIET))
    assert_same_run(two / "file", tmp_path)
    batches = [source_of(spec, CPU).batch(0, Share(rank, 2), Generator()) for rank in range(2)]
    assert len({int((batch.targets != IGNORE).sum()) for batch in batches}) == 2


@pytest.mark.slow
def test_what_fails_on_one_rank_fails_on_all(two):
    diverged, full = ended(two, "diverged"), ended(two, "full disk")
    assert {kind for kind, _ in (*diverged, *full)} == {"Diverged", "OSError"}
    assert all("Try a smaller --lr" in text for _, text in diverged)
    kept = "No space left on device, in the checkpoint of step 6; the last good checkpoint is "
    assert all(text.endswith(f"{kept}{two}/full/checkpoint-000000005") for _, text in full)
    assert ended(two, "refused on rank 1") == [["UserError", "rank 1 cannot"]] * 2


@pytest.mark.slow
def test_several_processes_warn_of_nothing(two):
    assert "Warning" not in (two / "said").read_text()


@pytest.mark.slow
def test_a_batch_that_cannot_be_cut_is_refused_by_every_rank_and_told_once(tmp_path):
    """As torchrun starts them, but each with an exit code of its own to look at."""
    (tmp_path / "spec.json").write_text(json.dumps(SPEC.to_dict()))
    command = [sys.executable, "-m", "statetrack.run", "spec.json", "--device", "cpu", "--out", "out"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [*command, "--parallel", "fsdp", "--micro-batches", "3"],
            env=os.environ | places | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert said == [
        "error: training: batch is 8, which 2 processes x 3 micro-batches do not divide. "
        "Choose a multiple of 6, or other numbers of them.\n",
        "",
    ]
    assert not (tmp_path / "out").exists()


@pytest.fixture
def alone(monkeypatch):
    """The only process that torchrun started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "1", "RANK": "0"}
    for name, value in (places | {"LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    with start_processes(CPU) as ranks:
        yield ranks


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_single_process_of_torchrun_computes_what_one_without_it_does(parallel, one, alone, tmp_path):
    run(SPEC, tmp_path, Options(ranks=alone, parallel=parallel, **QUIET))
    assert_same_run(tmp_path, one)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_single_process_of_torchrun_goes_on_with_weights_cut_as_its_own_are(parallel, one, alone, tmp_path):
    _cut_at_one(tmp_path)
    said = []
    run(SPEC, tmp_path, Options(ranks=alone, parallel=parallel, **QUIET | {"say": said.append}))
    assert said == [f"Going on from step {CUT + 1} of 20."]  # the next row, of step 10, ended it
    assert_same_run(tmp_path, one)


def test_ddp_is_around_the_model_in_training_and_not_in_evaluation(alone):
    state = new_state(SPEC, CPU)
    step = ShardedStep(SPEC, state, source_of(SPEC, CPU), alone, "ddp", 2)
    assert isinstance(step.model, DistributedDataParallel)
    assert step.model.module is state.model is step.state.model


def test_several_processes_without_torchrun_are_refused(tmp_path, capsys):
    (tmp_path / "spec.json").write_text(json.dumps(SPEC.to_dict()))
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "spec.json"), "--parallel", "ddp"])
    assert end.value.code == 2
    assert "torchrun --nproc-per-node 2 -m statetrack.run SPEC --parallel ddp" in capsys.readouterr().err


def test_micro_batches_of_one_process_change_nothing_but_rounding(one, tmp_path):
    run(SPEC, tmp_path, Options(micro_batches=4, **QUIET))
    assert_same_run(tmp_path, one)


def test_micro_batches_must_divide_the_batch(tmp_path):
    with pytest.raises(UserError, match="batch is 8, which 1 processes x 3 micro-batches do not divide"):
        run(SPEC, tmp_path / "out", Options(micro_batches=3, **QUIET))


@pytest.mark.parametrize(
    "changes", [{}, {"train_samples": 24}, {"train_lengths": (9, 9)}], ids=["drawn", "fixed", "one length"]
)
@pytest.mark.parametrize("name", ["parity", "parity-dense"])
def test_the_shares_of_a_batch_make_up_the_batch(name, changes, change):
    spec = change(
        replace(SPEC, task=task(name), evaluation=replace(SPEC.evaluation, eval_lengths=(8, 16))), **changes
    )
    whole, parts = source_of(spec, CPU), [source_of(spec, CPU) for _ in range(2)]
    streams = [Generator().manual_seed(5) for _ in range(3)]
    for step in range(4):
        for source in (whole, *parts):
            source.prepare(step)
        expected = whole.batch(step, WHOLE, streams[2])
        shares = [
            parts[rank].batch(step, Share(rank, 2, micro, 2), streams[rank])
            for rank in range(2)
            for micro in range(2)
        ]
        assert {len(share.inputs) for share in shares} == {2}
        for found, whole_tensor in zip(zip(*shares, strict=True), expected, strict=True):
            assert torch.equal(torch.cat(found), whole_tensor)
