"""Checkpoints with a file per process, as one process writes and reads them; two do in test_processes.py."""

import errno
import json
import os
import shutil
from dataclasses import replace

import pytest
import torch

from statetrack.errors import UserError
from statetrack.files import load_tensors, write_json
from statetrack.layers import Model, model_config
from statetrack.run import run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import task
from statetrack.training import Options, loop, sharded_files
from statetrack.training.store import FileStore, checkpoints, read_weights

PARTS = {"checkpoints": "sharded", "say": lambda text: None}


@pytest.fixture(scope="module")
def spec():
    """With a head that is the embedding's table, which is in a checkpoint once."""
    return RunSpec(
        task("parity-dense"),
        model_config("deltanet", d_model=8, heads=2, tied=True),
        TrainingConfig(steps=8, batch=2, train_lengths=(3, 5), log_every=2),
        EvaluationConfig(eval_lengths=(4,), eval_samples=2),
    ).resolved()


@pytest.fixture(scope="module")
def whole(spec, tmp_path_factory):
    """The results of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    run(spec, folder, Options(say=lambda text: None))
    return results(folder)


@pytest.fixture(scope="module")
def once(spec, tmp_path_factory):
    folder = tmp_path_factory.mktemp("once")

    class Stop(Exception):
        pass

    def die(step, row):
        if step == 6:
            raise Stop

    with pytest.raises(Stop):
        run(spec, folder, Options(checkpoint_seconds=0.0, progress=die, **PARTS))
    return folder


@pytest.fixture
def cut(once, tmp_path):
    """A run that died at step 6, with checkpoints of steps 4 and 5."""
    return shutil.copytree(once, tmp_path / "cut")


def results(folder):
    return [(folder / name).read_bytes() for name in ("metrics.jsonl", "model.safetensors")]


def finish(spec, folder, **options):
    """Run to the end; what was said on the way."""
    said = []
    run(spec, folder, Options(**{"checkpoints": "sharded"} | options, say=said.append))
    return " ".join(said)


@pytest.mark.parametrize("then", ["sharded", "whole"])
def test_a_run_goes_on_to_the_same_bytes_with_checkpoints_of_either_kind(spec, whole, cut, then):
    assert [path.name for path in checkpoints(cut)] == ["checkpoint-000000005", "checkpoint-000000004"]
    assert finish(spec, cut, checkpoints=then) == "Going on from step 5 of 8."
    assert results(cut) == whole
    assert checkpoints(cut) == []


def test_a_checkpoint_holds_no_pickle_and_a_manifest_of_checksums(spec, cut):
    folder = checkpoints(cut)[0]
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["manifest.json", "shard-00001-model-00001-of-00001.safetensors"]
    manifest = sharded_files.read_manifest(folder)
    assert (manifest["step"], manifest["run"], manifest["rows"]) == ("5", spec.id, "2")
    assert manifest["files"].keys() == {names[1]}


def test_the_weights_of_a_checkpoint_are_read_without_a_run(spec, cut):
    weights = read_weights(checkpoints(cut)[0])
    model = Model(spec.model, spec.task.vocab_size, spec.task.n_classes)
    model.load_state_dict(weights)
    before = FileStore(cut, spec.id, lambda text: None)
    state = before.load_latest(lambda: loop.new_state(spec, torch.device("cpu")), [2, 4])
    torch.testing.assert_close(dict(model.named_parameters()), dict(state.model.named_parameters()))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def damage_file(folder):
    flip(next(folder.glob("*.safetensors")))


def damage_manifest(folder):
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"step": "5"', '"step": "4"'))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_file, "its checksum does not match"),
        (damage_manifest, "manifest.json is damaged: its checksum does not match"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "files missing or added"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is damaged"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff"), "manifest.json is damaged"),
        (lambda folder: (folder / "x.safetensors").write_bytes(b""), "added: x.safetensors"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(spec, whole, cut, damage, words):
    damage(checkpoints(cut)[0])
    said = finish(spec, cut)
    assert words in said
    assert "Going on from step 4 of 8." in said
    assert results(cut) == whole


def rewrite(folder, **entries):
    """A manifest with other entries, and the checksum that goes with them."""
    manifest = sharded_files.read_manifest(folder) | entries
    write_json(folder / "manifest.json", manifest | {"sha256": sharded_files._digest(manifest)})


@pytest.mark.parametrize(
    ("entries", "words"),
    [({"step": "3"}, "it is of step 3"), ({"run": "0123456789ab"}, "it is of another run, 0123456789ab")],
)
def test_a_checkpoint_of_another_run_or_step_is_passed_over(spec, whole, cut, entries, words):
    for folder in checkpoints(cut):
        rewrite(folder, **entries)
    said = finish(spec, cut)
    assert words in said
    assert "starting from step 0" in said
    assert results(cut) == whole


def test_a_checkpoint_of_another_device_is_refused(spec, cut):
    rewrite(checkpoints(cut)[0], device="cuda")
    with pytest.raises(UserError, match="written by a run on cuda, this one is on cpu"):
        finish(spec, cut)


def test_a_checkpoint_of_another_model_is_passed_over(spec, cut):
    """As after a change of the code that keeps the id."""
    other = replace(spec, model=replace(spec.model, d_model=16)).resolved()
    store = FileStore(cut, spec.id, (said := []).append)
    state = loop.new_state(other, torch.device("cpu"))
    assert store.load_latest(lambda: state, [2, 4]) is None
    assert "its weights are those of another model" in said[0]


def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_which(spec, cut, whole, monkeypatch):
    real = os.fsync

    def full(handle):
        if os.path.realpath(f"/proc/self/fd/{handle}").endswith(".safetensors"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device, in the checkpoint of step 6") as failed:
        finish(spec, cut, checkpoint_seconds=0.0)
    assert failed.value.errno == errno.ENOSPC
    assert f"the last good checkpoint is {cut}/checkpoint-000000005" in str(failed.value)
    assert [path.name for path in cut.glob(".*partial")] == []
    monkeypatch.undo()
    assert finish(spec, cut) == "Going on from step 5 of 8."
    assert results(cut) == whole


def test_what_a_killed_process_was_writing_is_cleared_away(spec, cut, whole):
    shutil.copytree(checkpoints(cut)[0], cut / ".checkpoint-000000006.partial")
    finish(spec, cut)
    assert not (cut / ".checkpoint-000000006.partial").exists()
    assert results(cut) == whole


def test_an_unknown_kind_of_checkpoint_is_refused():
    with pytest.raises(UserError, match="Did you mean 'sharded'"):
        Options(checkpoints="shard")


def test_the_final_weights_are_whole_and_carry_the_spec(spec, cut):
    finish(spec, cut)
    tensors, metadata = load_tensors(cut / "model.safetensors")
    assert json.loads(metadata["spec"]) == spec.to_dict()
    assert tensors.keys() == Model(spec.model, spec.task.vocab_size, spec.task.n_classes).state_dict().keys()
